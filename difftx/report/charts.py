"""Chart files drawn with matplotlib, from `LineChart` and `Heatmap` of difftx/evals/result.py as JSON objects."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.axes
import matplotlib.colors
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from difftx.files import new_file

# Okabe and Ito's palette, whose colours colour-blind readers can distinguish. The blue is lighter than theirs, #0072B2,
# which is dim on black.
COLOURS = ("#2A86CC", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080")
# Colour map of values of both signs, such as A1 - λ A2, as in docs/images/attention-*.png: positive values are blue.
DIVERGING = matplotlib.colors.LinearSegmentedColormap.from_list("diverging", [COLOURS[1], "#f7f7f7", COLOURS[0]])
LETTERS = (("T", 1e12), ("B", 1e9), ("M", 1e6))
MAX_WITH_LETTERS = 1e15  # Larger numbers are written with a power of ten.
GREY = "#808080"  # Visible on white and on black.
MAX_CELLS_WITH_NUMBERS = 100  # A heatmap with more cells shows no numbers in them, because they would overlap.
MAX_TICKS = 12  # Maximum number of tick labels on an axis of a heatmap.
MAX_CHARACTERS = 64  # If the x labels of a heatmap have more characters than this in total, they are rotated.


def draw_chart(chart: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw a chart to the files `<name>.png` and `<name>.svg` in a folder, and return these files."""
    figure = matplotlib.figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    {"line": _draw_lines, "heatmap": _draw_heatmap}[chart["kind"]](axes, chart)
    # Chart names contain names of validation sets, which may have characters that file names cannot have.
    return save_figure(figure, folder / re.sub(r"[^\w.-]+", "_", chart["name"]))


def _draw_lines(axes: matplotlib.axes.Axes, chart: Mapping[str, Any]) -> None:
    for series, colour in zip(chart["series"], line_colours(chart["series"]), strict=True):
        x, y = np.array(series["x"], float), np.array(series["y"], float)
        if series.get("is_reference"):
            style = "--"
        elif chart.get("is_scatter"):
            style = "o"
        else:
            style = "o-" if len(x) < 20 else "-"
        axes.plot(x, y, style, markersize=4, color=colour, label=series["name"])
        if series.get("low") is not None and series.get("high") is not None:
            band = np.array([series["low"], series["high"]], float)
            axes.fill_between(x, *band, color=colour, alpha=0.2, linewidth=0)
    label_axes(axes, chart)
    x = [value for series in chart["series"] for value in series["x"]]
    if all(float(value).is_integer() for value in x):
        if chart.get("log_x"):
            axes.set_xticks(log_ticks(x), [f"{value:,.0f}" for value in log_ticks(x)])
            axes.minorticks_off()
        else:
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    if chart["series"]:
        add_legend(axes)


def _draw_heatmap(axes: matplotlib.axes.Axes, chart: Mapping[str, Any]) -> None:
    """Draw a `Heatmap` with the first row at the top, and numbers in the cells if they fit."""
    values = heatmap_values(chart)
    low, high = colour_limits(chart)
    colours = DIVERGING if low < 0 < high else "viridis"
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    for set_ticks, names in ((axes.set_xticks, chart["x"]), (axes.set_yticks, chart["y"])):
        shown = ticks(names)
        is_wide = set_ticks == axes.set_xticks and sum(map(len, shown.values())) > MAX_CHARACTERS
        set_ticks(list(shown), list(shown.values()), parse_math=False, rotation=90 if is_wide else 0)
    if values.size <= MAX_CELLS_WITH_NUMBERS:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                is_dark = np.dot(image.cmap(image.norm(value))[:3], (0.299, 0.587, 0.114)) < 0.5
                colour = "white" if is_dark else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, size=8)
    label_axes(axes, chart)
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes).set_label(chart["value_label"], parse_math=False)


def label_axes(axes: matplotlib.axes.Axes, chart: Mapping[str, Any]) -> None:
    """Set the title, labels and scales of a chart. Dollar signs are shown as they are, not interpreted as TeX."""
    axes.set_title(chart["title"], parse_math=False)
    axes.set_xlabel(chart["x_label"], parse_math=False)
    axes.set_ylabel(chart["y_label"], parse_math=False)
    if chart.get("log_x"):
        axes.set_xscale("log")
    if chart.get("log_y"):
        axes.set_yscale("log")
    axes.grid(alpha=0.3)


def add_legend(axes: matplotlib.axes.Axes) -> None:
    """Add a legend. Dollar signs in its names are shown as they are, not interpreted as TeX."""
    handles, _ = axes.get_legend_handles_labels()
    legend = axes.legend(ncols=1 + len(handles) // 12, fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)


def line_colours(series: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a colour for each series: grey for reference lines, and those of `series_colours` for the others.

    Series with the same `colour_of`, by default their name, have the same colour.
    """
    names = [line.get("colour_of", line["name"]) for line in series]
    coloured = dict.fromkeys(name for name, line in zip(names, series, strict=True) if not line.get("is_reference"))
    colours = dict(zip(coloured, series_colours(len(coloured)), strict=True))
    return [GREY if line.get("is_reference") else colours[name] for name, line in zip(names, series, strict=True)]


def log_ticks(x: Sequence[float]) -> list[float]:
    """Return at most `MAX_TICKS` of the different values in `x`, for a log axis, whose own ticks would be powers."""
    values = sorted(set(x))
    return values[:: -(-len(values) // MAX_TICKS) or 1]


def series_colours(count: int) -> Sequence[str]:
    """Return `count` colours: distinct ones for a few series, or a gradual scale for many, such as layers."""
    if count <= len(COLOURS):
        return COLOURS[:count]
    scale = matplotlib.colormaps["viridis"](np.linspace(0, 1, count))
    return [matplotlib.colors.to_hex(colour) for colour in scale]


def colour_limits(chart: Mapping[str, Any]) -> tuple[float, float]:
    """Return the ends of a heatmap's colour scale. If the scale contains both signs, it is centred at zero."""
    values = heatmap_values(chart)
    finite = values[np.isfinite(values)].tolist()
    low = chart["low"] if chart.get("low") is not None else min(finite, default=0.0)
    high = chart["high"] if chart.get("high") is not None else max(finite, default=1.0)
    if low < 0 < high:
        low, high = -max(-low, high), max(-low, high)
    return (low, high) if low < high else (low, low + 1.0)


def heatmap_values(chart: Mapping[str, Any]) -> np.ndarray:
    """Return the values of a heatmap, `[rows, columns]`, with NaN in place of null."""
    return np.array(chart["values"], float).reshape(len(chart["y"]), len(chart["x"]))


def ticks(names: Sequence[float | str], most: int = MAX_TICKS) -> dict[Any, Any]:
    """Return position → label for at most `most` of a heatmap's rows or columns, which have the given names."""
    return {i: tick_text(names[i]) for i in range(0, len(names), -(-len(names) // most) or 1)}


def tick_text(value: float | str) -> str:
    """Return the label of a heatmap's row or column."""
    return value if isinstance(value, str) else f"{value:g}"


def axis_number(most: float) -> Callable[[float], str]:
    """Return the format of the numbers on an axis up to `most`. All have the letter of `most`, such as 0.2M and 1M."""
    letter, size = next(((letter, size) for letter, size in LETTERS if most >= size), ("", 1))
    if most >= MAX_WITH_LETTERS:
        return lambda x: f"{x:.3g}"
    return lambda x: f"{x / size:,.4g}{letter}" if x and letter else f"{x:,.6g}"


def short_number(number: float) -> str:
    """Format a number of parameters, tokens, FLOPs or seconds, with a letter from a million up, such as 6.8B."""
    if number >= MAX_WITH_LETTERS:
        return f"{number:.3g}"
    for letter, size in LETTERS:
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,.0f}"


def save_figure(figure: matplotlib.figure.Figure, stem: Path) -> list[Path]:
    """Write a figure to `<stem>.png` and `<stem>.svg`, and return these files. Equal figures give equal bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    with matplotlib.rc_context({"svg.hashsalt": json.dumps(stem.name)}):
        for path in files:
            with new_file(path) as file:
                metadata = {"Date": None} if path.suffix == ".svg" else {}
                figure.savefig(file, format=path.suffix[1:], dpi=150, metadata=metadata)
    return files
