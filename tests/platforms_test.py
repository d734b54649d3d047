"""difftx on macOS, which has no /proc, no /sys, no prctl and fewer functions in `os`; and on Windows, without fcntl.

Python runs `sitecustomize` at the start of each process, also of processes that difftx starts, so `MACOS` hides what
macOS lacks before difftx is imported. `make platforms` resolves the packages for other platforms. `make lint`
checks the types for macOS.
"""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, child_environment, write_text

MACOS = """
import ctypes, os, sys
import psutil, sysconfig  # These choose files by the platform, and Linux has none of macOS.
sysconfig.get_config_vars()
sys.platform = "darwin"
for name in ("copy_file_range", "eventfd", "fdatasync", "memfd_create", "pipe2", "posix_fadvise", "posix_fallocate",
             "sched_getaffinity", "sched_setaffinity", "sendfile", "splice"):
    vars(os).pop(name, None)

def is_absent(path):
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys"))

def hide(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and is_absent(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", os.fspath(arguments[0]))

def stat(path, *arguments, real=os.stat, **keywords):
    hide("open", [path])
    return real(path, *arguments, **keywords)

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError("dlsym(RTLD_DEFAULT, prctl): symbol not found")
        return super().__getattr__(name)

os.stat, ctypes.CDLL = stat, Library
sys.addaudithook(hide)
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs Python as on macOS, from the source tree, and returns its output."""
    (tmp_path / "macos").mkdir()
    (tmp_path / "macos" / "sitecustomize.py").write_text(MACOS)
    environment = child_environment(1) | {"PYTHONPATH": str(tmp_path / "macos")}
    environment.pop("GLIBC_TUNABLES")  # With it, difftx would not look for huge pages.

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.long
def test_a_model_trains_and_is_evaluated(run, tmp_path):
    text, workdir = write_text(tmp_path / "text.txt"), tmp_path / "run"
    flags = [f"--config.{name}={value}" for name, value in (TINY | {"data.path": str(text)}).items()]
    run("-m", "difftx", "train", "--config=quickstart:diff", f"--workdir={workdir}", *flags)
    run("-m", "difftx", "eval", f"--workdir={workdir}", "--suite=loss")
    result = json.loads((workdir / "evals" / "loss" / "6.json").read_text())
    assert 0 < result["numbers"]["loss"] < 6


@pytest.mark.long
def test_without_fcntl_one_line_names_the_supported_platforms(tmp_path):
    code = "import sys; sys.modules['fcntl'] = None; from difftx.__main__ import entry; entry()"
    command = [sys.executable, "-c", code, "train", "--config=quickstart:diff", f"--workdir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=child_environment(1), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "has no module 'fcntl': difftx runs on Linux and macOS; on Windows, use" in done.stderr
    assert "Traceback" not in done.stderr
