"""Warn when λ of a layer leaves the range in which differential attention cancels noise."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOWEST_LAMBDA, HIGHEST_LAMBDA = -0.5, 2.0
BELOW = "the second attention weights are added to the first"  # For the warning: the effect of a λ below the range.
ABOVE = "the second attention weights dominate the first"  # For the warning: the effect of a λ above the range.
LAMBDA_SPLIT = "lambda_crossing"  # Split of a row in metrics.jsonl: λ of a layer (numbered from 1) left the range.


class LambdaRange:
    """Track the layers with λ outside the range from `LOWEST_LAMBDA` to `HIGHEST_LAMBDA`."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        """Find the layers that were outside at the end of earlier attempts. `rows` are the metrics of these."""
        self._outside: set[int] = set()
        for row in rows:
            if row["split"] == "train":
                self._outside = _layers_outside(row.get("lambda") or ())
            elif row["split"] == LAMBDA_SPLIT:  # This step may have no train row.
                self._outside.add(row["layer"])

    def observe(self, lambda_L: Sequence[float]) -> list[int]:
        """Return the layers (from 1) that left the range since the last call. `lambda_L` has λ of all layers."""
        before, self._outside = self._outside, _layers_outside(lambda_L)
        return sorted(self._outside - before)


def lambda_warning(step: int, layer: int, value: float) -> str:
    """Return the warning that λ of a layer has left the range."""
    what = BELOW if value < LOWEST_LAMBDA else ABOVE
    if math.isnan(value):
        what = "is not a number"
    return (
        f"step {step}: λ of layer {layer} is {value:.4g}, outside of [{LOWEST_LAMBDA:g}, {HIGHEST_LAMBDA:g}]: {what}, "
        'so that the layer no longer cancels noise; see "When λ leaves its range" in docs/operations.md'
    )


def _layers_outside(lambda_L: Sequence[float | None]) -> set[int]:
    """Return the layers (from 1) with λ outside the range. None stands for a non-finite λ."""
    return {i for i, value in enumerate(lambda_L, 1) if value is None or not LOWEST_LAMBDA <= value <= HIGHEST_LAMBDA}
