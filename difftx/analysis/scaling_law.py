"""Scaling laws L(x) = a·x^-b + c, with x a number of parameters or tokens: fits, uncertainty, sizes of equal loss.

Estimate: the fit minimises Huber's loss on the difference of logarithms, as Hoffmann et al. do (arXiv 2203.15556,
approach 3). It optimises the logarithms of a, b and c from several starting points.

Uncertainty: a bootstrap resamples residuals on two levels: the distance of a size's mean from the law, and the distance
of a seed from the mean of its size. Both are scaled to their unbiased variance. Because they are few, both are also
widened from the normal distribution to Student's.
"""

import dataclasses
from typing import Self

import numpy as np
import scipy.optimize
import scipy.stats

LAW_PARAMETERS = 3
FEWEST_SIZES = LAW_PARAMETERS + 1  # Three sizes would leave no residuals to judge the fit by.
HUBER_WIDTH = 1e-3  # Largest residual in log loss that counts squared; Hoffmann et al.'s value.
LARGEST_EXTRAPOLATION = 2.0  # Factor beyond the largest or the smallest x of the data.
CONFIDENCE = 0.95
EXPONENTS = (0.01, 5.0)
STARTS = 3


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """The law L(x) = a·x^-b + c. The fields are numbers, or arrays with one law per element."""

    a: np.ndarray | float
    b: np.ndarray | float
    c: np.ndarray | float

    def __call__(self, x: np.ndarray | float) -> np.ndarray:
        """Return the losses at x."""
        return np.asarray(self.a * np.asarray(x, float) ** -np.asarray(self.b) + self.c)

    def inverse(self, loss: np.ndarray | float) -> np.ndarray:
        """Return the x at which the law reaches a loss, or infinity if it never does."""
        above = np.asarray(loss, float) - self.c
        with np.errstate(divide="ignore", over="ignore"):
            return np.where(above > 0, (np.maximum(above, 0) / self.a) ** (-1 / np.asarray(self.b)), np.inf)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law, the points it was fitted to, and the laws fitted to bootstrap resamples."""

    x: np.ndarray
    loss: np.ndarray
    law: PowerLaw
    samples: PowerLaw

    @classmethod
    def of(cls, x: np.ndarray, loss: np.ndarray, *, resamples: int, seed: int) -> Self:
        """Fit a law to points with at least `FEWEST_SIZES` different x. Points with equal x are different seeds."""
        generator = np.random.default_rng(seed)
        order = np.argsort(x, kind="stable")
        x, loss = np.asarray(x, float)[order], np.asarray(loss, float)[order]
        assert len(np.unique(x)) >= FEWEST_SIZES
        centre = float(np.exp(np.mean(np.log(x))))  # Dividing x by `centre` makes a and b nearly independent.
        best = min((_solve(x / centre, loss, start) for start in _starts(x / centre, loss)), key=lambda r: r.cost)
        law = _law(best.x[None, :], centre)
        fitted = PowerLaw(*(float(np.ravel(v)[0]) for v in (law.a, law.b, law.c)))
        drawn = _resampled(x, np.log(loss) - np.log(fitted(x)), resamples, generator)
        curve = fitted(x)
        found = [_solve(x / centre, curve * np.exp(noise), best.x, evaluations=50).x for noise in drawn]
        return cls(x, loss, fitted, _law(np.array(found), centre))

    def interval(self, name: str) -> tuple[float, float]:
        """Return the confidence interval of a parameter, "a", "b" or "c"."""
        return _interval(np.asarray(getattr(self.samples, name)))

    def band(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper end of the confidence band at each x."""
        samples = PowerLaw(*(np.asarray(v)[:, None] for v in (self.samples.a, self.samples.b, self.samples.c)))
        low, high = np.quantile(samples(x[None, :]), _tails(), axis=0)
        return low, high

    def extrapolates(self, x: float) -> bool:
        """Return whether x lies outside the range of the data by more than a factor of `LARGEST_EXTRAPOLATION`."""
        return not self.x.min() / LARGEST_EXTRAPOLATION <= x <= self.x.max() * LARGEST_EXTRAPOLATION


@dataclasses.dataclass(frozen=True)
class Match:
    """Two sizes of equal loss. `ratio` = x / reference_x is the model's size relative to the reference's."""

    x: float
    reference_x: float
    loss: float
    ratio: float
    interval: tuple[float, float]
    extrapolated: bool  # Whether `Fit.extrapolates` holds for one of the sizes.


def match_at(fit: Fit, reference: Fit, x: float) -> Match | None:
    """Match the model at size `x` with the reference of equal loss; return None if there is no such reference."""
    loss = float(fit.law(x))
    other = float(reference.law.inverse(loss))
    if not np.isfinite(other):
        return None
    with np.errstate(divide="ignore"):
        ratios = x / reference.samples.inverse(fit.samples(x))  # 0 if the reference never reaches a sample's loss.
    far = fit.extrapolates(x) or reference.extrapolates(other)
    return Match(x, other, loss, x / other, _interval(ratios), far)


def match_reference_at(fit: Fit, reference: Fit, reference_x: float) -> Match | None:
    """Match the reference at size `reference_x` with the model of equal loss; return None if there is no such model."""
    found = match_at(reference, fit, reference_x)
    if found is None:
        return None
    with np.errstate(divide="ignore"):
        ratios = fit.samples.inverse(reference.samples(reference_x)) / reference_x
    x = found.reference_x
    return Match(x, reference_x, found.loss, x / reference_x, _interval(ratios), found.extrapolated)


def _starts(u: np.ndarray, loss: np.ndarray) -> list[np.ndarray]:
    """Return the best `STARTS` points of a grid of floors and exponents, as (log a, log b, log c)."""
    grid = [
        np.array([np.mean(loss) - share * np.min(loss), b, share * np.min(loss)])
        for share in (0.1, 0.4, 0.7, 0.85, 0.95, 0.99)
        for b in (0.05, 0.15, 0.3, 0.5, 1.0)
    ]
    return [np.log(p) for p in sorted(grid, key=lambda p: float(np.sum(np.abs(PowerLaw(*p)(u) - loss))))[:STARTS]]


def _solve(u: np.ndarray, loss: np.ndarray, start: np.ndarray, evaluations: int = 500) -> scipy.optimize.OptimizeResult:
    """Fit (log a, log b, log c) of a·u^-b + c with Huber's loss on the difference of logarithms."""
    log_u, target = np.log(u), np.log(loss)

    def residuals(p: np.ndarray) -> np.ndarray:
        return np.log(np.exp(p[0] - np.exp(p[1]) * log_u) + np.exp(p[2])) - target

    def jacobian(p: np.ndarray) -> np.ndarray:
        power, floor = np.exp(p[0] - np.exp(p[1]) * log_u), np.exp(p[2])
        return (
            np.stack([power, -power * log_u * np.exp(p[1]), np.full_like(power, floor)], 1) / (power + floor)[:, None]
        )

    low = np.array([-np.inf, np.log(EXPONENTS[0]), np.log(np.min(loss) * 1e-4)])
    high = np.array([np.inf, np.log(EXPONENTS[1]), np.log(np.min(loss) * 1.1)])
    start = np.clip(start, low + 1e-6, high - 1e-6)
    return scipy.optimize.least_squares(
        residuals, start, jacobian, bounds=(low, high), loss="huber", f_scale=HUBER_WIDTH, max_nfev=evaluations
    )


def _law(p: np.ndarray, centre: float) -> PowerLaw:
    """Return the laws in x whose parameters (log a, log b, log c), one law per row, were fitted in x / centre."""
    b = np.exp(p[:, 1])
    return PowerLaw(np.exp(p[:, 0] + b * np.log(centre)), b, np.exp(p[:, 2]))


def _resampled(x: np.ndarray, residuals: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Return resampled residuals, `[resamples, points]`.

    Each residual is the sum of a part that all seeds of a size share and a part of the seed's own.
    """
    _, size_of, seeds = np.unique(x, return_inverse=True, return_counts=True)
    points, sizes = len(x), len(seeds)
    means = np.bincount(size_of, residuals) / seeds
    own = residuals - means[size_of]
    shared_freedom, own_freedom = sizes - LAW_PARAMETERS, points - sizes
    own_variance = float(np.sum(own**2)) / own_freedom if own_freedom else 0.0
    # Seeds alone already make the mean of a size vary. Only the variance beyond that is the size's own.
    shared_variance = (float(np.sum(seeds * means**2)) / shared_freedom - own_variance) / (points / sizes)
    drawn = np.zeros((resamples, points))
    if shared_variance > 0:
        width = np.sqrt(shared_variance) * _student(shared_freedom)
        drawn += width * generator.choice(_of_unit_variance(means), (resamples, sizes))[:, size_of]
    if own_variance > 0:
        width = np.sqrt(own_variance) * _student(own_freedom)
        drawn += width * generator.choice(_of_unit_variance(own), (resamples, points))
    return drawn


def _of_unit_variance(values: np.ndarray) -> np.ndarray:
    return values / np.sqrt(np.mean(values**2))


def _student(freedom: int) -> float:
    """Return the width of Student's interval relative to the normal distribution's."""
    upper = 1 - (1 - CONFIDENCE) / 2
    return float(scipy.stats.t.ppf(upper, freedom) / scipy.stats.norm.ppf(upper))


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, _tails(), method="inverted_cdf")  # Does not interpolate infinite values.
    return float(low), float(high)


def _tails() -> tuple[float, float]:
    return (1 - CONFIDENCE) / 2, 1 - (1 - CONFIDENCE) / 2
