"""Confidence intervals of the difference between two models, over validation text or over seeds.

Positive differences mean that the second model's value is larger.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.stats

from difftx.analysis.scaling_law import CONFIDENCE, TAILS

MIN_BLOCKS = 8  # Means of fewer blocks are too few for an interval of Student's t.


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference and the ends of its confidence interval."""

    value: float
    low: float
    high: float


def over_blocks(sets: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Difference:
    """Return the difference of two losses on the same targets, in nats per token, as a mean over validation sets.

    Each set is given by three arrays with an element for each block of rows: the summed loss of the first model and of
    the second model in nats, and the number of tokens. A set's loss is the ratio of two sums, and the linearised
    variance of that ratio is estimated from the blocks. Welch and Satterthwaite's formula gives the degrees of freedom.
    """
    values, variances, freedoms = [], [], []
    for first, second, tokens in sets:
        difference = float(np.sum(second - first) / np.sum(tokens))
        residuals = second - first - difference * tokens
        blocks = len(tokens)
        values.append(difference)
        variances.append(blocks / (blocks - 1) * float(np.sum(residuals**2)) / float(np.sum(tokens)) ** 2)
        freedoms.append(blocks - 1)
    value, variance = float(np.mean(values)), np.array(variances) / len(sets) ** 2
    freedom = np.sum(variance) ** 2 / np.sum(variance**2 / freedoms) if np.any(variance) else min(freedoms)
    half = float(scipy.stats.t.ppf(TAILS[1], freedom) * np.sqrt(np.sum(variance)))
    return Difference(value, value - half, value + half)


def over_seeds(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the difference of two mean values over seeds, at least two of each, with Welch's interval."""
    found = scipy.stats.ttest_ind(second, first, equal_var=False).confidence_interval(CONFIDENCE)
    return Difference(float(np.mean(second) - np.mean(first)), float(found.low), float(found.high))


def over_pairs(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the mean difference of at least two pairs, such as the runs of equal seeds, with Student's interval."""
    differences = np.subtract(second, first)
    if np.ptp(differences) == 0:  # scipy divides by the standard deviation.
        return Difference(*3 * [float(differences[0])])
    found = scipy.stats.ttest_rel(second, first).confidence_interval(CONFIDENCE)
    return Difference(float(np.mean(second) - np.mean(first)), float(found.low), float(found.high))


def half_width(values: Sequence[float]) -> float:
    """Return half the width of Student's interval of the mean of at least two values."""
    return float(scipy.stats.t.ppf(TAILS[1], len(values) - 1) * scipy.stats.sem(values))
