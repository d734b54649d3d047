"""Run train.py with steps of a second and a short wait for the lock: python one_bucket_owner.py [FLAGS].

While the file $HOLD exists, training writes no more than `HELD_ROWS` rows.
"""

import itertools
import os
import runpy
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from difftx import run_files
from difftx.training import run
from difftx.training.metrics import MetricsWriter

HELD_ROWS = 10
write, rows = MetricsWriter.write, itertools.count(1)


def write_and_wait(*row):
    """Write a row of metrics.jsonl, and wait."""
    write(*row)
    time.sleep(1)
    while next(rows) >= HELD_ROWS and Path(os.environ["HOLD"]).exists():
        time.sleep(0.1)


MetricsWriter.write = write_and_wait
run_files.PUSH_SECONDS = 0.1
run.LOCK_WAIT_SECONDS = 2.0
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
