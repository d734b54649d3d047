"""The contrasts of question 1: norm, gain or subtraction?"""

from results_page.runs import AGAIN, contrast
from results_page.significance import corrected, interval, two_sided

NORM_OR_GAIN = [
    ("diff", "zero-norm"),
    ("diff-gain", "zero-gain"),
    ("diff", "diff-gain"),
    ("zero-norm", "zero-gain"),
    ("diff-gain", "diff-plain"),
    ("diff", "transformer"),
    ("diff", "transformer-gain"),
]
NOVELS_FAMILY = [pair for pair in NORM_OR_GAIN if "diff-plain" not in pair]


def is_better(study, one, other, family):
    """Return whether Holm's correction in the family leaves the contrast significant, with `one` lower."""
    ranked = corrected({tuple(sorted(pair)): two_sided(contrast(study, *pair)) for pair in family})
    return ranked[tuple(sorted((one, other)))] < 0.05 and interval(contrast(study, one, other))[0] < 0


def better(one, other):
    return is_better(AGAIN, one, other, NOVELS_FAMILY)


def verdict_again(one, other):
    """Return the sign of a contrast of the second set of question 1, or 0 if it is open."""
    return better(other, one) - better(one, other)
