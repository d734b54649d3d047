"""Training processes that a test stops at a step, and the losses in their metrics.jsonl."""

import time

from conftest import child_environment

from difftx.training.metrics import read_metrics
from helpers.command_server import commands
from helpers.processes import TRAIN_SLOWLY


def all_metrics(workdir):
    """Return the rows of a run's metrics.jsonl, and check that each of its lines is valid."""
    rows = list(read_metrics(path := workdir / "metrics.jsonl"))
    assert len(rows) == len(path.read_text().splitlines())
    return rows


def train_losses(workdir):
    rows = all_metrics(workdir)
    train = [row for row in rows if row["split"] == "train"]
    assert [row["step"] for row in train] == list(range(1, len(train) + 1))  # No step is missing or repeated.
    return [row["loss"] for row in train], rows


def stop_after(step, sent, command, workdir, devices=1):
    """Start the command, send a signal when `step` is in metrics.jsonl, and return the exit code."""
    _, *flags = command
    process = commands().start([*TRAIN_SLOWLY, *flags], environment=child_environment(devices))
    wait_for_step(step, process, workdir)
    process.send_signal(sent)
    return process.wait(timeout=120)


def wait_for_step(step, process, workdir):
    metrics = workdir / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert process.poll() is None, "training ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.01)
