"""The parts, lengths and contrasts of question 4: size and tokens."""

import math
import re
import statistics

from benchmarks import controls_study
from results_page.page import section
from results_page.runs import COLLECTED, LOSS
from results_page.significance import corrected, interval, two_sided

SIZE_PAIRS = [
    *((arm, "transformer") for arm in ("zero-norm", "diff", "diff_v2", "gdla", "gated")),
    ("diff", "zero-norm"),
]
# The parts of question 4: a rate for each length, and one rate for all lengths, for both sizes.
OWN, SHARED, LARGE, LARGE_SHARED = "own rates", "shared rate", "larger models", "larger models, shared rate"
LARGER = (LARGE, LARGE_SHARED)
RUNS = {
    part: [r for r in COLLECTED[study] if r["task"] == task]
    for part, study, task in (
        (OWN, "question-4", "novels"),
        (SHARED, "question-4-shared", "novels"),
        (LARGE, "question-4", "novels-0.4m"),
        (LARGE_SHARED, "question-4-shared", "novels-0.4m"),
    )
}
# Part → tokens per parameter → updates of 1,024 tokens.
STEPS_OF = {part: {5: 2083, 20: 8333} if part in LARGER else {5: 723, 20: 2891, 80: 11565} for part in RUNS}
PARAMETERS_OF = {part: 426_624 if part in LARGER else 148_032 for part in RUNS}
SIZES_SECTION = section("## Question 4: size and tokens", "## Question 5: from a pretrained Transformer")
HEADINGS = r"### (?:One rate for all lengths|Models of 430,000 parameters(?:, one rate)?)\n"
SECTIONS = dict(zip(RUNS, re.split(HEADINGS, SIZES_SECTION), strict=True))


def size_losses(arm, tokens, part):
    """Return seed → loss."""
    steps = str(STEPS_OF[part][tokens])
    return {
        r["seed"]: r["numbers"][LOSS] for r in RUNS[part] if (r["arm"], r["changes"]["train.steps"]) == (arm, steps)
    }


def by_seed_at(one, other, tokens, part=OWN):
    """Return seed → difference of two arms, for the seeds of the first."""
    own, reference = (size_losses(arm, tokens, part) for arm in (one, other))
    return {seed: own[seed] - reference[seed] for seed in sorted(own)}


def at_length(*of):
    return [*by_seed_at(*of).values()]


def slope(one, other, part, longest=80):
    """Return for each seed the covariance of difference and log2 of the tokens, over the variance of the latter."""
    lengths = [tokens for tokens in STEPS_OF[part] if tokens <= longest]
    of = {math.log2(tokens): found for tokens in lengths if (found := by_seed_at(one, other, tokens, part))}
    mean = statistics.fmean(of)
    scale = sum((x - mean) ** 2 for x in of)
    seeds = [seed for seed in min(of.values(), key=len) if all(seed in found for found in of.values())]
    return [sum((x - mean) * found[seed] for x, found in of.items()) / scale for seed in seeds]


def change_with_size(one, other, part):
    small = by_seed_at(one, other, 20, OWN if part == LARGE else SHARED)
    return [difference - small[seed] for seed, difference in by_seed_at(one, other, 20, part).items()]


# Second families of OWN and LARGE, of arms whose runs with 80 tokens per parameter, or of larger models, were planned
# later.
LATER, LARGE_LATER = "later arms", "larger models, later arms"
LATER_ARMS = ("diff_v2", "gdla", "gated")


def longest_of(family, one):
    """Return the most tokens per parameter of an arm's slope in a family."""
    is_short = family in (*LARGER, LARGE_LATER) or (family != LATER and one in LATER_ARMS)
    return 20 if is_short else 80


def contrasts_of(family, part, pairs, tokens):
    """Return the differences of pairs at a number of tokens per parameter, and their slopes."""
    return {
        **{(*pair, f"at {tokens}"): at_length(*pair, tokens, part) for pair in pairs},
        **{(*pair, "slope"): slope(*pair, part, longest_of(family, pair[0])) for pair in pairs},
    }


EARLY_PAIRS = [pair for pair in SIZE_PAIRS if pair[0] not in LATER_ARMS]
LATER_PAIRS = [(arm, "transformer") for arm in LATER_ARMS]
SIZE_FAMILIES = {
    **{part: contrasts_of(part, part, EARLY_PAIRS if part in LARGER else SIZE_PAIRS, 20) for part in RUNS},
    LATER: contrasts_of(LATER, OWN, LATER_PAIRS, 80),
    LARGE_LATER: contrasts_of(LARGE_LATER, LARGE, LATER_PAIRS, 20),
}
for part in LARGER:
    for pair in (("diff", "transformer"), ("diff", "zero-norm")):
        SIZE_FAMILIES[part][*pair, "size"] = change_with_size(*pair, part)
SIZE_P_VALUES = {
    name: corrected({contrast: two_sided(of) for contrast, of in family.items()})
    for name, family in SIZE_FAMILIES.items()
}


def size_verdict(one, other, at, family=OWN):
    """Return the sign of a contrast of question 4, or 0 if it is open."""
    mean, _ = interval(SIZE_FAMILIES[family][one, other, at])
    return 0 if SIZE_P_VALUES[family][one, other, at] >= 0.05 else math.copysign(1, mean)


def sign_of_interval(one, other, tokens, part=OWN):
    """Return the sign of the mean if the uncorrected interval of a length excludes zero, or else 0."""
    mean, half = interval(at_length(one, other, tokens, part))
    return 0 if abs(mean) < half else math.copysign(1, mean)


def cost_of_own_rate(arm, tokens, own=OWN, shared=SHARED):
    """Return for each seed the loss with the rate of this length, minus that with the shared rate."""
    losses = size_losses(arm, tokens, own)
    return [losses[seed] - loss for seed, loss in size_losses(arm, tokens, shared).items()]


def p_values_in_one_family(*families):
    """Return the p-values after correction over all contrasts of families, by contrast and family."""
    return corrected(
        {(*name, family): two_sided(of) for family in families for name, of in SIZE_FAMILIES[family].items()}
    )


def changed_in_one_family(*families):
    """Return the contrasts, with their families, whose verdicts such a correction changes."""
    joint = p_values_in_one_family(*families)
    return {name for name, p in joint.items() if (p < 0.05) != (SIZE_P_VALUES[name[-1]][name[:-1]] < 0.05)}


def tuned_rate(arm, steps):
    """Return the rate of the smallest validation loss on the seed of the tuning, which has to be between two others."""
    tries = [
        r
        for r in COLLECTED["question-4-tuning"]
        if (r["arm"], r["changes"]["train.steps"]) == (arm, str(steps)) and r["seed"] == controls_study.TUNED_SEED
    ]
    rate = min(tries, key=lambda r: r["numbers"]["loss/loss"])["learning_rate"]
    assert {rate / 2, rate * 2} <= {round(r["learning_rate"], 8) for r in tries}
    return rate
