"""Logs of JSON lines on every kind of storage, under faults, compared with a list of rows."""

import contextlib
import random
import subprocess
import sys

import pytest
from conftest import ROOT

from difftx.errors import RunError, UnreadableError
from difftx.json_files import JsonLines
from difftx.storage import bucket_log, objects
from difftx.storage.paths import is_bucket

FAULTS = ["429", "500", "503", "reset", "lost", "slow", "cut", "short", "stale"]


def numbers(log):
    return [row["n"] for row in log.read({"n": int})]


def rows(*numbers):
    return [{"n": n} for n in numbers]


def test_logs_behave_like_a_list(folder, monkeypatch):
    """Run random operations on three logs at one path, as three processes do."""
    monkeypatch.setattr(bucket_log, "COMPACTION_PARTS", 4)
    logs, expected, random_ = [JsonLines(folder / "run" / "log.jsonl") for _ in range(3)], [], random.Random(0)
    for step in range(60):
        log, operation = random_.choice(logs), random_.random()
        if operation < 0.75:
            new = rows(*range(10 * step, 10 * step + random_.randrange(1, 4)))
            log.append(new)
            expected += [row["n"] for row in new]
        elif operation < 0.8:
            expected = expected[: random_.randrange(len(expected) + 1)]
            logs = [JsonLines(folder / "run" / "log.jsonl") for _ in range(3)]  # As after a resume.
            logs[0].rewrite(rows(*expected))
        else:
            assert numbers(log) == expected
    assert numbers(JsonLines(folder / "run" / "log.jsonl")) == expected
    if is_bucket(folder):
        assert len(objects.list_below(folder / "run" / "log.jsonl.parts")) < 2 * 4
    logs[0].remove()
    assert numbers(logs[1]) == []
    assert not is_bucket(folder) or objects.list_below(folder) == []


def test_faults_neither_lose_nor_double_a_row(bucket, quick_retries, monkeypatch):
    """Append and read with two logs, as two processes do, under faults that retries may or may not survive."""
    monkeypatch.setattr(bucket_log, "COMPACTION_PARTS", 5)
    monkeypatch.setattr(objects, "REREAD_SECONDS", (0.0,) * 6)
    path, random_ = bucket.folder() / "log.jsonl", random.Random(0)
    logs, expected, unknown, met = [JsonLines(path), JsonLines(path)], [], [], 0
    for step in range(70):
        # Most patterns exclude listings: fsspec makes them, and s3fs waits for seconds after a fault.
        pattern = "." if step % 20 == 0 else "^((?!prefix=).)*$"
        bucket.plan(kinds=FAULTS, rate=0.3, in_a_row=2, seed=step, pattern=pattern)
        log = random_.choice(logs)
        try:
            if random_.random() < 0.9:
                unknown = rows(2 * step, 2 * step + 1)
                log.append(unknown)
                expected += [row["n"] for row in unknown]
                unknown = []
            else:
                assert numbers(log) == expected
        except UnreadableError:  # The append has an unknown outcome: the log has all of its rows, or none.
            bucket.plan()
            found = numbers(JsonLines(path))
            assert found in (expected, expected + [row["n"] for row in unknown])
            logs, expected = [JsonLines(path), JsonLines(path)], found
        met += sum(bucket.plan()["faults"].values())
    assert numbers(JsonLines(path)) == expected
    assert met >= 100


APPENDS = """
import sys
from difftx.json_files import JsonLines
from difftx.storage import bucket_log
from difftx.storage.paths import path_of
bucket_log.COMPACTION_PARTS = 20
log = JsonLines(path_of("log", sys.argv[1]))
for n in range(20):
    log.append([{"n": 1000 * int(sys.argv[2]) + n}])
"""


def test_appends_of_several_processes_are_all_kept(folder):
    log = JsonLines(folder / "log.jsonl")
    commands = [[sys.executable, "-c", APPENDS, str(log.path), str(i)] for i in range(3)]
    processes = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    assert [process.wait() for process in processes] == [0, 0, 0]
    found = numbers(log)
    assert sorted(found) == sorted(1000 * i + n for i in range(3) for n in range(20))
    for i in range(3):  # The rows of each process keep their order.
        assert [n for n in found if n // 1000 == i] == [1000 * i + n for n in range(20)]


@pytest.mark.parametrize("operation", ["append", "compact", "rewrite"])
def test_a_kill_at_any_request_leaves_all_rows_or_none(bucket, monkeypatch, operation):
    """Kill the process before the first, second, … request of an operation, until the operation completes."""
    monkeypatch.setattr(bucket_log, "COMPACTION_PARTS", 3 if operation == "compact" else 100)
    for requests in range(30):
        path = bucket.folder() / "log.jsonl"
        log = JsonLines(path)
        log.append(rows(0))
        log.append(rows(1))
        counted = iter(range(requests))
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in ("read", "write_if", "is_current", "delete", "list_below", "read_all"):
                patch.setattr(objects, name, killed_at_the_end(counted, getattr(objects, name)))
            log.rewrite(rows(5)) if operation == "rewrite" else log.append(rows(2))
            assert numbers(JsonLines(path)) == ([5] if operation == "rewrite" else [0, 1, 2])
            break
        after = JsonLines(path)
        found = numbers(after)
        assert found in ([0, 1], [5] if operation == "rewrite" else [0, 1, 2])
        after.append(rows(9))
        assert numbers(after) == [*found, 9]
        after.rewrite(rows(*found))
        assert numbers(log) == found
        assert objects.list_below(path.with_name("log.jsonl.parts")) == []
    else:
        pytest.fail("the operation has more than 30 requests")
    assert requests > 2


def killed_at_the_end(counted, request):
    def counted_request(*args):
        if next(counted, None) is None:
            raise KeyboardInterrupt
        return request(*args)

    return counted_request


def test_an_append_that_another_process_compacts(bucket, monkeypatch):
    """Another process moves the new part into the head before the appending process reads the head again."""
    monkeypatch.setattr(bucket_log, "COMPACTION_PARTS", 3)
    path = bucket.folder() / "log.jsonl"
    log, other, write_if = JsonLines(path), JsonLines(path), objects.write_if
    log.append(rows(0))

    def write_then_compact(*args):
        generation = write_if(*args)
        if args[2] is None and b'"n": 1}' in args[1]:
            other.append(rows(2))
            other.append(rows(3))
        return generation

    monkeypatch.setattr(objects, "write_if", write_then_compact)
    log.append(rows(1))
    log.append(rows(4))
    assert numbers(JsonLines(path)) == [0, 1, 2, 3, 4]


def test_a_process_whose_rows_were_replaced_stops(bucket):
    path = bucket.folder() / "log.jsonl"
    late, owner = JsonLines(path), JsonLines(path)
    late.rewrite(rows(0))
    owner.rewrite(rows(1))
    for write in (late.append, late.rewrite):
        with pytest.raises(RunError, match="another process"):
            write(rows(2))
    owner.append(rows(3))
    assert numbers(owner) == [1, 3]


def test_requests_of_an_append_do_not_grow(bucket):
    path = bucket.folder() / "log.jsonl"
    owner, other = JsonLines(path), JsonLines(path)
    owner.rewrite([])
    other.append(rows(0))
    for log in (owner, other):
        log.append(rows(0))
        for _ in range(5):
            bucket.plan()
            log.append(rows(1))
            assert bucket.plan()["requests"] == {"write": 1, "read": 2}
    owner.rewrite(rows(0))
    owner.append(rows(1))
    bucket.plan()
    assert numbers(owner) == [0, 1]
    assert bucket.plan()["requests"] == {"read": 4, "list": 1}


def test_a_log_that_was_copied_from_a_disk(bucket):
    path = bucket.folder() / "log.jsonl"
    objects.write(path, b'{"n": 1}\n{"n": 2}\n')
    log = JsonLines(path)
    log.append(rows(3))
    assert numbers(JsonLines(path)) == [1, 2, 3]
    log.rewrite(rows(1))
    assert numbers(JsonLines(path)) == [1]
