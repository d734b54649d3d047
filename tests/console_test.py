"""Standard output that cannot be written, the end of the terminal, and the restart of commands with huge pages."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, child_environment
from helpers.processes import TRAIN_SLOWLY, newest_step
from helpers.training_runs import wait_for_step

from difftx import console

# A command that prints 120 kB, and the line "finished" in a file.
COMMAND = """
import os, pathlib, sys
from difftx.console import Output
from difftx.errors import run_command
from difftx.progress import Work

def main():
    if sys.argv[2] == "job":
        Output.is_needed = False
    with Work(is_output=True) as work:
        for i in range(3_000):
            work.note("λ → naïve … 日本語")
            print("step", i)
    pathlib.Path(sys.argv[1]).write_text("finished")
    return 75

run_command(main)
"""
FULL = "No space left on device"


def run(kind, out, tmp_path, encoding="utf-8", **options):
    """Run the command with `out` after it in a shell. Return exit code, errors, and whether it finished."""
    path = tmp_path / "file"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    line = ["bash", "-c", f'"$0" -c "$1" "$2" "$3" {out}; exit ${{PIPESTATUS[0]}}', sys.executable, COMMAND, path, kind]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, timeout=120, **options)
    return done.returncode, done.stderr.decode(), path.exists()


@pytest.mark.parametrize(
    ("kind", "out", "expected"),
    [
        ("job", "> /dev/full", (75, f"standard output: {FULL}; continuing without it\n", True)),
        ("job", "| head -1", (75, "standard output: Broken pipe; continuing without it\n", True)),
        ("job", "<&- >&- 2>&-", (75, "", True)),
        (
            "report",
            "> /dev/full",
            (1, f"error: standard output: {FULL}; make room, then run the same command again\n", False),
        ),
        ("report", "| head -1", (1, "", False)),
        ("report", "> /dev/null 2> /dev/full", (75, "", True)),
    ],
)
def test_a_failing_console(kind, out, expected, tmp_path):
    assert run(kind, out, tmp_path) == expected


@pytest.mark.parametrize("encoding", ["ascii", "cp1252:strict"])
def test_characters_that_the_encoding_lacks_are_replaced(encoding, tmp_path):
    assert run("report", f"> {tmp_path}/out", tmp_path, encoding) == (75, "", True)
    line = "λ → naïve … 日本語".encode(encoding.partition(":")[0], "replace")
    assert (tmp_path / "out").read_bytes().splitlines()[:2] == [line, b"step 0"]


@pytest.mark.long
def test_training_without_a_console_saves_at_sighup_and_resumes(text_file, tmp_path):
    """First, standard output is a full disk. Then it is a pipe without a reader, of an encoding without "→"."""
    workdir = tmp_path / "run"
    fields = TINY | {"data.path": text_file, "train.steps": "200", "logging.every_steps": "1"}
    flags = ["--config=quickstart:diff", f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in fields.items())]
    command, environment = [sys.executable, *TRAIN_SLOWLY, *flags], child_environment(1)
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, text=True) as process,
    ):
        wait_for_step(5, process, workdir)
        process.send_signal(signal.SIGHUP)
        assert process.communicate(timeout=120)[1] == f"standard output: {FULL}; continuing without it\n"
    assert process.returncode == 75
    (saved,) = (workdir / "checkpoints").iterdir()
    reader, writer = os.pipe()
    os.close(reader)
    command += ["--config.logging.trackers=()"]  # Resuming prints "('tensorboard',) → ()".
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONIOENCODING": "ascii"}, stdout=writer, stderr=subprocess.PIPE
    )
    assert (done.returncode, done.stderr) == (0, b"standard output: Broken pipe; continuing without it\n")
    assert newest_step(workdir / "metrics.jsonl") == 200
    assert 5 <= int(saved.name) < 200


PRINT_HUGE_PAGES = """
import os, sys
from difftx.errors import run_command
print("start", os.getpid(), *sys.argv[1:], flush=True)

def main():
    memory = b"x" * 2**26
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    print(next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")))

run_command(main)
"""


@pytest.mark.skipif(not console.SETTING.exists(), reason="no Linux with huge pages")
@pytest.mark.skipif(
    console.SETTING.exists() and "[madvise]" not in console.SETTING.read_text(),
    reason="Linux gives huge pages always or never",
)
@pytest.mark.parametrize("tunables", [None, ""])
def test_a_command_gets_huge_pages_unless_the_user_has_set_the_variable(tunables):
    environment = {name: value for name, value in os.environ.items() if name != console.VARIABLE}
    if tunables is not None:
        environment[console.VARIABLE] = tunables
    command = [sys.executable, "-W", "error", "-c", PRINT_HUGE_PAGES, "a b", "--flag"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    *starts, kib = done.stdout.splitlines()
    assert starts == [starts[0]] * (2 if tunables is None else 1)  # The restart keeps the process id and arguments.
    assert starts[0].endswith(" a b --flag")
    assert (int(kib) > 2**15) == (tunables is None)


def test_other_systems_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(console.VARIABLE, raising=False)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started again"))
    monkeypatch.setattr(console, "SETTING", tmp_path / "enabled")
    console.restart_with_huge_pages()
    console.SETTING.write_text("[always] madvise never\n")
    console.restart_with_huge_pages()
