"""The contrasts that a review asked for: explicit sparsity and a signed mask."""

from results_page.runs import AGAIN, losses

REVIEW_FAMILY = [(arm, other) for other in ("transformer", "diff") for arm in ("top_k", "signed_mask")]


def from_review(one, other):
    own, reference = losses("review-novels", one), losses(AGAIN, other)
    assert own.keys() == reference.keys()
    return [own[seed] - reference[seed] for seed in sorted(own)]
