"""Run train.py with steps of at least 50 ms: python tests/helpers/train_slowly.py [FLAGS of train.py].

Without the wait, a tiny model's steps are over before a test on a busy machine can send a signal between two of them.
With the variable `STOP_AFTER_ROW`, the run waits for a signal after the row of that step in metrics.jsonl. A run in a
bucket pushes its files all the time, so that a test there sees the rows. With `CLOCK_RATE`, the clock of checkpoints
runs faster by this factor.
"""

import os
import runpy
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from difftx import run_files
from difftx.training.checkpoint import checkpointer
from difftx.training.metrics import MetricsWriter

run_files.PUSH_SECONDS = 0.1
write = MetricsWriter.write
last = float(os.environ.get("STOP_AFTER_ROW", "inf"))

rate = float(os.environ.get("CLOCK_RATE", "1"))
checkpointer.time = types.SimpleNamespace(monotonic=lambda: rate * time.monotonic())


def write_and_wait(writer, split, step, *values):
    """Write a row of metrics.jsonl, and wait."""
    write(writer, split, step, *values)
    time.sleep(0.05 if step < last else 600)


MetricsWriter.write = write_and_wait
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
