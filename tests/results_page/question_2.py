"""The contrasts of question 2: warm-up and optimizer."""

import math

from results_page.runs import FIRST, losses
from results_page.significance import corrected, interval, two_sided

SHORT = {"optimizer__warmup_steps": "0.01"}
MUON = {"optimizer__name": "muon"}
OPTIMIZERS = {"AdamW": {}, "Muon": MUON}
DIFFERENCES = {  # Name → (sign, model, has the short warm-up) of its terms.
    "transformer's need for a long warm-up": [(1, "transformer", True), (-1, "transformer", False)],
    "diff's need for a long warm-up": [(1, "diff", True), (-1, "diff", False)],
    "diff's need minus transformer's": [
        (1, "diff", True),
        (1, "transformer", False),
        (-1, "diff", False),
        (-1, "transformer", True),
    ],
    "the whole architecture": [(1, "diff", False), (-1, "transformer", False)],
}


def by_optimizer(optimizer, *terms):
    """Return a sum of losses with signs by seed."""
    found = []
    for sign, arm, is_short in terms:
        changes = OPTIMIZERS[optimizer] | (SHORT if is_short else {})
        study = FIRST if not changes else "question-2-zero" if arm == "zero-norm" else "question-2"
        found.append((sign, losses(study, arm, **changes)))
    return [sum(sign * of[seed] for sign, of in found) for seed in range(10, 15)]


WARMUP_FAMILY = {
    f"{name}, {optimizer}": by_optimizer(optimizer, *terms)
    for optimizer in OPTIMIZERS
    for name, terms in DIFFERENCES.items()
}
SECOND_MAP_WITH_MUON = {
    f"{share} %": by_optimizer("Muon", (1, "diff", share == 1), (-1, "zero-norm", share == 1)) for share in (50, 1)
}


def is_decided(name):
    """Return the sign of a contrast of question 2, or zero if it is open."""
    p = corrected({(other,): two_sided(of) for other, of in WARMUP_FAMILY.items()})[name,]
    return 0 if p >= 0.05 else math.copysign(1, interval(WARMUP_FAMILY[name])[0])


def p_value_in_one_family_of_ten(name):
    """Return a contrast's p-value after correction over the eight contrasts and the two of the second map."""
    family = WARMUP_FAMILY | SECOND_MAP_WITH_MUON
    assert len(family) == 10
    return corrected({(other,): two_sided(of) for other, of in family.items()})[name,]
