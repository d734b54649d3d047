"""The result of a suite: numbers, details and charts."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from difftx.errors import UserError

MAX_DECIMALS = 6  # Numbers that need more decimals side by side are formatted one by one.


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


type Better = Literal["lower", "higher"] | None


class Number(float):
    """A number of a result, which says what it is. Arithmetic returns plain numbers."""

    unit: str  # "": none.
    better: Better  # None: neither direction.
    label: str  # Name for readers. By default, it is the number's name in the result, with spaces for underscores.
    chance: float | None  # The number of a model that guesses.

    def __new__(
        cls,
        value: Any,
        unit: str = "",
        better: Better = None,
        label: str = "",
        chance: float | None = None,
    ):
        if better not in ("lower", "higher", None):
            raise UserError(f"Number: better={better!r}; use 'lower', 'higher' or None")
        number = super().__new__(cls, _plain(value, "Number: value"))
        number.unit, number.better, number.label = unit, better, label
        number.chance = None if chance is None else _plain(chance, "Number: chance")
        return number

    def but(self, **changes: Any) -> "Number":
        """Return the number with other attributes."""
        return Number(self, **vars(self) | changes)

    @property
    def axis(self) -> str:
        """The label of an axis of such numbers."""
        return self.label if self.unit in ("", self.label) else f"{self.label} ({self.unit})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a suite, which can be written as JSON."""

    numbers: Mapping[str, Number]  # Numbers that are compared between runs and plotted over steps.
    details: dict[str, Any] = dataclasses.field(default_factory=dict)  # Further results, as JSON.
    charts: Sequence[LineChart | Heatmap] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        """Make numbers of plain values, and give labels to those that have none."""
        numbers = {}
        for name, value in self.numbers.items():
            number = value if isinstance(value, Number) else Number(_plain(value, f"Result.numbers[{name!r}]"))
            numbers[name] = number.but(label=number.label or name.replace("_", " "))
        object.__setattr__(self, "numbers", numbers)


def read_numbers(result: Mapping[str, Any]) -> dict[str, Number]:
    """Return the numbers in a result as JSON."""
    return {name: Number(value, **result["measures"][name]) for name, value in result["numbers"].items()}


def format_value(value: Any) -> str:
    """Format a value for a table: integers in full, other numbers with four or five significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) or (abs(value) < 1e15 and float(value).is_integer()):
        return f"{int(value):,}"
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:.4g}"


def format_together(values: Sequence[Any], *, digits: int = 4, signed: bool = False) -> list[str]:
    """Format values that are read side by side, as in a row of a table, with as many decimals for all of them.

    The largest has `digits` significant digits at least, and the smallest two, so that 1.37 is 1.370 beside 1.342.
    Numbers of very different sizes are formatted one by one. With `signed`, all numbers have a sign.
    """
    numbers = [float(x) for x in values if isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)]
    sizes = [math.floor(math.log10(abs(x))) for x in numbers if x]
    decimals = max(digits - 1 - max(sizes), 1 - min(sizes), 0) if sizes else 0
    if all(x.is_integer() for x in numbers):
        decimals = 0
    if decimals > MAX_DECIMALS or (max(map(abs, numbers), default=0) >= 1e5 and decimals):
        return [format_value(value) for value in values]
    texts = []
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        text = f"{value:{'+' if signed else ''},.{decimals}f}" if is_number else format_value(value)
        texts.append(text.replace("-", "−") if is_number else text)
    return texts


def signed_change(before: float, value: float, *, relative: bool = True) -> str:
    """Return the difference of two values with its sign and, if `relative`, as a percentage of the first value."""
    share = f" ({(value - before) / abs(before):+.2%})" if before and relative else ""
    (difference,) = format_together([value - before], digits=3, signed=True)
    return f"{difference}{share}".replace("-", "−")


def _plain(value: Any, name: str) -> float:
    """Return a number of Python, NumPy or JAX as one of Python. Raise `UserError` for other values."""
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if not isinstance(number, int | float):
        raise UserError(f"{name}={value!r} is not a number; convert it, as in float(…)")
    return number
