"""Objects in storage emulators, behind a proxy that injects faults."""

import random

import pytest

from difftx.errors import UnreadableError, UserError
from difftx.files import read_file
from difftx.storage import objects
from difftx.storage.paths import path_of

TRANSIENT = ["429", "500", "503", "reset", "lost", "slow", "cut"]


def test_a_write_replaces_only_the_generation_that_was_read(bucket):
    path = bucket.folder() / "a" / "b"
    assert objects.read(path) is None
    first = objects.write_if(path, b"first", None)
    assert first
    assert objects.write_if(path, b"other", None) is None
    second = objects.write_if(path, b"second", first)
    assert second
    assert second != first
    assert objects.write_if(path, b"third", first) is None
    assert objects.read(path) == (b"second", second)
    bucket.plan()
    second = objects.write_if(path, b"again", second)
    assert bucket.plan()["requests"] == {"write": 1}
    objects.delete_if(path, first)
    assert objects.read(path) == (b"again", second)
    objects.delete_if(path, second)
    objects.delete_if(path, second)
    assert objects.read(path) is None
    assert objects.write_if(path, b"third", second) is None


@pytest.mark.parametrize("fault", [*TRANSIENT, "short"])
def test_every_request_survives_faults(bucket, fault, quick_retries):
    folder, content = bucket.folder(), random.Random(0).randbytes(5000)
    objects.write(folder / "before", content)
    bucket.plan(kinds=[fault], in_a_row=1)
    first = objects.write_if(folder / "a", b"first", None)
    assert first
    assert objects.write_if(folder / "a", b"second", None) is None
    assert objects.write_if(folder / "a", content, first)
    objects.write(folder / "b" / "c", content)
    assert read_file(folder / "a") == content
    assert read_file(folder / "b" / "c") == content
    assert objects.list_folder(folder) == {"a": False, "b": True, "before": False}
    assert sorted(objects.describe_below(folder)) == ["a", "b/c", "before"]
    objects.delete([folder / "before", folder / "a"])
    assert objects.describe(folder / "a") is None
    # Faults of contents meet the two reads, and all other faults meet at least eight different requests.
    assert bucket.plan()["faults"][fault] >= (2 if fault in ("cut", "short") else 8)


def test_listings_have_pages(bucket):
    folder = bucket.folder()
    for i in range(7):
        objects.write(folder / f"file{i}", b"x" * i)
        objects.write(folder / f"folder{i}" / "a", b"")
    bucket.plan()
    assert objects.list_folder(folder) == {f"file{i}": False for i in range(7)} | {f"folder{i}": True for i in range(7)}
    assert bucket.plan()["requests"] == {"list": 5}  # 14 entries, on pages of 3 (bucket_proxy.py).
    assert objects.describe_below(folder).keys() == {name for i in range(7) for name in (f"file{i}", f"folder{i}/a")}
    assert bucket.plan()["requests"] == {"list": 5}
    assert objects.list_folder(folder / "absent") == {}
    assert objects.describe_below(folder / "file") == {}
    with pytest.raises(UserError, match="file0 is not a folder"):
        objects.list_folder(folder / "file0")
    with pytest.raises(UserError, match="folder0 is a folder, not a file"):
        objects.read_verified(folder / "folder0")


REQUESTS = {
    "read": lambda path: objects.read(path),
    "write": lambda path: objects.write(path, b"x"),
    "written": lambda path: objects.write_if(path, b"x", None),
    "delete": lambda path: objects.delete([path]),
    "list": lambda path: objects.list_folder(path),
    "below": lambda path: objects.describe_below(path),
    "describe": lambda path: objects.describe(path),
}


# Fault → the error of a request.
FAILURES = {
    "403": (UserError, "the credentials of this process may not .* objects of bucket runs"),
    # Amazon's reply to expired credentials, which quotes the session token. Others may mean anything by it.
    "400": ((UserError, UnreadableError), "the credentials|run the same command again"),
    # The error quotes the name of the object. It is an outage even if the name looks like a status code.
    "reset": (UnreadableError, "(read|written|deleted|listed): .*run the same command again"),
    "503": (UnreadableError, "(read|written|deleted|listed): .*run the same command again"),
}


@pytest.mark.parametrize("fault", FAILURES)
@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_that_fails_is_explained_in_one_line(bucket, quick_retries, request_, fault):
    kind, message = FAILURES[fault]
    bucket.plan(kinds=[fault])
    with pytest.raises(kind, match=message) as caught:
        REQUESTS[request_](bucket.folder() / "seed-403" / "checkpoints" / "401")
    assert "session-token" not in str(caught.value)
    assert fault != "400" or bucket.scheme == "gs" or "the credentials" in str(caught.value)


def test_an_absent_bucket_is_named(bucket):
    path = path_of("--workdir", f"{bucket.scheme}://absent-bucket/a")
    with pytest.raises(UserError, match="there is no bucket absent-bucket"):
        objects.write(path, b"x")


def test_store_must_honour_conditional_writes(bucket):
    folder = bucket.folder()
    objects.require_conditions(folder)
    bucket.plan(kinds=["lost"], in_a_row=1)
    objects.require_conditions(folder)
    bucket.plan(kinds=["unconditional"])
    with pytest.raises(UserError, match="the store ignores the conditions of writes"):
        objects.require_conditions(folder)
    bucket.plan()
    assert objects.list_folder(folder) == {}
