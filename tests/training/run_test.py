"""What keeps two trainings out of one directory."""

import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from difftx.errors import UserError
from difftx.training import run as run_module
from difftx.training.run import Run

# Holds the lock until its stdin ends, and then says so before it lets go.
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
    """Return a function: workdir → its lock, of the two fields of a run that it reads."""
    return lambda workdir: Run.lock(SimpleNamespace(config=config(), workdir=workdir))


@pytest.fixture
def holder(tmp_path):
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], text=True, stdin=pipe, stdout=pipe)
    assert process.stdout.readline() == "held\n"
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=60)


def test_the_second_waits_for_the_first(lock, holder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        run_module.time, "sleep", lambda seconds: holder.stdin.close()
    )  # It has seen that it must wait.
    with lock(tmp_path):
        assert (tmp_path / "released").exists()
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert "waiting for process 7 on elsewhere, which trains there" in capsys.readouterr().out


def test_the_second_gives_up_and_names_the_first(lock, holder, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "LOCK_WAIT_SECONDS", 0.0)
    with pytest.raises(UserError, match="process 7 on elsewhere trains there"), lock(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "process 7 on elsewhere\n"


def test_the_lock_is_free_again_afterwards(lock, tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), lock(tmp_path / "new"):
            raise KeyError
    with lock(tmp_path / "new"), lock(tmp_path / "other"):  # Each directory has its own.
        pass


def test_a_file_system_without_locks_is_no_error(lock, tmp_path, capsys, monkeypatch):
    def flock(file, flags):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(run_module.fcntl, "flock", flock)
    with lock(tmp_path):
        pass
    assert "no file locks here" in capsys.readouterr().out
