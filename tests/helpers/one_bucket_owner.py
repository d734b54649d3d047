"""Run train.py with slow steps, and give up at a lock after a few seconds: python one_bucket_owner.py [FLAGS]."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from difftx.training import run

run.LOCK_WAIT_SECONDS = 2.0
sys.argv[0] = "tests/unhurried.py"
runpy.run_path("tests/unhurried.py", run_name="__main__")
