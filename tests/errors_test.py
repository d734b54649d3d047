"""Error messages in one line, and the exit codes of commands."""

import errno
import os
import re
import subprocess
import sys
from typing import get_type_hints

import pytest
from conftest import ROOT

from difftx import errors
from difftx.config import OptimizerConfig
from difftx.errors import RunError, UserError, did_you_mean, explained, printable

HOSTILE = "\x1b]0;title\x07\x9b31m\x7f\x00\r\x0b\u202e\u2066\u200f\udcff"

FULL = """
import threading, time
from difftx.errors import run_command
def main():
    threading.Thread(target=time.sleep, args=[600]).start()  # As a save that is under way.
    raise OSError({number}, "No space left on device", {filename!r})
run_command(main)
"""


@pytest.mark.parametrize(("filename", "shown"), [("run/config.json", "run/config.json: "), (None, "")])
def test_a_full_disk_ends_the_process_with_one_line(filename, shown):
    script = FULL.format(number=errno.ENOSPC, filename=filename)
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr == f"error: {shown}No space left on device; make room, then run the same command again\n"


def test_only_characters_that_control_a_terminal_are_escaped():
    escaped = printable(HOSTILE)
    assert escaped == r"\x1b]0;title\x07\x9b31m\x7f\x00\r\x0b\u202e\u2066\u200f\udcff"
    assert escaped.isprintable()
    plain = "a\tb\nnaïve \U0001f468\u200d\U0001f469 日本語 עברית \\x1b"
    assert printable(plain) == plain


@pytest.mark.parametrize("kind", [UserError, RunError])
def test_messages_are_one_printable_line(kind):
    assert str(kind(f"a{HOSTILE}\nb")).isprintable()
    assert len(str(kind("x" * 10**6))) < 2000


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.ENOENT, UserError, "check the path"),
        (errno.EIO, RunError, "when that has passed, run the same command again"),
        (errno.EDQUOT, RunError, "make room, then run the same command again"),
    ],
)
def test_system_errors_become_user_errors_or_run_errors(number, kind, advice):
    explanation = explained(OSError(number, os.strerror(number), "run/x"))
    assert type(explanation) is kind
    assert str(explanation) == f"run/x: {os.strerror(number)}; {advice}"


def test_programming_errors_keep_their_traceback():
    unnamed = PermissionError(errno.EACCES, "Permission denied")
    for error in (ValueError("x"), unnamed, ModuleNotFoundError("x", name="difftx.x")):
        assert explained(error) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("optimizer.warmup", "optimizer.warmup_steps"),
        ("learning_rate", "optimizer.learning_rate"),
        ("optimizer.lerning_rate", "optimizer.learning_rate"),
        ("model.layers.0.q_porj.weight", "model.layers.0.q_proj.weight"),
    ],
)
def test_the_closest_known_name_is_suggested(name, meant):
    known = [f"optimizer.{field}" for field in get_type_hints(OptimizerConfig)]
    known += ["train.steps", "train.seed", "data.seed"]
    known += [f"model.layers.{i}.{part}_proj.weight" for i in range(2) for part in "qkv"]
    assert did_you_mean(name, known) == f" Did you mean {meant!r}?"
    assert did_you_mean("lion", ["adamw", "muon"]) == " Did you mean 'muon'? Known: adamw, muon."


@pytest.mark.parametrize("command", [["train.py", "--help"], ["-m", "difftx", "generate"]])
def test_missing_dependencies_are_reported_in_one_line(command):
    # With -S, Python can import only the standard library and difftx.
    result = subprocess.run(
        [sys.executable, "-S", *command], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}
    )
    assert result.returncode == 2, result.stdout
    assert re.fullmatch(
        r"error: \S+ has no module '\w+': run `make quickstart` in .*, or install .*requirements\.txt\n", result.stderr
    )


def test_an_installed_difftx_does_not_name_the_source_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "SOURCE", tmp_path)  # Like site-packages, this folder has no requirements.txt.
    message = str(explained(ModuleNotFoundError("x", name="optax")))
    assert message.endswith(" has no module 'optax': install the wheel of difftx again, with its dependencies")
