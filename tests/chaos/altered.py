"""Run train.py with bad data: python altered.py BATCH,BATCH,… train.py ARGUMENT…"""

import runpy
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from difftx.data import loader


def poison(batches: set[int]) -> None:
    """Make the loss of some batches NaN."""
    original = loader.HostBatches.__getitem__

    def poisoned(self: loader.HostBatches, index: int) -> loader.Rows:
        rows = original(self, index)
        if index in batches:
            rows["loss_mask"] *= float("nan")
        return rows

    mock.patch.object(loader.HostBatches, "__getitem__", poisoned).start()


if __name__ == "__main__":
    poison({int(batch) for batch in sys.argv[1].split(",")})
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
