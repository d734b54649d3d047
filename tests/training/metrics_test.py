"""Metrics of a run: metrics.jsonl, TensorBoard and the progress line."""

import json
import os
import re
import subprocess
import sys
import tracemalloc

import pytest
from conftest import ROOT
from helpers.events import events
from helpers.training_runs import all_metrics

from difftx.commands.train import check_extras
from difftx.config import LoggingConfig
from difftx.errors import UserError
from difftx.progress import Work
from difftx.training.goodput import Goodput
from difftx.training.loop import PROGRESS_LABEL, PROGRESS_LINE, remove_later_evaluations
from difftx.training.metrics import MetricsWriter, read_metrics

QUIET = LoggingConfig(every_steps=1, trackers=())


SPEED = {"tokens": 256, "tokens_per_second": 1e3, "step_seconds": 0.25}


def write_steps(workdir, start, stop, config=QUIET):
    writer = MetricsWriter(workdir, config, start)
    for step in range(start + 1, stop + 1):
        lists = {"lambda": [0.2, 0.3], "largest_logits": [[[0.1, 0.2]], [[0.4, 0.5]]]}
        writer.write("train", step, SPEED | {"loss": 1 / step, **lists})
    writer.close()
    return writer


def test_later_attempt_replaces_rows_after_its_checkpoint(tmp_path):
    write_steps(tmp_path, 0, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "step": 6, "att')
    writer = write_steps(tmp_path, 3, 7)
    rows = all_metrics(tmp_path)
    assert writer.attempt == 2
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 2)]


def test_evaluations_of_later_steps_are_removed(tmp_path):
    evals = tmp_path / "evals"
    later = {"loss/4.json", "loss/5.ema.json", "position/5/nll.png", "needle/40.0a1b.items.jsonl"}
    # Results of earlier steps, and files that difftx does not write.
    others = {"loss/3.json", "notes/readme.md", "loss/2026-11-27-notes.txt", "loss/5.json.bak", "loss/6/notes.txt"}
    for path in [evals / name for name in later | others]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    remove_later_evaluations(tmp_path, 3)
    assert {str(path.relative_to(evals)) for path in evals.rglob("*") if path.is_file()} == others
    assert not (evals / "position" / "5").exists()


def test_non_finite_values_are_written_as_null(tmp_path):
    writer = MetricsWriter(tmp_path, QUIET, 0)
    writer.write("train", 1, {"loss": float("nan"), "grad_norm": float("inf"), "lambda": [0.1, float("nan")]})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["loss"], row["grad_norm"], row["lambda"]) == (None, None, [0.1, None])


def test_invalid_lines_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = SPEED | {"split": "train", "step": 1, "attempt": 1, "loss": 2.5}
    lines = ["not json", "[1]", '{"step": 3}', "\x00", *map(json.dumps, [row | {"loss": "2.5"}, row | {"step": -1}])]
    valid = [row, row | {"loss": None}]  # A loss of null stands for one that was not finite.
    path.write_text("\n".join([*map(json.dumps, valid), *lines]))
    assert list(read_metrics(path)) == valid


def test_tensorboard_hides_the_overlap(tmp_path):
    config = LoggingConfig(every_steps=1, trackers=("tensorboard",))
    write_steps(tmp_path, 0, 5, config)
    write_steps(tmp_path, 3, 4, config)
    restarts, values = [], []
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        for event in events(path.read_bytes()):
            if event.HasField("session_log"):
                restarts.append(event.step)
            values += [(event.step, v.tag, round(v.simple_value, 4)) for v in event.summary.value]
    assert 4 in restarts  # TensorBoard drops its earlier points from this step on.
    assert (2, "train/loss", 0.5) in values
    assert (1, "train/lambda/02", 0.3) in values
    assert (1, "train/largest_logits/02/01/02", 0.5) in values


def test_error_if_wandb_is_not_installed(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    install = r"wandb is not installed: .* pip install -e '\S+\[wandb\]'"
    message = rf"^logging\.trackers='wandb:p': {install}; or remove this tracker$"
    with pytest.raises(UserError, match=message):
        check_extras(config("diff", logging__trackers="wandb:p"))
    check_extras(config("diff"))


def test_a_start_reads_the_rows_as_a_stream(tmp_path):
    row = SPEED | {"split": "train", "attempt": 1, "loss": 2.5, "lambda": [0.2] * 8}
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(1, 2001)))
    size = path.stat().st_size
    tracemalloc.start()
    Goodput(0.0).resume(path, 1500)
    MetricsWriter(tmp_path, QUIET, 1500).close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * size  # The content itself, but not the objects in it.
    assert [row["step"] for row in read_metrics(path)] == list(range(1, 1501))


def test_plain_progress_ends_with_the_last_step(capsys):
    display = Work(is_output=True)
    with display, display.task("step", 4, done=1, label=PROGRESS_LABEL, line=PROGRESS_LINE) as advance:
        for _ in (2, 3, 4):
            advance(1, "loss 1.5000  grad 0.25  1,234 tokens/s")
    assert capsys.readouterr().out == "step 4/4  loss 1.5000  grad 0.25  1,234 tokens/s  0 s left\n"


@pytest.mark.long
def test_full_disk_gives_a_one_line_error_and_keeps_written_rows_readable(tmp_path):
    """A child process may write 4,000 bytes per file. The next attempt continues from one of the steps in the file."""
    script = (
        "import sys; from pathlib import Path; from training.metrics_test import *\n"
        "from difftx.errors import run_command\n"
        "config = LoggingConfig(every_steps=1, trackers=('tensorboard',))\n"
        "run_command(lambda: write_steps(Path(sys.argv[1]), 0, 1000, config))"
    )
    result = subprocess.run(
        ["prlimit", "--fsize=4000", sys.executable, "-B", "-c", script, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert re.fullmatch(
        r"error: .*: the numbers of step \d+ could not be written: (File too large|No space left on device); .*\n",
        result.stderr,
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert max(10, len(lines) - 2) < len(list(read_metrics(tmp_path / "metrics.jsonl")))
    write_steps(tmp_path, 10, 12)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 13))
