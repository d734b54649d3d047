"""Several sources in fixed proportions: example number → source and example of that source, by arithmetic alone.

Examples come in blocks. With M blocks a period and B examples a block, place p of block b is lattice point
p M + r(b) of B M, and a source owns as many neighbouring points as its weight; r reverses the bits of b, which spreads
each block's offset evenly. So every block has each source's share of B to within one example, what is rounded off in
one block is made good in others, and a period has the exact share. Which place comes when is shuffled.
"""

import bisect
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

BLOCK_ROWS = 256  # B. A batch of at least so many rows holds nearly the exact mixture.
PERIOD_BITS = 12
PERIOD_BLOCKS = 2**PERIOD_BITS  # M. Weights are rounded to 1 / (B M), one in a million.


@dataclasses.dataclass(frozen=True)
class Stage:
    """Weights, of any sum, from a block of the mixture on; the first stage starts at 0."""

    first_block: int
    weights: tuple[float, ...]


class Mixture:
    """An endless random-access sequence out of several: grain's shuffled and repeated datasets, one a source."""

    def __init__(self, sources: Sequence[Any], stages: Sequence[Stage], seed: int):
        """Compute each stage's table; `seed` orders the sources within a block."""
        self._sources = sources
        self._order = functools.lru_cache(maxsize=4)(functools.partial(shuffled_places, seed))
        self._tables = [StageTable(stage.weights) for stage in stages]
        self._first = [stage.first_block for stage in stages]
        self._used_before = [np.zeros(len(sources), np.int64)]  # Examples of each source before a stage.
        for first in self._first[1:]:
            self._used_before.append(self.used(first))

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Any:
        source, example = self.locate(index)
        return self._sources[source][example]

    def locate(self, index: int) -> tuple[int, int]:
        """Return which source example `index` comes from, and its number there."""
        block, row = divmod(index, BLOCK_ROWS)
        place = self._order(block)[row]
        stage = self._stage(block)
        bounds = self._tables[stage].bounds[(block - self._first[stage]) % PERIOD_BLOCKS]
        source = int(bounds.searchsorted(place, side="right")) - 1
        return source, int(self.used(block)[source] + place - bounds[source])

    def used(self, block: int) -> np.ndarray:
        """Return the examples of each source in all blocks before this one, int64 [sources]."""
        stage = self._stage(block)
        return self._used_before[stage] + self._tables[stage].before(block - self._first[stage])

    def _stage(self, block: int) -> int:
        # While the list of earlier stages' examples grows, a stage's first block still belongs to the one before.
        return bisect.bisect_right(self._first, block, hi=len(self._used_before)) - 1


class StageTable:
    """The examples of each source in the blocks of a stage."""

    def __init__(self, weights: Sequence[float]):
        points = np.concatenate([[0], np.cumsum(_whole_points(np.array(weights, float)))])
        offset = np.array([int(f"{b:0{PERIOD_BITS}b}"[::-1], 2) for b in range(PERIOD_BLOCKS)])
        # [M, sources + 1]: source s has places bounds[b, s] … bounds[b, s + 1] - 1 of block b.
        self.bounds = (points - offset[:, None] + PERIOD_BLOCKS - 1) // PERIOD_BLOCKS
        counts = np.diff(self.bounds, axis=1)
        self._before = np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])

    def before(self, block: int) -> np.ndarray:
        """Return the examples of each source in all blocks before this one of the stage, int64 [sources]."""
        periods, block = divmod(block, PERIOD_BLOCKS)
        return periods * self._before[-1] + self._before[block]


def shuffled_places(seed: int, block: int) -> np.ndarray:
    """Return the places of a block in the order they are read; raw bits, which numpy never changes."""
    return np.argsort(np.random.Philox(key=np.array([seed, block], np.uint64)).random_raw(BLOCK_ROWS), kind="stable")


def _whole_points(weights: np.ndarray) -> np.ndarray:
    """Divide the lattice by weight: whole points, the largest remainders rounded up, and one for the least weight."""
    exact = weights / weights.sum() * BLOCK_ROWS * PERIOD_BLOCKS
    points = np.maximum(np.floor(exact), weights > 0).astype(np.int64)
    missing = BLOCK_ROWS * PERIOD_BLOCKS - points.sum()
    if missing >= 0:
        points[np.argsort(points - exact, kind="stable")[:missing]] += 1
    else:
        points[np.argmax(points)] += missing
    return points
