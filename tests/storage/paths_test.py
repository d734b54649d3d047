"""Paths of all stores, and the functions of difftx/files.py and json_files.py on each of them."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath
from helpers.command_server import commands

from difftx import files, json_files
from difftx.errors import UnreadableError, UserError
from difftx.evals.math import read_problems
from difftx.run_files import pulled
from difftx.storage import objects
from difftx.storage.paths import is_bucket, path_of


def test_local_paths_are_pathlib_paths():
    for text in ("runs/a", "/runs/a", ".", "C:a", "a:/b/c", "gs", "runs/gs:/a"):
        assert type(path_of("--workdir", text)) is type(Path(text))
        assert path_of("--workdir", text) == Path(text)


def test_errors_of_one_line(monkeypatch):
    with pytest.raises(UserError, match="--workdir=ftp://a/b: stores of type ftp are not supported; use gs://, s3://"):
        path_of("--workdir", "ftp://a/b")
    with pytest.raises(UserError, match=r"data\.path=gs://: no bucket is named; write gs://bucket/folder"):
        path_of("data.path", "gs://")
    for text in ("gs:/runs/a", "gs:runs/a"):  # As local paths, they would become a folder "gs:".
        with pytest.raises(UserError, match=f"--out={text}: write gs://runs/a for a bucket, or ./{text} for a file"):
            path_of("--out", text)
    for scheme, library, extra in (("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UserError, match=rf"^{library} is not installed: .*\[{extra}\]"):
            path_of("--workdir", f"{scheme}://runs/a")


IMPORTED = """
import sys
import difftx.files
print([name for name in ("tensorstore", "fsspec", "etils", "aiohttp") if name in sys.modules])
"""


def test_local_paths_import_no_client():
    found = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_files_have_the_same_meaning_everywhere(folder):
    path = folder / "run" / "config.json"
    files.require_writable(folder / "run")
    assert files.list_folder(folder / "run") == {}
    assert (files.size_of(path), files.read_file(path)) == (None, None)
    with pytest.raises(UserError, match="No such file"):
        json_files.read_json(path)
    assert json_files.read_record(path) is None
    with pytest.raises(UserError, match="is not a run"):
        files.require_run(folder / "run")
    if not is_bucket(folder):
        path.parent.mkdir()
    files.write_atomically(path, json.dumps({"λ": 1}))
    files.require_run(folder / "run")
    assert json_files.read_json(path) == {"λ": 1}
    assert files.size_of(path) == len(path_bytes := files.read_file(path))
    assert json.loads(path_bytes) == {"λ": 1}
    json_files.write_record(path, {"a": 2})
    assert json_files.read_record(path) == {"a": 2}
    files.write_atomically(path, json.dumps({"a": 2, "sha256": "0" * 64}))
    assert json_files.read_record(path) is None
    assert files.list_folder(folder) == {"run": True}
    assert files.list_folder(folder / "run") == {"config.json": False}
    with pytest.raises(UserError, match="is not a folder; move it away"):
        files.list_folder(path)
    with pytest.raises(UserError, match="run is a folder, not a file; move it away"):
        files.read_file(folder / "run")


@pytest.mark.parametrize("size", [0, 10, 3 * 2**20])
def test_a_new_file_appears_at_the_end_of_the_block(folder, monkeypatch, size):
    monkeypatch.setattr(files, "ONE_REQUEST_BYTES", 2**20)
    with files.new_file(folder / "a") as file:
        file.write(b"x" * size)
        assert files.read_file(folder / "a") is None
    assert files.read_file(folder / "a") == b"x" * size
    with pytest.raises(TypeError), files.new_file(folder / "a") as file:
        file.write("text")
    assert files.read_file(folder / "a") == b"x" * size
    assert files.list_folder(folder) == {"a": False}


def test_a_new_folder_is_used_once_its_last_file_is_there(bucket, monkeypatch):
    folder = bucket.folder() / "out"

    def make(text):
        with files.new_folder(folder, "last") as made:
            (made / "deep").mkdir()
            (made / "deep" / "x").write_text(text)
            (made / "last").write_text(text)

    with monkeypatch.context() as patch:
        patch.setattr(objects, "write_if", lambda *_: 1 / 0)  # The process ends before it writes the last file.
        with pytest.raises(ZeroDivisionError):
            make("half")
    assert sorted(objects.describe_below(folder)) == ["deep/x"]
    assert not files.is_taken(folder, "last")
    make("all")  # The same command replaces what the killed process has left.
    assert files.is_taken(folder, "last")
    assert {files.read_file(folder / name) for name in objects.describe_below(folder)} == {b"all"}
    with pytest.raises(FileExistsError):
        make("again")


@pytest.mark.parametrize("name", ["config.json", "diff/checkpoints/10/manifest.json"])
def test_a_new_folder_keeps_the_objects_of_others(bucket, name):
    folder = bucket.folder()
    objects.write(folder / name, b"{}")
    with pytest.raises(FileExistsError, match=name), files.new_folder(folder, "config.json") as made:
        (made / "config.json").write_text("new")
    assert sorted(objects.describe_below(folder)) == [name]
    if name == "config.json":
        command = ["difftx", "convert", "--from=difftx", "--to=hf", f"--input={folder}", f"--out={folder}"]
        found = commands().run(command)
        assert found.returncode == 2
        assert "exists already; name a new folder" in found.stderr


def test_shortened_contents_are_never_returned(bucket, monkeypatch):
    monkeypatch.setattr("difftx.storage.objects.REREAD_SECONDS", (0.0,) * 3)
    path = bucket.folder() / "a"
    files.write_atomically(path, "text" * 100)
    bucket.plan(kinds=["short"], limit=3)
    assert files.read_file(path) == b"text" * 100
    bucket.plan(kinds=["short"])
    message = re.escape(f"{path} cannot be read: its content does not have the size and CRC32C")
    with pytest.raises(UnreadableError, match=message):
        files.read_file(path)


@pytest.mark.parametrize("name", ["/../outside", "../outside", "a/../../outside", ".."])
def test_no_download_leaves_its_folder(name, monkeypatch, tmp_path):
    """Anyone who may write to a bucket chooses the names of its objects."""
    written = []
    described, message = objects.Description(0, None, 0.0, ""), rf"the name of an object, '{re.escape(name)}', is not a"
    monkeypatch.setattr(objects, "describe_below", lambda path: dict.fromkeys(["config.json", name]))
    monkeypatch.setattr(objects, "download", lambda path, target: written.append(Path(target).name))
    with pytest.raises(UserError, match=f"gs://other/model: {message}"):
        files.downloaded(epath.Path("gs://other/model")).__enter__()
    monkeypatch.setattr(objects, "describe_files", lambda path: {})
    monkeypatch.setattr(objects, "describe_below", lambda path: {name: described})
    monkeypatch.setattr(objects, "read_verified", lambda path, described: objects.Stored(b"", b""))
    with pytest.raises(UserError, match=r"gs://other/run: the name of an object, 'evals/.*', is not a"):
        pulled(epath.Path("gs://other/run"))
    assert written == []


def test_records_of_suites_are_read_from_buckets(bucket):
    path = bucket.folder() / "problems.jsonl.gz"
    text = json.dumps({"question": "1 + 1?", "answer": "2\n#### 2"}) + "\n"
    with files.new_file(path) as file:
        file.write(gzip.compress(text.encode()))
    (problem,) = read_problems(str(path), "gsm8k", field="eval.math.tasks, a.test")
    assert (problem.question, problem.answer) == ("1 + 1?", "2")
    with pytest.raises(UserError, match=r"eval\.math\.tasks, a\.test=.*absent: cannot be read"):
        read_problems(f"{path.parent}/absent", "gsm8k", field="eval.math.tasks, a.test")
