"""The result of a suite: numbers, details and charts."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from difftx.errors import UserError

MAX_DECIMALS = 6  # Format numbers one by one if aligned columns would need more decimals.


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
    """A line that is not a measurement, such as the accuracy of guessing. It is drawn dashed and grey."""

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
    over_steps: bool = False  # Whether the report also draws y over training steps, one line per x.
    kind: Literal["line"] = "line"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScatterChart(LineChart):
    """Points over a common x-axis. They are not connected, because the order of x has no meaning."""

    is_scatter: Literal[True] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heatmap:
    """A table of values, drawn as colours. The first row is at the top."""

    name: str
    title: str
    x_label: str
    y_label: str
    x: Sequence[float | str]
    y: Sequence[float | str]
    values: Sequence[Sequence[float | None]]  # One list per row. None: no value.
    value_label: str
    low: float | None = None  # Lower end of the colour scale. None: the smallest value.
    high: float | None = None  # Upper end of the colour scale. None: the largest value.
    kind: Literal["heatmap"] = "heatmap"


type Better = Literal["lower", "higher"] | None


class Number(float):
    """A number in a result, with its unit, better direction and label. Arithmetic returns plain numbers."""

    unit: str  # "": none.
    better: Better  # None: neither direction.
    label: str  # Name for readers. The default is the name in the result, with spaces for underscores.
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
        """Return the number with some attributes changed."""
        return Number(self, **vars(self) | changes)

    @property
    def axis(self) -> str:
        """The axis label for such numbers."""
        return self.label if self.unit in ("", self.label) else f"{self.label} ({self.unit})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a suite. It can be written as JSON."""

    numbers: Mapping[str, Number]  # Compared between runs, and plotted over steps.
    details: dict[str, Any] = dataclasses.field(default_factory=dict)  # Further results, as JSON.
    charts: Sequence[LineChart | Heatmap] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        """Convert plain values to `Number`, and set missing labels."""
        numbers = {}
        for name, value in self.numbers.items():
            number = value if isinstance(value, Number) else Number(_plain(value, f"Result.numbers[{name!r}]"))
            numbers[name] = number.but(label=number.label or name.replace("_", " "))
        object.__setattr__(self, "numbers", numbers)


def read_numbers(result: Mapping[str, Any]) -> dict[str, Number]:
    """Read the numbers of a result in JSON form."""
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
    """Format values that are read side by side, as in a table row, with the same number of decimals.

    The largest value has at least `digits` significant digits, and the smallest at least two, so 1.37 becomes 1.370
    next to 1.342. Numbers of very different sizes are formatted one by one. With `signed`, all numbers have a sign.
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
    """Return the signed difference of two values, and if `relative`, also as a percentage of the first value."""
    share = f" ({(value - before) / abs(before):+.2%})" if before and relative else ""
    (difference,) = format_together([value - before], digits=3, signed=True)
    return f"{difference}{share}".replace("-", "−")


def _plain(value: Any, name: str) -> float:
    """Convert a Python, NumPy or JAX number to a Python number. Raise `UserError` for other values."""
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if not isinstance(number, int | float):
        raise UserError(f"{name}={value!r} is not a number; convert it, as in float(…)")
    return number
