"""The result of a suite: numbers, details and charts."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from difftx.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart, with a band if `low` and `high` are given. All lists have the same length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceLine(Series):
    """A line that is not a measurement of the model, such as the accuracy of guessing. It is drawn dashed and grey."""

    is_reference: Literal[True] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines over a common x-axis."""

    name: str  # Name of the chart's file, and of its section in the report.
    title: str
    x_label: str  # Labels include the unit.
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    over_steps: bool = False  # Whether the report also draws y over training steps, with one line per x.
    kind: Literal["line"] = "line"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScatterChart(LineChart):
    """Points over a common x-axis, without lines between them because the order of x has no meaning."""

    is_scatter: Literal[True] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heatmap:
    """A table of values, drawn as colours. Its first row is at the top."""

    name: str
    title: str
    x_label: str
    y_label: str
    x: Sequence[float | str]
    y: Sequence[float | str]
    values: Sequence[Sequence[float | None]]  # One list per row; None: no value.
    value_label: str
    low: float | None = None  # Lower end of the colour scale; None: the smallest value.
    high: float | None = None  # Upper end of the colour scale; None: the largest value.
    kind: Literal["heatmap"] = "heatmap"


@dataclasses.dataclass(frozen=True)
class Measure:
    """Unit of a number, "" if it has none, which direction is better, None if neither is, and a label for readers."""

    unit: str
    better: Literal["lower", "higher"] | None = None
    label: str = ""  # "": the number's name, with spaces in place of underscores.

    def __post_init__(self):
        if self.better not in ("lower", "higher", None):
            raise UserError(f"Measure.better={self.better!r}: use 'lower', 'higher' or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a suite, which can be written as JSON."""

    numbers: dict[str, float]  # Numbers that are compared between runs and plotted over steps.
    chance: dict[str, float] = dataclasses.field(default_factory=dict)  # Number → its value for a model that guesses.
    details: dict[str, Any] = dataclasses.field(default_factory=dict)  # Further results, as JSON.
    charts: Sequence[LineChart | Heatmap] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        for field in ("numbers", "chance"):
            values = getattr(self, field).items()
            numbers = {name: _as_number(value, f"Result.{field}[{name!r}]") for name, value in values}
            object.__setattr__(self, field, numbers)


def _as_number(value: Any, name: str) -> float:
    """Return a number of Python, NumPy or JAX as one of Python. Raise `UserError` for other values."""
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if not isinstance(number, int | float):
        raise UserError(f"{name}={value!r} is not a number; convert it, as in float(…)")
    return number
