"""Scaling laws L(x) = a·x^-b + c of the loss L, where x is a number of parameters or tokens.

The fit minimises the Huber loss of log L over log a, log b and log c, from several starting points (Hoffmann et al.,
arXiv 2203.15556, approach 3).

Confidence intervals come from a bootstrap of the residuals. Each x is called a size, and points of one size come from
runs with different seeds. A resample draws the mean residual of each size and the deviation of each seed from that mean
separately. Both are scaled to their unbiased variance and, as there are few of them, by the ratio of the widths of
Student's t and of a normal distribution.
"""

import dataclasses
from typing import Self

import numpy as np
import scipy.optimize
import scipy.stats

LAW_PARAMETERS = 3  # The law's parameters are a, b and c.
MIN_SIZES = LAW_PARAMETERS + 1  # A fit to fewer sizes would leave no residuals, which the bootstrap needs.
HUBER_WIDTH = 1e-3  # Residuals of log L up to this width count squared and larger ones linearly (Hoffmann et al.).
MAX_EXTRAPOLATION = 2.0  # An x counts as extrapolated if it is outside the data by more than this factor.
CONFIDENCE = 0.95
TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)  # Quantiles that bound a confidence interval.
EXPONENTS = (0.01, 5.0)  # Lower and upper bound of a fitted b.


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """The law L(x) = a·x^-b + c. Arrays in the fields describe several laws."""

    a: np.ndarray | float
    b: np.ndarray | float
    c: np.ndarray | float

    def __call__(self, x: np.ndarray | float) -> np.ndarray:
        return np.asarray(self.a * np.asarray(x, float) ** -np.asarray(self.b) + self.c)

    def inverse(self, loss: np.ndarray | float) -> np.ndarray:
        """Return the x at which the law reaches a loss, or infinity if it never does."""
        above = np.asarray(loss, float) - self.c
        with np.errstate(divide="ignore", over="ignore"):
            return (np.maximum(above, 0) / self.a) ** (-1 / np.asarray(self.b))  # 0 to a negative power is infinite.


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law, the points to which it was fitted, and the laws fitted to bootstrap resamples of these points."""

    x: np.ndarray  # [points], ascending.
    loss: np.ndarray  # [points], in nats per token or bits per byte.
    law: PowerLaw
    samples: PowerLaw  # Each field is an array [resamples].

    @classmethod
    def of(cls, x: np.ndarray, loss: np.ndarray, *, resamples: int, seed: int) -> Self:
        """Fit a law to points, which must have at least `MIN_SIZES` different x."""
        order = np.argsort(x, kind="stable")
        x, loss = np.asarray(x, float)[order], np.asarray(loss, float)[order]
        centre = float(np.exp(np.mean(np.log(x))))  # Dividing x by `centre` makes a and b nearly independent.
        u = x / centre
        best = min((_minimise(u, loss, start) for start in _starting_points(u, loss)), key=lambda result: result.cost)
        law = PowerLaw(*(float(parameter) for parameter in _parameters(best.x, centre)))
        curve = law(x)
        noise = _resampled(x, np.log(loss) - np.log(curve), resamples, np.random.default_rng(seed))
        found = [_minimise(u, curve * np.exp(sample), best.x, evaluations=50).x for sample in noise]
        return cls(x, loss, law, PowerLaw(*_parameters(np.array(found).T, centre)))

    def interval(self, name: str) -> tuple[float, float]:
        """Return the confidence interval of the parameter `name`: "a", "b" or "c"."""
        return _interval(np.asarray(getattr(self.samples, name)))

    def band(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper end of the confidence band at each x."""
        samples = PowerLaw(*(np.asarray(v)[:, None] for v in (self.samples.a, self.samples.b, self.samples.c)))
        low, high = np.quantile(samples(x[None, :]), TAILS, axis=0)
        return low, high

    def extrapolates(self, x: float) -> bool:
        """Return whether x is outside the range of the data by more than a factor of `MAX_EXTRAPOLATION`."""
        return not self.x.min() / MAX_EXTRAPOLATION <= x <= self.x.max() * MAX_EXTRAPOLATION


@dataclasses.dataclass(frozen=True)
class Match:
    """The sizes (numbers of parameters or tokens) at which a model and a reference have equal loss."""

    x: float  # Size of the model that is compared.
    reference_x: float  # Size of the reference.
    loss: float
    ratio: float  # x / reference_x.
    interval: tuple[float, float]  # Confidence interval of `ratio`.
    extrapolated: bool  # Whether one of the sizes is far outside the data of its fit (`Fit.extrapolates`).


def match_at(fit: Fit, reference: Fit, x: float) -> Match | None:
    """Find the size at which the reference has the loss of the model at size `x`. Return None if there is none."""
    loss = float(fit.law(x))
    reference_x = float(reference.law.inverse(loss))
    if not np.isfinite(reference_x):
        return None
    with np.errstate(divide="ignore"):
        ratios = x / reference.samples.inverse(fit.samples(x))  # 0 if the reference never reaches a sample's loss.
    extrapolated = fit.extrapolates(x) or reference.extrapolates(reference_x)
    return Match(x, reference_x, loss, x / reference_x, _interval(ratios), extrapolated)


def match_reference_at(fit: Fit, reference: Fit, reference_x: float) -> Match | None:
    """Find the size at which the model has the loss of the reference at `reference_x`. Return None if there is none."""
    swapped = match_at(reference, fit, reference_x)
    if swapped is None:
        return None
    x = swapped.reference_x
    with np.errstate(divide="ignore"):
        ratios = fit.samples.inverse(reference.samples(reference_x)) / reference_x
    return Match(x, reference_x, swapped.loss, x / reference_x, _interval(ratios), swapped.extrapolated)


def _starting_points(u: np.ndarray, loss: np.ndarray) -> list[np.ndarray]:
    """Return starting points (log a, log b, log c): the three points of a grid with the smallest mean error."""
    grid = [
        np.array([np.mean(loss) - share * np.min(loss), b, share * np.min(loss)])
        for share in (0.1, 0.4, 0.7, 0.85, 0.95, 0.99)
        for b in (0.05, 0.15, 0.3, 0.5, 1.0)
    ]
    grid.sort(key=lambda point: float(np.sum(np.abs(PowerLaw(*point)(u) - loss))))
    return [np.log(point) for point in grid[:3]]


def _minimise(
    u: np.ndarray, loss: np.ndarray, start: np.ndarray, evaluations: int = 500
) -> scipy.optimize.OptimizeResult:
    """Fit (log a, log b, log c) of the law a·u^-b + c by the Huber loss of log L, starting at `start`."""
    log_u, target = np.log(u), np.log(loss)

    def residuals(p: np.ndarray) -> np.ndarray:
        return np.log(np.exp(p[0] - np.exp(p[1]) * log_u) + np.exp(p[2])) - target

    def jacobian(p: np.ndarray) -> np.ndarray:
        power, floor = np.exp(p[0] - np.exp(p[1]) * log_u), np.exp(p[2])
        columns = [power, -power * log_u * np.exp(p[1]), np.full_like(power, floor)]
        return np.stack(columns, axis=1) / (power + floor)[:, None]

    low = np.array([-np.inf, np.log(EXPONENTS[0]), np.log(np.min(loss) * 1e-4)])
    high = np.array([np.inf, np.log(EXPONENTS[1]), np.log(np.min(loss) * 1.1)])
    start = np.clip(start, low + 1e-6, high - 1e-6)
    return scipy.optimize.least_squares(
        residuals, start, jacobian, bounds=(low, high), loss="huber", f_scale=HUBER_WIDTH, max_nfev=evaluations
    )


def _parameters(p: np.ndarray, centre: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a, b and c of the law in x, given (log a, log b, log c) of the law in x / centre."""
    b = np.exp(p[1])
    return np.exp(p[0] + b * np.log(centre)), b, np.exp(p[2])


def _resampled(x: np.ndarray, residuals: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Return residuals `[resamples, points]`. Each is the sum of one drawn for the size and one drawn for the seed."""
    _, size_of, seeds = np.unique(x, return_inverse=True, return_counts=True)
    points, sizes = len(x), len(seeds)
    means = np.bincount(size_of, residuals) / seeds
    deviations = residuals - means[size_of]
    size_freedom, seed_freedom = sizes - LAW_PARAMETERS, points - sizes  # Degrees of freedom.
    seed_variance = float(np.sum(deviations**2)) / seed_freedom if seed_freedom else 0.0
    # Variance between groups in a one-way random-effects model, whose groups are the sizes. The group size is the mean
    # number of seeds per size. `seed_variance` is subtracted, because the means of sizes also vary with their seeds.
    size_variance = (float(np.sum(seeds * means**2)) / size_freedom - seed_variance) / (points / sizes)
    drawn = np.zeros((resamples, points))
    if size_variance > 0:
        scaled = np.sqrt(size_variance) * _student_factor(size_freedom) * (means / np.sqrt(np.mean(means**2)))
        drawn += generator.choice(scaled, (resamples, sizes))[:, size_of]
    if seed_variance > 0:
        unit = deviations / np.sqrt(np.mean(deviations**2))
        scaled = np.sqrt(seed_variance) * _student_factor(seed_freedom) * unit
        drawn += generator.choice(scaled, (resamples, points))
    return drawn


def _student_factor(freedom: int) -> float:
    """Return the ratio of the widths of a confidence interval under Student's t and a normal distribution."""
    return float(scipy.stats.t.ppf(TAILS[1], freedom) / scipy.stats.norm.ppf(TAILS[1]))


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, TAILS, method="inverted_cdf")  # This method does not interpolate infinite values.
    return float(low), float(high)
