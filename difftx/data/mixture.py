"""Mixtures of sources in fixed proportions, with random access to any example.

Arithmetic alone maps the number of an example to a source and an example of that source. Examples form blocks of B
examples, and blocks form periods of M blocks. A period has B·M points, and each source owns a contiguous range of them,
in proportion to its weight. Position p of block b is point p·M + r(b), where r reverses the bits of b. This spreads the
offsets r(b) evenly. Therefore the number of examples of a source in a block differs from the source's share of B by at
most one, and over a period the share is exact. The positions of a block are read in a shuffled order.
"""

import bisect
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

BLOCK_ROWS = 256  # B. A batch of at least this many rows holds nearly the exact mixture.
PERIOD_BITS = 12
PERIOD_BLOCKS = 2**PERIOD_BITS  # M. Weights are rounded to multiples of 1 / (B M), one in a million.


@dataclasses.dataclass(frozen=True)
class Stage:
    """Weights of the sources, with any sum, from block `first_block` on. The first stage starts at block 0."""

    first_block: int
    weights: tuple[float, ...]


class Mixture:
    """An endless random-access mixture of several sources, each a shuffled and repeated grain dataset."""

    def __init__(self, sources: Sequence[Any], stages: Sequence[Stage], seed: int):
        """Mix the sources by the weights of each stage. `seed` determines the order of positions within a block."""
        self._sources = sources
        self._order = functools.lru_cache(maxsize=4)(functools.partial(shuffled_positions, seed))
        self._tables = [StageTable(stage.weights) for stage in stages]
        self._first = [stage.first_block for stage in stages]
        self._used_before = [np.zeros(len(sources), np.int64)]  # Examples of each source before each stage.
        for first in self._first[1:]:
            self._used_before.append(self.used(first))

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Any:
        source, example = self.locate(index)
        return self._sources[source][example]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of an example of the mixture, and the example's number within that source."""
        block, row = divmod(index, BLOCK_ROWS)
        position = self._order(block)[row]
        stage = self._stage(block)
        bounds = self._tables[stage].bounds[(block - self._first[stage]) % PERIOD_BLOCKS]
        source = int(bounds.searchsorted(position, side="right")) - 1
        return source, int(self.used(block)[source] + position - bounds[source])

    def used(self, block: int) -> np.ndarray:
        """Return the number of examples of each source in all blocks before `block`, int64 [sources]."""
        stage = self._stage(block)
        return self._used_before[stage] + self._tables[stage].before(block - self._first[stage])

    def _stage(self, block: int) -> int:
        # While `__init__` still fills `_used_before`, the first block of a stage counts as part of the previous stage.
        return bisect.bisect_right(self._first, block, hi=len(self._used_before)) - 1


class StageTable:
    """The positions of each source in the blocks of a stage. Its blocks are numbered from 0."""

    def __init__(self, weights: Sequence[float]):
        points = np.concatenate([[0], np.cumsum(_whole_points(np.array(weights, float)))])
        offset = np.array([int(f"{b:0{PERIOD_BITS}b}"[::-1], 2) for b in range(PERIOD_BLOCKS)])
        # [M, sources + 1]: source s has positions bounds[b, s] … bounds[b, s + 1] - 1 of block b.
        self.bounds = (points - offset[:, None] + PERIOD_BLOCKS - 1) // PERIOD_BLOCKS
        counts = np.diff(self.bounds, axis=1)
        self._before = np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])

    def before(self, block: int) -> np.ndarray:
        """Return the number of examples of each source in the stage's blocks before `block`, int64 [sources]."""
        periods, block = divmod(block, PERIOD_BLOCKS)
        return periods * self._before[-1] + self._before[block]


def shuffled_positions(seed: int, block: int) -> np.ndarray:
    """Return the positions of a block in reading order, the same with every version of numpy: raw bits never change."""
    return np.argsort(np.random.Philox(key=np.array([seed, block], np.uint64)).random_raw(BLOCK_ROWS), kind="stable")


def _whole_points(weights: np.ndarray) -> np.ndarray:
    """Divide the points of a period among the sources; a source with a positive weight gets at least one point."""
    exact = weights / weights.sum() * BLOCK_ROWS * PERIOD_BLOCKS
    points = np.maximum(np.floor(exact), weights > 0).astype(np.int64)
    missing = BLOCK_ROWS * PERIOD_BLOCKS - points.sum()
    if missing >= 0:  # Round up the largest remainders.
        points[np.argsort(points - exact, kind="stable")[:missing]] += 1
    else:
        points[np.argmax(points)] += missing
    return points
