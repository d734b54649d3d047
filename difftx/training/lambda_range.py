"""The range of λ in which a layer cancels noise, and which layers have left it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOWEST, HIGHEST = -0.5, 2.0
SPLIT = "lambda_crossing"  # Of rows of metrics.jsonl, with "layer", from 1, and "value".


class LambdaRange:
    """The layers whose λ is outside of LOWEST … HIGHEST."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        """Continue after the rows of metrics.jsonl that earlier attempts wrote, so that no crossing is told twice."""
        self._outside: set[int] = set()
        for row in rows:
            if row["split"] == "train":
                self._outside = _layers_outside(row.get("lambda") or ())
            elif row["split"] == SPLIT:  # After a step without a row of its own.
                self._outside.add(row["layer"])

    def observe(self, lambda_L: Sequence[float]) -> list[int]:
        """Take the λ of each layer after a step; return the layers, from 1, that were inside the range before it."""
        before, self._outside = self._outside, _layers_outside(lambda_L)
        return sorted(self._outside - before)


def warning(step: int, layer: int, value: float) -> str:
    """Return the line that tells of a crossing."""
    if math.isnan(value):
        what = "is not a number"
    elif value < LOWEST:
        what = "the second map is added to the first"
    else:
        what = "the second map dominates the first"
    return (
        f"step {step}: λ of layer {layer} is {value:.4g}, outside of [{LOWEST:g}, {HIGHEST:g}]: {what}, so that the "
        'layer no longer cancels noise; see "When λ leaves its range" in docs/operations.md'
    )


def _layers_outside(lambda_L: Sequence[float | None]) -> set[int]:
    """Return the layers, from 1, whose λ is outside of the range; metrics.jsonl has None where it is not finite."""
    return {i for i, value in enumerate(lambda_L, 1) if value is None or not LOWEST <= value <= HIGHEST}
