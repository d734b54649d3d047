"""Fits of power laws to points with planted parameters, and the ratios of size at equal loss."""

import numpy as np
import pytest

from difftx.analysis.scaling_law import Fit, PowerLaw, match_at, match_reference_at

SIZES = np.repeat([0.834e9, 1.410e9, 2.763e9, 6.837e9, 13.083e9], 3)  # Table 10, three seeds each.
TRANSFORMER = PowerLaw(450.0, 0.3, 2.3)


def shifted(law, ratio):
    """Return the law that needs `ratio` of the size for every loss: L'(ratio·x) = L(x)."""
    return PowerLaw(law.a * ratio**law.b, law.b, law.c)


def noisy(law, x, generator, noise=1e-3):
    return law(x) * np.exp(noise * generator.standard_normal(len(x)))


@pytest.mark.long
def test_planted_parameters_lie_in_their_intervals():
    """Each parameter must lie in its own 95 % interval in at least 90 of 100 simulations."""
    generator = np.random.default_rng(1)
    inside = dict.fromkeys("abc", 0)
    for seed in range(100):
        fit = Fit.of(SIZES, noisy(TRANSFORMER, SIZES, generator), resamples=50, seed=seed)
        for name in inside:
            low, high = fit.interval(name)
            inside[name] += low <= getattr(TRANSFORMER, name) <= high
    assert min(inside.values()) >= 90, inside


def test_without_noise_the_fit_is_the_law_and_one_outlier_moves_it_little():
    x = np.unique(SIZES)
    exact = Fit.of(x, TRANSFORMER(x), resamples=10, seed=0)
    for name in "abc":
        assert getattr(exact.law, name) == pytest.approx(getattr(TRANSFORMER, name), rel=1e-3)
        assert np.ptp(exact.interval(name)) == pytest.approx(0, abs=1e-2 * getattr(TRANSFORMER, name))
    loss = TRANSFORMER(SIZES)
    loss[7] *= 1.05  # A run that went wrong.
    robust = Fit.of(SIZES, loss, resamples=1, seed=0)
    assert robust.law(x) == pytest.approx(TRANSFORMER(x), rel=1e-3)


@pytest.mark.long
def test_matches_have_the_planted_ratio():
    generator = np.random.default_rng(2)
    diff, both = shifted(TRANSFORMER, 0.622), 0
    for seed in range(10):
        fits = [Fit.of(SIZES, noisy(law, SIZES, generator), resamples=60, seed=seed) for law in (diff, TRANSFORMER)]
        forward, backward = match_at(*fits, 6.837e9), match_reference_at(*fits, 13.083e9)
        assert forward.ratio == pytest.approx(forward.x / forward.reference_x)
        both += all(m.interval[0] <= 0.622 <= m.interval[1] for m in (forward, backward))
    assert both >= 8
    # Both functions find the same point.
    again = match_reference_at(*fits, forward.reference_x)
    assert (again.x, again.ratio) == pytest.approx((forward.x, forward.ratio))


def test_the_band_holds_the_law_and_widens_outside_the_data():
    fit = Fit.of(SIZES, noisy(TRANSFORMER, SIZES, np.random.default_rng(3)), resamples=60, seed=0)
    x = np.array([0.2e9, 3e9, 100e9])
    low, high = fit.band(x)
    assert np.all((low < TRANSFORMER(x)) & (TRANSFORMER(x) < high))
    assert (high - low)[1] < min((high - low)[0], (high - low)[2])


def test_sizes_that_lie_off_the_law_widen_the_interval_more_than_their_seeds_do():
    """All seeds of a size share its deviation from the law, so more seeds do not make the law more certain."""
    generator = np.random.default_rng(4)
    deviations = np.repeat(1e-3 * np.array([1, -1, 1, -1, 1]), 3)
    own = 1e-5 * generator.standard_normal(15)
    shared = Fit.of(SIZES, TRANSFORMER(SIZES) * np.exp(deviations + own), resamples=60, seed=0)
    mixed = Fit.of(SIZES, TRANSFORMER(SIZES) * np.exp(generator.permutation(deviations)), resamples=60, seed=0)
    assert np.ptp(shared.interval("b")) > 1.5 * np.ptp(mixed.interval("b"))
