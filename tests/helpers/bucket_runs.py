"""Training commands with `--workdir` in a bucket, and readers of the files of a run there."""

import json
import time
from pathlib import Path

from conftest import TINY, child_environment

from difftx.json_files import JsonLines
from difftx.run_files import pulled
from difftx.storage import objects
from difftx.training.checkpoint import arrays
from difftx.training.checkpoint.manifest import MANIFEST, is_note, read_manifest, steps_in
from difftx.training.checkpoint.restoring import config_of
from helpers.command_server import commands
from helpers.processes import TRAIN_SLOWLY

CONFIG = TINY | {
    "train.steps": "24",
    "checkpoint.every_steps": "4",
    "eval.every_steps": "12",
    "eval.loss_tokens": "512",
    "logging.every_steps": "1",
    "multihost.lock_takeover_seconds": "10",
    "optimizer.schedule": "constant",  # Independent of train.steps, which some tests raise when a run continues.
}


def command(text_file, workdir, script=("train.py",), **changes):
    """Return the command line of a training."""
    fields = CONFIG | {"data.path": str(text_file)} | {k.replace("__", "."): str(v) for k, v in changes.items()}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    return [*script, "--config=configs/quickstart.py", f"--workdir={workdir}", *flags]


def train(text_file, workdir, **changes):
    """Train to the end, and return the exit code and output."""
    return commands().run(command(text_file, workdir, **changes), environment=child_environment(1))


def start(text_file, workdir, log: Path, *, stop_after_row=None, **changes):
    """Start a training with slow steps, whose output goes to a file. It waits for a signal after the given row."""
    environment = child_environment(1) | ({"STOP_AFTER_ROW": str(stop_after_row)} if stop_after_row else {})
    words = command(text_file, workdir, TRAIN_SLOWLY, **changes)
    return commands().start(words, stdout=log, stderr=log, environment=environment)


def run_of(workdir):
    """Return what must be equal in two runs: losses and gradient norms of all steps, the last state, and `train.*`."""
    rows = [json.loads(line) for line in JsonLines(pulled(workdir) / "metrics.jsonl").content().splitlines()]
    train_rows = [(row["step"], row["loss"], row["grad_norm"]) for row in rows if row["split"] == "train"]
    folder = workdir / "checkpoints"
    folder = folder / str(steps_in(folder)[-1])
    return train_rows, state_in(folder), config_of(read_manifest(folder)).train


def state_in(folder):
    """Return the bytes of all arrays of a checkpoint, and the state of the data loader."""
    manifest = read_manifest(folder)
    contents = manifest.contents
    found = {n: arrays.read_part(contents, arrays.open_array(contents, n)) for n in manifest.arrays}
    return {name: array.tobytes() for name, array in found.items()}, manifest.loader["examples"]


def newest_row(workdir, *, after_attempt=0):
    """Return the last step in metrics.jsonl, or 0. Rows of an attempt up to `after_attempt` do not count."""
    return max((step for attempt, step in _rows(workdir) if attempt > after_attempt), default=0)


def newest_attempt(workdir):
    """Return the last attempt in metrics.jsonl, or 0."""
    return max((attempt for attempt, _ in _rows(workdir)), default=0)


def _rows(workdir):
    """Return attempt and step of each row of the training."""
    rows = JsonLines(pulled(workdir) / "metrics.jsonl").read({"split": str, "step": int, "attempt": int})
    return [(row["attempt"], row["step"]) for row in rows if row["split"] == "train"]


def is_saving(workdir):
    """Return whether a checkpoint is being saved."""
    folder = workdir / "checkpoints"
    manifests = objects.read_all((folder / name / MANIFEST, {}) for name in objects.list_folder(folder))
    return any(found is not None and is_note(found.content) for found in manifests)


def wait_until(condition, process, log, seconds=120):
    """Wait for a condition, and return whether it came true before the process ended."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    return True
