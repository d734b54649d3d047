"""The only file of the golden driver that uses names inside difftx, because no command prints batches.

A redesign that changes these names edits this file. `driver.py` uses the version of this file in the commit that it
measures, or this version if that commit has none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def first_batches(spec: str, overrides: Mapping[str, str], count: int) -> list[dict[str, np.ndarray | None]]:
    """Return the first batches that train.py would train on.

    Args:
        spec: config file and its argument, as train.py's --config takes them.
        overrides: full name of a field → its text on a command line.
        count: number of batches.

    Returns:
        Name of an array → `[rows, T]`, or None where the batches have no such array. Names: tokens, targets, loss_mask,
        segment_ids, positions.
    """
    from difftx.config.recipes import load_config
    from difftx.data.loader import Loader
    from difftx.training.run import Run

    config = load_config(spec, overrides)
    run = Run.open(config, Path())
    loader: Any = Loader(
        run.data,
        batch_rows=config.batch_rows,
        prefetch_batches=config.data.prefetch_batches,
        sharding=run.batch_sharding,
        vocab_size=config.model.vocab_size,
    )
    names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    batches = [next(loader) for _ in range(count)]
    return [{name: _host(getattr(batch, f"{name}_BT")) for name in names} for batch in batches]


def _host(array: Any) -> np.ndarray | None:
    return None if array is None else np.asarray(array)
