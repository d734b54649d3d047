"""The range of λ in which a layer cancels noise, and a tracker of the layers outside this range."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOWEST, HIGHEST = -0.5, 2.0
SPLIT = "lambda_crossing"  # Split of the rows of metrics.jsonl with "layer", from 1, and its "value".


class LambdaRange:
    """A tracker of the layers whose λ is outside [LOWEST, HIGHEST]."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        """Read `rows`, the metrics of earlier attempts, so that no crossing is reported twice."""
        self._outside: set[int] = set()
        for row in rows:
            if row["split"] == "train":
                self._outside = _layers_outside(row.get("lambda") or ())
            elif row["split"] == SPLIT:  # A crossing after a step without a train row.
                self._outside.add(row["layer"])

    def observe(self, lambda_L: Sequence[float]) -> list[int]:
        """Take each layer's λ after a step; return the layers, numbered from 1, that left the range in this step."""
        before, self._outside = self._outside, _layers_outside(lambda_L)
        return sorted(self._outside - before)


def warning(step: int, layer: int, value: float) -> str:
    """Return the message about a layer whose λ left the range."""
    if math.isnan(value):
        what = "is not a number"
    elif value < LOWEST:
        what = "the second attention weights are added to the first"
    else:
        what = "the second attention weights dominate the first"
    return (
        f"step {step}: λ of layer {layer} is {value:.4g}, outside of [{LOWEST:g}, {HIGHEST:g}]: {what}, so that the "
        'layer no longer cancels noise; see "When λ leaves its range" in docs/operations.md'
    )


def _layers_outside(lambda_L: Sequence[float | None]) -> set[int]:
    """Return the layers, numbered from 1, whose λ is outside the range. None stands for a λ that is not finite."""
    return {i for i, value in enumerate(lambda_L, 1) if value is None or not LOWEST <= value <= HIGHEST}
