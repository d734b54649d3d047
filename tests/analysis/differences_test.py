"""Compare confidence intervals of differences with scipy's tests, textbook formulas and a bootstrap."""

import numpy as np
import pytest
import scipy.stats

from difftx.analysis.differences import over_blocks, over_pairs, over_seeds


def test_blocks_of_equal_size_give_a_paired_t_test():
    rng = np.random.default_rng(0)
    first, tokens = rng.normal(2.0, 0.3, 40), np.full(40, 64.0)
    second = first + rng.normal(0.1, 0.05, 40)
    found = over_blocks([(first * 64, second * 64, tokens)])
    expected = scipy.stats.ttest_rel(second, first).confidence_interval(0.95)
    assert found.value == pytest.approx(np.mean(second - first), rel=1e-12)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_unequal_blocks_and_several_sets_by_bootstrap():
    rng = np.random.default_rng(1)
    sets, resampled = [], []
    for blocks in (60, 90):
        tokens = rng.integers(20, 200, blocks).astype(float)
        first = tokens * rng.normal(2.0, 0.3, blocks)
        sets.append((first, first + tokens * rng.normal(-0.05, 0.1, blocks), tokens))
        drawn = rng.integers(0, blocks, (20_000, blocks))
        resampled.append((sets[-1][1] - first)[drawn].sum(1) / tokens[drawn].sum(1))
    found = over_blocks(sets)
    means = np.mean(resampled, axis=0)
    assert found.value == pytest.approx(np.mean([np.sum(b - a) / np.sum(t) for a, b, t in sets]), rel=1e-12)
    # Student's t and the unbiased variance make the interval a little wider than the bootstrap's.
    assert (found.high - found.low) / np.subtract(*np.quantile(means, [0.975, 0.025])) == pytest.approx(1.02, abs=0.03)


def test_seeds_by_welchs_formula():
    first, second = [2.0, 2.1, 2.3], [1.9, 1.95, 1.8, 1.99]
    found = over_seeds(first, second)
    a, b = np.var(first, ddof=1) / 3, np.var(second, ddof=1) / 4
    freedom = (a + b) ** 2 / (a**2 / 2 + b**2 / 3)
    half = scipy.stats.t.ppf(0.975, freedom) * np.sqrt(a + b)
    value = np.mean(second) - np.mean(first)
    assert (found.value, found.low, found.high) == pytest.approx((value, value - half, value + half), rel=1e-9)


def test_pairs_by_students_formula():
    first, second = [2.0, 2.1, 2.3, 2.6], [1.9, 1.95, 2.25, 2.4]
    found = over_pairs(first, second)
    differences = np.subtract(second, first)
    half = scipy.stats.t.ppf(0.975, 3) * np.std(differences, ddof=1) / 2
    value = np.mean(differences)
    assert (found.value, found.low, found.high) == pytest.approx((value, value - half, value + half), rel=1e-9)
    # Variation that both members of a pair share widens Welch's interval, but not this one.
    welch = over_seeds(first, second)
    assert found.high - found.low < 0.25 * (welch.high - welch.low)
    same = over_pairs([1.0, 2.0], [1.5, 2.5])
    assert (same.value, same.low, same.high) == (0.5, 0.5, 0.5)


def test_equal_models_have_a_difference_of_zero():
    nats, tokens = np.arange(1.0, 11.0), np.full(10, 5.0)
    found = over_blocks([(nats, nats, tokens)])
    assert (found.value, found.low, found.high) == (0, 0, 0)
