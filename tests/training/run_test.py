"""The files that describe a run, and the locks that keep two trainings out of one directory."""

import errno
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

from difftx import run_files
from difftx.errors import UserError
from difftx.training import run as run_module
from difftx.training.checkpoint.manifest import manifest_text
from difftx.training.run import RUN_FORMAT, Run, read_config, write_run_files

# Holds the lock until its stdin ends, and creates the file `released` before it releases the lock.
HOLDER = """
import fcntl, pathlib, sys
folder = pathlib.Path(sys.argv[1])
with (folder / ".lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("process 7 on elsewhere", file=file, flush=True)
    print("held", flush=True)
    sys.stdin.read()
    (folder / "released").touch()
"""


@pytest.fixture
def lock(config):
    """Return a function from a workdir to its lock, for a run without devices and data."""
    return lambda workdir: Run(config(), workdir, None, None, None).lock()


@pytest.fixture
def holder(tmp_path):
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], text=True, stdin=pipe, stdout=pipe)
    assert process.stdout.readline() == "held\n"
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=60)


def test_second_training_waits_for_the_first(lock, holder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        run_files.time, "sleep", lambda seconds: holder.stdin.close()
    )  # The second training is waiting now, so end the first one.
    with lock(tmp_path):
        assert (tmp_path / "released").exists()
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert "waiting for process 7 on elsewhere, which is at work there" in capsys.readouterr().out


def test_second_training_gives_up_and_names_the_first(lock, holder, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "LOCK_WAIT_SECONDS", 0.0)
    with pytest.raises(UserError, match="process 7 on elsewhere is at work there"), lock(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "process 7 on elsewhere\n"


# Holds the lock as a training does, until its stdin ends.
TRAINING = """
import pathlib, sys
from difftx.run_files import lock_workdir
with lock_workdir(pathlib.Path(sys.argv[1]), 60, 0):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
def test_deleting_the_lock_file_admits_no_second_training(lock, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "LOCK_WAIT_SECONDS", 0.0)
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", TRAINING, str(tmp_path)], text=True, stdin=pipe, stdout=pipe)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=rf"process {process.pid} on .* is at work there"), lock(tmp_path):
        pass
    (tmp_path / ".lock").unlink()
    for _ in range(2):  # The first attempt must not leave a file that admits the second one.
        with pytest.raises(UserError, match="another process is at work there"), lock(tmp_path):
            pass
    process.communicate("")
    with lock(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_locked_file_suffices_if_folders_cannot_be_locked(lock, holder, tmp_path, capsys, monkeypatch):
    """NFS implements flock as a byte-range lock, which needs a writable descriptor. A folder cannot have one."""
    flock = fcntl.flock

    def flock_of_nfs(descriptor, flags):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    monkeypatch.setattr(run_module, "LOCK_WAIT_SECONDS", 0.0)
    with pytest.raises(UserError, match="process 7 on elsewhere is at work there"), lock(tmp_path):
        pass
    with lock(tmp_path / "other"):
        pass
    assert "no file locks here" not in capsys.readouterr().out


def test_the_lock_is_free_again_afterwards(lock, tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), lock(tmp_path / "new"):
            raise KeyError
    with lock(tmp_path / "new"), lock(tmp_path / "other"):  # Each directory has its own lock.
        pass
    assert (tmp_path / "new" / ".lock").read_text() == ""  # It does not name a process that has ended.


def test_file_system_without_locks_gives_a_warning(lock, tmp_path, capsys, monkeypatch):
    def flock(file, flags):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock(tmp_path):
        pass
    assert "no file locks here" in capsys.readouterr().out


def test_a_run_without_a_manifest_has_the_identity_of_its_newest_checkpoint(lock, config, tmp_path):
    with lock(tmp_path) as new, lock(tmp_path / "other") as other:
        assert re.fullmatch("[0-9a-f]{32}", new.run_id)
        assert new.run_id != other.run_id
    write_run_files(tmp_path, config(), {"run_id": new.run_id})
    with lock(tmp_path) as same:
        assert same.run_id == new.run_id
    (tmp_path / "manifest.json").unlink()
    fields = {"weights": "x/1", "arrays": {}, "config": config(), "loader": {"signature": {}}, "contents": "x"}
    for step, run_id in ((10, "a" * 32), (20, new.run_id)):
        folder = tmp_path / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(manifest_text({}, step=step, run_id=run_id, **fields))
    with lock(tmp_path) as same:
        assert same.run_id == new.run_id


@pytest.mark.parametrize("number", [None, RUN_FORMAT + 1])
def test_a_run_of_another_format_is_refused(config, tmp_path, number):
    """None stands for a manifest without a number."""
    write_run_files(tmp_path, config())
    assert read_config(tmp_path) == config()
    run = SimpleNamespace(config=config(), workdir=tmp_path)
    Run.check_records(run)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest.pop("format") == RUN_FORMAT
    path.write_text(json.dumps(manifest | ({} if number is None else {"format": number})))
    found = "no format number" if number is None else f"format {number}"
    message = (
        f"{tmp_path}: manifest.json has {found}, and this version of difftx reads runs of format {RUN_FORMAT}; use the "
        "version that wrote the run, or train again in a new --workdir"
    )
    for refuse in (lambda: read_config(tmp_path), lambda: Run.check_records(run)):
        with pytest.raises(UserError) as error:
            refuse()
        assert str(error.value) == message


def test_run_without_a_manifest_is_rejected_by_readers_and_accepted_by_training(config, tmp_path):
    write_run_files(tmp_path, config())
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no manifest\.json there, so it is not a run; `difftx convert` makes"):
        read_config(tmp_path)
    Run.check_records(SimpleNamespace(config=config(), workdir=tmp_path))


@pytest.mark.parametrize(("folder", "is_own"), [("difftx", True), ("venv/difftx", False)])
def test_the_commit_is_that_of_difftxs_own_repository(monkeypatch, tmp_path, folder, is_own):
    """difftx may be installed in a folder of a user's repository."""
    (tmp_path / folder).mkdir(parents=True)
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(run_module, "SOURCE", (tmp_path / folder).parent)
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / folder / "run.py"))
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert run_module._git_commit() == (head if is_own else None)
