"""Shuffled sources, and mixtures of sources in fixed proportions. Both give random access to any example.

From the index of an example in the mixture, arithmetic alone gives its source and its index in that source. B
consecutive examples form a block, and M blocks form a period. The B·M points of a period are divided into contiguous
ranges, one per source, with lengths proportional to the weights. Position p of block b is point p·M + r(b), where r(b)
is b with its bits reversed, so that consecutive blocks have evenly spread offsets r(b). In each block, a source's
number of examples differs from its share of B by at most one. Over a whole period, it is exact. Each block is read in a
shuffled order.
"""

import bisect
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
import xxhash

BLOCK_ROWS = 256  # B in the text above. Batches of at least this size have nearly exact proportions.
PERIOD_BITS = 12
PERIOD_BLOCKS = 2**PERIOD_BITS  # M in the text above. Weights are rounded to multiples of 1 / (B·M), about 1e-6.


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """Endless random-access rows of a source. The order differs for every epoch and every seed."""

    rows: Any
    seed: int  # Below 2**32.

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Any:
        return self.rows[self.locate(index)]

    def locate(self, index: int) -> int:
        epoch, index = divmod(index, len(self.rows))
        # Hash both numbers. With the sum seed + epoch, seeds 0 and 1 would have the same orders, shifted by one epoch.
        seed = xxhash.xxh32_intdigest(f"{self.seed} {epoch}".encode()) if epoch else self.seed
        return grain.experimental.index_shuffle(index, max_index=len(self.rows) - 1, seed=seed, rounds=4)


# First block of a stage, and relative weights of the sources in it. The first stage starts at block 0.
type Stage = tuple[int, Sequence[float]]


def stages_of(signature: dict[str, Any]) -> list[Stage]:
    """Return the stages in a `Sources.signature`."""
    block_tokens = BLOCK_ROWS * signature["sequence_length"]
    later = [(-(-start // block_tokens), weights) for start, *weights in signature["stages"]]
    return [(0, signature["weights"]), *later]


def begun(signature: dict[str, Any], examples: int) -> dict[str, Any]:
    """Return a `Sources.signature` with only the stages that affect the first `examples` examples."""
    last_block = -(-examples // BLOCK_ROWS) - 1
    last_token = last_block * BLOCK_ROWS * signature.get("sequence_length", 1)
    return signature | {"stages": [stage for stage in signature.get("stages", ()) if stage[0] <= last_token]}


class Mixture:
    """An endless random-access mixture of several `Shuffled` sources."""

    def __init__(self, sources: Sequence[Any], stages: Sequence[Stage], seed: int):
        """Mix the sources with the weights of each stage. `seed` determines the order of the examples in a block."""
        self._sources = sources
        self._order = functools.lru_cache(maxsize=4)(functools.partial(shuffled_positions, seed))
        self._tables = [StageTable(weights) for _, weights in stages]
        self._first = [first_block for first_block, _ in stages]
        self._used_before = [np.zeros(len(sources), np.int64)]  # Examples that each source has used before each stage.
        for first in self._first[1:]:
            self._used_before.append(self.used(first))

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Any:
        source, example = self.locate(index)
        return self._sources[source][example]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the index of an example's source, and the example's index in that source."""
        block, row = divmod(index, BLOCK_ROWS)
        position = self._order(block)[row]
        stage = self._stage(block)
        bounds = self._tables[stage].bounds[(block - self._first[stage]) % PERIOD_BLOCKS]
        source = int(bounds.searchsorted(position, side="right")) - 1
        return source, int(self.used(block)[source] + position - bounds[source])

    def used(self, block: int) -> np.ndarray:
        """Count each source's examples in all blocks before `block`, as int64 `[sources]`."""
        stage = self._stage(block)
        return self._used_before[stage] + self._tables[stage].before(block - self._first[stage])

    def _stage(self, block: int) -> int:
        # `hi` excludes the stages that `__init__` has not added to `_used_before` yet.
        return bisect.bisect_right(self._first, block, hi=len(self._used_before)) - 1


class StageTable:
    """The positions of each source in each block of a stage. The stage's first block has index 0."""

    def __init__(self, weights: Sequence[float]):
        points = np.concatenate([[0], np.cumsum(_whole_points(np.array(weights, float)))])
        offset = np.array([int(f"{b:0{PERIOD_BITS}b}"[::-1], 2) for b in range(PERIOD_BLOCKS)])
        # Shape [M, sources + 1]. In block b, source s has the positions bounds[b, s] to bounds[b, s + 1] - 1.
        self.bounds = (points - offset[:, None] + PERIOD_BLOCKS - 1) // PERIOD_BLOCKS
        counts = np.diff(self.bounds, axis=1)
        self._before = np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])

    def before(self, block: int) -> np.ndarray:
        """Count each source's examples in the first `block` blocks of the stage, as int64 `[sources]`."""
        periods, block = divmod(block, PERIOD_BLOCKS)
        return periods * self._before[-1] + self._before[block]


def shuffled_positions(seed: int, block: int) -> np.ndarray:
    """Shuffle the positions of a block. Use raw random bits, because they are the same in every version of numpy."""
    return np.argsort(np.random.Philox(key=np.array([seed, block], np.uint64)).random_raw(BLOCK_ROWS), kind="stable")


def _whole_points(weights: np.ndarray) -> np.ndarray:
    """Return each source's number of points in a period. Every positive weight gets at least one point."""
    exact = weights / weights.sum() * BLOCK_ROWS * PERIOD_BLOCKS
    points = np.maximum(np.floor(exact), weights > 0).astype(np.int64)
    missing = BLOCK_ROWS * PERIOD_BLOCKS - points.sum()
    if missing >= 0:  # Round up the sources with the largest remainders.
        points[np.argsort(points - exact, kind="stable")[:missing]] += 1
    else:
        points[np.argmax(points)] += missing
    return points
