"""What a suite returns."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Numbers to compare and to plot, and whatever else is worth keeping, as JSON."""

    numbers: dict[str, float]
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
