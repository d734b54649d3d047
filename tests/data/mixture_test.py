"""Mixtures of sources: weights, stages and the order of examples."""

import collections
import itertools

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.data import mixture
from difftx.data.mixture import BLOCK_ROWS, PERIOD_BLOCKS, Mixture, Shuffled, StageTable

WEIGHTS = st.lists(st.sampled_from([0.0, 1e-5, 0.1, 1.0, 3.7, 1000.0]), min_size=1, max_size=6).filter(any)


def mixture_of(*stages, seed=3):
    sources = [[f"{s}:{i}" for i in range(20_000)] for s in range(len(stages[0][1]))]
    return Mixture(sources, stages, seed)


@settings(max_examples=15, deadline=None, database=None)
@given(weights=WEIGHTS, seed=st.integers(0, 2**32 - 1))
def test_blocks_follow_the_weights_within_one_and_use_every_example_once(weights, seed):
    mixed = mixture_of((0, weights), seed=seed)
    located = [mixed.locate(n) for n in range(4 * BLOCK_ROWS)]
    share = np.array(weights) / sum(weights)
    for block in range(4):
        counts = collections.Counter(s for s, _ in located[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS])
        for source in range(len(weights)):
            assert abs(counts[source] - share[source] * BLOCK_ROWS) <= 1
            assert counts[source] == 0 or weights[source] > 0
    for source in range(len(weights)):
        used = [example for s, example in located if s == source]
        assert sorted(used) == list(range(len(used)))  # No example is repeated or left out.


@settings(max_examples=15, deadline=None, database=None)
@given(weights=WEIGHTS)
def test_rounding_errors_of_blocks_do_not_accumulate(weights):
    table = StageTable(weights)
    blocks = np.arange(1, PERIOD_BLOCKS + 1)
    used = np.array([table.before(int(b)) for b in blocks])
    exact = blocks[:, None] * BLOCK_ROWS * (np.array(weights) / sum(weights))
    assert np.abs(used - exact).max() < 10
    assert np.abs(used[-1] - exact[-1]).max() <= 1 + len(weights)  # Only the rounding of the weights remains.
    np.testing.assert_array_equal(table.before(3 * PERIOD_BLOCKS + 5), 3 * used[-1] + used[4])
    assert (used.sum(axis=1) == blocks * BLOCK_ROWS).all()


def test_stages_change_the_weights_and_continue_each_source():
    mixed = mixture_of((0, (3.0, 1.0)), (2, (0.0, 1.0)), (5, (1.0, 0.0)))
    located = [mixed.locate(n) for n in range(7 * BLOCK_ROWS)]
    counts = [collections.Counter(s for s, _ in located[b * BLOCK_ROWS :][:BLOCK_ROWS]) for b in range(7)]
    assert [c[0] for c in counts] == [192, 192, 0, 0, 0, 256, 256]
    for source in (0, 1):
        used = [example for s, example in located if s == source]
        assert sorted(used) == list(range(len(used)))
    np.testing.assert_array_equal(mixed.used(6), [2 * 192 + 256, 2 * 64 + 3 * 256])


def test_the_order_within_a_block_is_shuffled_by_the_seed():
    first, again, other = (mixture_of((0, (1.0, 1.0)), seed=seed) for seed in (1, 1, 2))
    orders = [[m[n] for n in range(2 * BLOCK_ROWS)] for m in (first, again, other)]
    assert orders[0] == orders[1] != orders[2]
    sources = [name[0] for name in orders[0]]
    assert sources[:BLOCK_ROWS] != sources[BLOCK_ROWS:]  # Another order in each block.
    runs = 1 + sum(a != b for a, b in itertools.pairwise(sources))
    assert 200 < runs < 312  # 512 coin flips have about 256 runs, with a standard deviation of 11.


def test_no_two_seeds_have_an_order_in_common():
    """The orders of a seed and the next are not those of an epoch later either. Epoch 0 is that of `grain`."""
    seeds, epochs, rows = (0, 1, 2**32 - 1), 3, 50
    orders = {}
    for seed in seeds:
        shuffled = Shuffled(range(rows), seed)
        for epoch in range(epochs):
            order = tuple(shuffled[epoch * rows + i] for i in range(rows))
            assert sorted(order) == list(range(rows))
            orders[order] = (seed, epoch)
        assert [shuffled[i] for i in range(rows)] == list(grain.MapDataset.range(rows).shuffle(seed=seed))
    assert len(orders) == len(seeds) * epochs


@pytest.mark.parametrize("examples", [0, 1, 256, 257, 1024, 1025])
def test_changes_of_weights_and_stages_against_the_rows(examples):
    """Compare the signatures that a resumed run compares with the rows that both mixtures read."""
    block = 32 * BLOCK_ROWS
    first = [[3 * block, 1.0, 1.0]]
    stages = {"old": first, "earlier": [[block, 1.0, 1.0]], "without": []}
    stages |= {"appended": [*first, [4 * block - 5, 0.0, 1.0]]}
    rows, begun = {}, {}
    for name, of_stages in stages.items():
        signature = {"weights": [3.0, 1.0], "stages": of_stages, "sequence_length": 32}
        mixed = Mixture([range(10**9), range(10**9, 2 * 10**9)], mixture.stages_of(signature), 0)
        rows[name] = [mixed[i] for i in range(-(-examples // BLOCK_ROWS) * BLOCK_ROWS)]
        begun[name] = mixture.begun(signature, examples)
    for name in stages:
        assert (begun[name] == begun["old"]) == (rows[name] == rows["old"])
