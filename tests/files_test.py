"""Leftovers of killed processes, files of a run that are folders or unreadable, and files of JSON lines."""

import os
import platform
import subprocess
import sys

import pytest
from conftest import ROOT, TINY
from helpers.command_server import commands
from helpers.unreadable import needs_unprivileged, without_root_capabilities

from difftx import files
from difftx.errors import UnreadableError, UserError
from difftx.files import new_file, new_folder, remove_temporaries, source_sha256
from difftx.json_files import JsonLines
from difftx.report.runs import match_runs
from difftx.training.run import read_config, write_run_files

KILLED = """
import os, signal, sys
from pathlib import Path
from difftx.files import new_file, new_folder
path = Path(sys.argv[2])
with new_folder(path, "part") if sys.argv[1] == "folder" else new_file(path) as made:
    (made / "part").write_text("half") if sys.argv[1] == "folder" else made.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(what, path):
    """Kill a process while it creates a file or folder, and return the names that it leaves behind."""
    assert subprocess.run([sys.executable, "-c", KILLED, what, str(path)], cwd=ROOT).returncode == -9
    return {each.name for each in path.parent.iterdir() if each.name.startswith(f".{path.name}.")}


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_hash_of_source_files_covers_names_and_contents_and_is_that_of_the_first_call(tmp_path):
    def folder(name, **texts):
        (tmp_path / name / "part").mkdir(parents=True)
        for file, text in texts.items():
            (tmp_path / name / f"{file.replace('__', '/')}.py").write_text(text)
        (tmp_path / name / "notes.txt").write_text(name)
        return tmp_path / name

    first = folder("first", a="x = 1\n", part__b="y = 2\n")
    hashes = {source_sha256(first)}
    assert source_sha256(folder("copy", a="x = 1\n", part__b="y = 2\n")) in hashes
    hashes.add(source_sha256(folder("content", a="x = 1\n", part__b="y = 3\n")))
    hashes.add(source_sha256(folder("name", a="x = 1\n", part__c="y = 2\n")))
    hashes.add(source_sha256(folder("more", a="x = 1\n", part__b="y = 2\n", c="")))
    hashes.add(source_sha256(folder("moved", a="x = 1\ny = 2\n", part__b="")))
    assert len(hashes) == 5
    before = source_sha256(first)
    (first / "a.py").write_text("x = 9\n")  # The process has loaded its modules already.
    assert source_sha256(first) == before


def test_recipes_are_not_source_files(tmp_path):
    """A wheel has recipes in the folder of the package. In a clone, that folder may have a link to them."""
    recipes = tmp_path / "recipes"
    for name in ("clone", "wheel", "link"):
        (tmp_path / name / "config").mkdir(parents=True)
        (tmp_path / name / "config" / "recipes.py").write_text("x = 1\n")
    for folder in (recipes, tmp_path / "wheel" / "configs"):
        folder.mkdir()
        (folder / "own.py").write_text("x = 1\n")
    (tmp_path / "link" / "configs").symlink_to(recipes)
    installations = [tmp_path / name for name in ("clone", "wheel", "link")]
    assert len(set(map(source_sha256, installations))) == 1


def test_new_folder_deletes_the_folder_of_a_killed_process(tmp_path):
    assert len(killed("folder", tmp_path / "out")) == 1
    host = platform.node()
    # Leftovers of a process with this id before a restart, a running process, another host, and another folder.
    for name in (
        f".out.{host}.{os.getpid()}",
        f".out.{host}.{os.getppid()}",
        ".out.elsewhere.1",
        f".more.{host}.99999999",
    ):
        (tmp_path / name).mkdir()
    with new_folder(tmp_path / "out", "part") as folder:
        (folder / "all").touch()
    assert names(tmp_path) == {"out", f".out.{host}.{os.getppid()}", ".out.elsewhere.1", f".more.{host}.99999999"}


def test_files_of_a_killed_process_are_deleted(tmp_path):
    left = killed("file", tmp_path / "metrics.jsonl")
    assert len(left) == 1
    (tmp_path / ".lock").touch()
    remove_temporaries(tmp_path)
    assert names(tmp_path) == {".lock"}


def test_a_file_does_not_replace_a_folder(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match="a is a folder, not a file; move it away"), new_file(tmp_path / "a") as file:
        file.write(b"text")
    assert names(tmp_path) == {"a"}


READERS = {
    "config.json": lambda workdir: read_config(workdir),
    "metrics.jsonl": lambda workdir: match_runs(str(workdir), "curves"),
}


@needs_unprivileged
@pytest.mark.parametrize("name", READERS)
def test_readers_report_unreadable_files_in_one_line(tmp_path, config, monkeypatch, name):
    monkeypatch.setattr(files, "RETRY_SECONDS", (0.0,))
    write_run_files(tmp_path, config())
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / name).touch()
    (tmp_path / name).chmod(0)
    with without_root_capabilities(), pytest.raises(UnreadableError, match=f"{name} cannot be read: Permission denied"):
        READERS[name](tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{name} is a folder, not a file; move it away"):
        READERS[name](tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", ["manifest.json", "checkpoints"])
def test_training_rejects_unusable_paths_in_one_line(tmp_path, text_file, name):
    workdir = tmp_path / "run"
    (workdir / name).mkdir(parents=True)
    if name == "checkpoints":
        (workdir / name).rmdir()
        (workdir / name).touch()
    flags = [f"--config.{field}={value}" for field, value in (TINY | {"data.path": str(text_file)}).items()]
    result = commands().run(["train.py", "--config=configs/quickstart.py:diff", f"--workdir={workdir}", *flags])
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: {workdir / name} is "), result.stderr
    assert "Traceback" not in result.stderr


def test_json_lines_skip_an_incomplete_line_and_continue_after_it(tmp_path):
    lines = JsonLines(tmp_path / "new" / "log.jsonl")
    assert lines.read() == []
    lines.append([{"id": "a", "answer": None}, {"id": "b", "answer": [1]}])
    assert lines.path.read_bytes() == b'{"id": "a", "answer": null}\n{"id": "b", "answer": [1]}\n'
    lines.path.write_bytes(lines.path.read_bytes()[:-4])  # As after a kill during the write.
    lines.append([{"id": "c", "answer": True}])
    assert lines.path.read_bytes().splitlines()[1:] == [b'{"id": "b", "answer": [', b'{"id": "c", "answer": true}']
    assert [row["id"] for row in lines.read()] == ["a", "c"]
    assert [row["id"] for row in lines.read({"id": str, "answer": bool})] == ["c"]
    assert [row["id"] for row in lines.read({"id": str, "answer": object})] == ["a", "c"]
    lines.rewrite(lines.read())
    assert lines.path.read_bytes() == b'{"id": "a", "answer": null}\n{"id": "c", "answer": true}\n'


@pytest.mark.parametrize(
    ("folder", "fix"),
    [
        ("runs", "name one of its 2 runs, such as --workdir={tmp}/runs/a; difftx report takes all of them"),
        ("runs/a/checkpoints/300", "write --workdir={tmp}/runs/a --step=300"),
        ("runs/a/checkpoints", "write --workdir={tmp}/runs/a --step=N"),
        ("none", "train a run with `difftx train`"),
    ],
)
def test_a_folder_that_is_no_run_says_how_to_name_one(tmp_path, folder, fix):
    for name in "ab":
        (tmp_path / "runs" / name / "checkpoints" / "300").mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
    with pytest.raises(UserError) as error:
        files.require_run(tmp_path / folder)
    assert str(error.value).endswith(f"not a run; {fix.format(tmp=tmp_path)}")
