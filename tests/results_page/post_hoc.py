"""Worth in tokens and differences over many settings, without benchmarks/post_hoc_tables.py."""

import functools
import math
import statistics

import numpy as np
import scipy.optimize

from results_page.question_4 import LARGE, OWN, PARAMETERS_OF, STEPS_OF, size_losses
from results_page.runs import AGAIN, COLLECTED, FIRST, LOSS
from results_page.significance import T_975

SEEDS = range(30, 38)
LENGTHS = (5, 20, 80)
VALIDATION = "loss/bits_per_byte"


def mean_loss(arm, tokens, part, seeds):
    of = size_losses(arm, tokens, part)
    return np.mean([of[seed] for seed in seeds])


def power_law(tokens, floor, scale, exponent):
    return floor + scale * tokens**-exponent


def million_tokens(part):
    return np.array([1024 * steps / 1e6 for steps in STEPS_OF[part].values()])


@functools.cache
def fitted(part, seeds):
    """Return the parameters of the Transformer's curve, by least squares."""
    losses = [mean_loss("transformer", tokens, part, seeds) for tokens in STEPS_OF[part]]
    known = [fitted(OWN, seeds)[2]] if part == LARGE else []  # The exponent, if two lengths cannot determine it.
    start = [1.9, 0.5, 0.5][: len(losses)]
    fit = scipy.optimize.least_squares(
        lambda free: power_law(million_tokens(part), *free, *known) - losses, start, xtol=1e-15, ftol=1e-15, gtol=1e-15
    )
    assert np.allclose(fit.fun, 0, atol=1e-7)
    return (*fit.x, *known)


def read_from_curve(loss, part, seeds):
    """Return log2 of the tokens at which the fitted curve has a loss, by bisection."""
    return scipy.optimize.bisect(lambda x: power_law(2.0**x, *fitted(part, seeds)) - loss, -5, 10, xtol=1e-10)


def read_from_chords(loss, part, seeds):
    """Return log2 of the tokens at which lines through the Transformer's losses over log2 of the tokens have a loss."""
    x = np.log2(million_tokens(part))
    y = [mean_loss("transformer", tokens, part, seeds) for tokens in LENGTHS]
    first = 0 if loss > y[1] else 1
    slope, intercept = np.polyfit(x[first : first + 2], y[first : first + 2], 1)
    return (loss - intercept) / slope


@functools.cache
def log_worth(arm, tokens, part=OWN, seeds=tuple(SEEDS), read=read_from_curve):
    own = 1024 * STEPS_OF[part][tokens] / 1e6
    return read(mean_loss(arm, tokens, part, seeds), part, seeds) - math.log2(own)


def with_jackknife(statistic):
    """Return a statistic of the seeds, and the half-width of its jackknife interval."""
    whole = statistic(tuple(SEEDS))
    without = [statistic(tuple(s for s in SEEDS if s != seed)) for seed in SEEDS]
    # The variance of a jackknife is (n - 1) / n times the sum of squares of the values without one seed.
    n = len(without)
    deviation = math.sqrt((n - 1) / n * sum((value - statistics.fmean(without)) ** 2 for value in without))
    return whole, T_975[n] * deviation


def as_worth(log, half):
    """Return a worth with its interval as text, with a decimal more if two would show an end as 1.00."""
    low, high = 2 ** (log - half), 2 ** (log + half)
    decimals = 3 if "1.00" in (f"{low:.2f}", f"{high:.2f}") else 2
    return f"{2**log:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f})"


def more_tokens(arm, tokens):
    """Return how many more tokens than the Transformer an arm needs, in per cent, as text."""
    return f"{100 * (2 ** -log_worth(arm, tokens) - 1):.0f}"


def bought_by(factor):
    """Return what `factor` times the parameters buy at the tokens of both lengths of the larger models."""
    every = tuple(SEEDS)
    doublings = math.log2(PARAMETERS_OF[LARGE] / PARAMETERS_OF[OWN])
    return [
        (power_law(at, *fitted(OWN, every)) - mean_loss("transformer", tokens, LARGE, every))
        / doublings
        * math.log2(factor)
        for at, tokens in zip(million_tokens(LARGE), STEPS_OF[LARGE], strict=True)
    ]


MUON, SHORT = {"optimizer.name": "muon"}, {"optimizer.warmup_steps": "0.01"}
# Name → studies, task, and changes of a setting that the page names.
SETTINGS = {
    "first set": ([FIRST], "novels", {}),
    "second set": ([AGAIN], "novels", {}),
    "wide": (["question-1-wide"], "novels-wide", {}),
    "stdlib": (["question-1-stdlib"], "novels", {}),
    "AdamW, 1 %": (["question-2"], "novels", SHORT),
    "Muon, 50 %": (["question-2", "question-2-zero"], "novels", MUON),
    "Muon, 1 %": (["question-2", "question-2-zero"], "novels", MUON | SHORT),
    **{f"0.15M, {steps}": (["question-4"], "novels", {"train.steps": str(steps)}) for steps in STEPS_OF[OWN].values()},
    **{
        f"0.43M, {steps}": (["question-4"], "novels-0.4m", {"train.steps": str(steps)})
        for steps in STEPS_OF[LARGE].values()
    },
}


def difference_in(name, one, other, number=LOSS):
    """Return the mean difference of two arms in a setting, or None if one of them has no runs there."""
    studies, task, changes = SETTINGS[name]
    number = VALIDATION if name == "stdlib" else number
    means = []
    for arm in (one, other):
        tuned = ("optimizer.learning_rate", *(["model.post_scale"] if arm.endswith("-gain") else []))
        of = [
            r["numbers"][number]
            for study in studies
            for r in COLLECTED[study]
            if (r["arm"], r["task"]) == (arm, task)
            and {n: v for n, v in r["changes"].items() if n not in tuned} == changes
        ]
        if not of:
            return None
        means.append(statistics.fmean(of))
    return means[0] - means[1]


def over_settings(one, other, names=SETTINGS):
    return [of for name in names if (of := difference_in(name, one, other)) is not None]
