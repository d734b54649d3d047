"""What a suite returns."""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart, with a band around it if `low` and `high` are given: as many numbers each as `x` has."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines over a common axis; labels say the unit."""

    name: str  # Of its file and of its place in the report.
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    log_x: bool = False
    log_y: bool = False
    over_steps: bool = False  # Where several steps were evaluated, the report also draws a line for each x over these.
    kind: Literal["line"] = "line"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heatmap:
    """A value for each pair of `y` (rows, from the top) and `x` (columns); None where there is none."""

    name: str
    title: str
    x_label: str
    y_label: str
    x: list[float | str]
    y: list[float | str]
    values: list[list[float | None]]
    value_label: str
    low: float | None = None  # Ends of the colour scale; None: of the values.
    high: float | None = None
    kind: Literal["heatmap"] = "heatmap"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Numbers to compare and to plot, charts, and whatever else is worth keeping, as JSON."""

    numbers: dict[str, float]
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    charts: list[LineChart | Heatmap] = dataclasses.field(default_factory=list)
