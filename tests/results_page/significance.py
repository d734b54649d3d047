"""Intervals, tests of significance and Holm's correction, independent of difftx and SciPy."""

import math
import statistics

# Quantiles of Student's t, by the number of seeds.
T_975 = {4: 3.182446, 5: 2.776445, 6: 2.570582, 7: 2.446912, 8: 2.364624, 10: 2.262157}


def interval(values):
    """Return mean and half-width of the 95 % interval."""
    half = T_975[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def two_sided(values):
    """Return the p-value of Student's t test, by integration of the density."""
    df = len(values) - 1
    t = abs(statistics.fmean(values)) / (statistics.stdev(values) / math.sqrt(len(values)))
    scale = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
    x, step, area = 0.0, t / 20_000, 0.0
    while x < t - step / 2:
        area += step * scale * (1 + (x + step / 2) ** 2 / df) ** (-(df + 1) / 2)
        x += step
    return 1 - 2 * area


def fisher(one, other):
    """Return the p-value of Fisher's exact test, by enumeration."""
    (a, n), (b, m) = one, other
    chances = {k: math.comb(n, k) * math.comb(m, a + b - k) for k in range(max(0, a + b - m), min(n, a + b) + 1)}
    return sum(chance for chance in chances.values() if chance <= chances[a]) / sum(chances.values())


def corrected(p_values):
    """Return p-values after Holm's correction: by decreasing size, each times the number of those at least as large."""
    found, largest = {}, 0.0
    for rank, (p, name) in enumerate(sorted((p, name) for name, p in p_values.items())):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        found[name] = largest
    return found
