"""Charts as files (PNG and SVG), and as SVG elements of the report, drawn with matplotlib.

A chart is a `LineChart` or `Heatmap` of difftx/evals/result.py, as a JSON object. A line may have more fields:

    colour: such as "#2A86CC". By default, each line has its own.
    style: "line", "points", "dashed", or "faint" for a thin line behind the others.
    group: a legend entry that several lines share, or "" for none. By default, it is the line's name.

A line chart may also have `y_limits`, the ends of its y-axis.
"""

import io
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

# Okabe and Ito's palette, which colour-blind readers can distinguish. The blue is lighter than their #0072B2, which is
# too dark on black.
COLOURS = ("#2A86CC", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080")
# Colours of heatmaps, the same as in docs/images/attention-*.png. Blue is positive in all of them, so that readers can
# compare them.
DIVERGING = matplotlib.colors.LinearSegmentedColormap.from_list("diverging", [COLOURS[1], "#f7f7f7", COLOURS[0]])
POSITIVE = matplotlib.colors.LinearSegmentedColormap.from_list("positive", ["#f7f7f7", COLOURS[0], "#0b2f4f"])
LETTERS = (("T", 1e12), ("B", 1e9), ("M", 1e6))
MAX_WITH_LETTERS = 1e15  # Larger numbers are written with a power of ten.
GREY = "#808080"  # Visible on white and on black.
INK, RULE = "#1b1d21", "#d5d9df"  # Text and grid. The page replaces both with its own colours.
MAX_CELLS_WITH_NUMBERS = 100  # In a heatmap with more cells, numbers would overlap.
MAX_CELLS_ON_PAGE = 4096  # With more cells, a heatmap's values would make the page too large.
MAX_TICKS = 12  # Maximum number of tick labels on a heatmap's axis.
MAX_CHARACTERS = 64  # If a heatmap's x labels have more characters in total, rotate them.
MAX_MARKED_POINTS = 30  # A line with more points has no markers.
LINESTYLES = {"points": "", "dashed": "--"}
FILE_SIZE, PAGE_SIZE = (7, 4.5), (6, 3.6)  # Width and height in inches. On the page, an inch is 72 SVG units.
STYLE = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": RULE,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,  # Show dollar signs in names, instead of interpreting TeX.
}
# On the page, grid lines mark the ticks.
PAGE_STYLE = {"font.size": 11, "svg.fonttype": "none", "xtick.bottom": False, "ytick.left": False}


def draw_chart(chart: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw a chart to `<name>.png` and `<name>.svg` in a folder, and return these files."""
    # The chart name includes names of validation sets, which may have characters that are invalid in file names.
    return save_figure(draw(chart), folder / re.sub(r"[^\w.-]+", "_", chart["name"]))


def draw(chart: Mapping[str, Any], size: tuple[float, float] = FILE_SIZE) -> matplotlib.figure.Figure:
    """Return the figure of a chart, with title and legend."""
    with matplotlib.rc_context(STYLE):
        figure = _draw(chart, size)
        (axes, *_) = figure.axes
        axes.set_title(chart["title"])
        add_legend(axes)
    return figure


def page_figure(chart: Mapping[str, Any], styles: dict[str, str], salt: str) -> tuple[str, dict[str, Any]]:
    """Return a chart as an SVG element without title and legend, and its values for tooltips and tables, as JSON.

    `styles` maps each inline style to a class that replaces it. New styles are added to it. `salt` must be unique on
    the page, so that no two figures share ids.
    """
    with matplotlib.rc_context({**STYLE, **PAGE_STYLE, "svg.hashsalt": salt}):
        figure, written = _draw(chart, PAGE_SIZE), io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    svg = written.getvalue()
    svg = re.sub(r"<!--.*?-->|<defs>\s*<style.*?</defs>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' id="(series-\d+)"', r' class="\1"', svg)
    svg = re.sub(r' id="[A-Za-z][A-Za-z0-9.]*_\d+"|(?<=<svg )[^>]*?(?=viewBox)', "", svg)
    # A tenth of a unit is less than a pixel. Fewer digits make the page smaller.
    svg = re.sub(r'(?<= [dxy]=")[^"]*', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0].replace("\n", "")), svg)
    svg = re.sub(r'(?<=>)\s+(?=<)| transform="rotate\(-0 [^"]*"', "", svg)
    for drawn, shown in ((INK, "currentColor"), (RULE, "var(--rule)"), ("'DejaVu Sans', sans-serif", "sans-serif")):
        svg = svg.replace(drawn, shown)
    svg = re.sub('style="([^"]*)"', lambda found: f'class="{styles.setdefault(found[1], f"s{len(styles)}")}"', svg)
    # The left, top, right and bottom ends of the axes in SVG units, from the top left.
    (width, height), box = 72 * figure.get_size_inches(), figure.axes[0].get_position()
    ends = box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height
    return svg, {"box": [round(x, 1) for x in ends], **_values_on_page(chart, figure.axes[0])}


def _values_on_page(chart: Mapping[str, Any], axes: matplotlib.axes.Axes) -> dict[str, Any]:
    def short(values: Sequence[float | None], digits: int = 5) -> list[float | None]:
        finite = (value is not None and np.isfinite(value) for value in values)
        return [float(f"{x:.{digits}g}") if is_finite else None for x, is_finite in zip(values, finite, strict=True)]

    if chart["kind"] == "heatmap":
        names = {axis: list(map(tick_text, chart[axis])) for axis in "xy"}
        values = heatmap_values(chart)
        shown = values.tolist() if values.size <= MAX_CELLS_ON_PAGE else []
        return {**names, "values": [short(row, 3) for row in shown], "labels": [chart["x_label"], chart["y_label"]]}
    lines = [
        {"name": line["name"], "colour": colour, "x": short(line["x"]), "y": short(line["y"])}
        for line, colour in zip(chart["series"], line_colours(chart["series"]), strict=True)
    ]
    is_log = [bool(chart.get("log_x")), bool(chart.get("log_y"))]
    limits = [*axes.get_xlim(), *axes.get_ylim()]
    return {"limits": limits, "log": is_log, "lines": lines, "labels": [chart["x_label"]]}


def _draw(chart: Mapping[str, Any], size: tuple[float, float]) -> matplotlib.figure.Figure:
    """Return the figure of a chart, without title and legend."""
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    {"line": _draw_lines, "heatmap": _draw_heatmap}[chart["kind"]](axes, chart)
    return figure


def _draw_lines(axes: matplotlib.axes.Axes, chart: Mapping[str, Any]) -> None:
    label_axes(axes, {**chart, "title": ""})
    for index, (series, colour) in enumerate(zip(chart["series"], line_colours(chart["series"]), strict=True)):
        x, y = np.array(series["x"], float), np.array(series["y"], float)
        default = "dashed" if series.get("is_reference") else "points" if chart.get("is_scatter") else "line"
        style, gid = series.get("style", default), f"series-{index}"
        is_marked = style == "points" or (style == "line" and len(x) < MAX_MARKED_POINTS)
        (line,) = axes.plot(x, y, marker="o" if is_marked else "None", markersize=4, color=colour, gid=gid)
        line.set(label=series.get("group", series["name"]), linestyle=LINESTYLES.get(style, "-"))
        if style == "faint":
            line.set(alpha=0.5, linewidth=1, zorder=1.9)
        if series.get("low") is not None and series.get("high") is not None:
            band = np.array([series["low"], series["high"]], float)
            axes.fill_between(x, *band, color=colour, alpha=0.2, linewidth=0, gid=gid)
    if chart.get("y_limits"):
        axes.set_ylim(*chart["y_limits"])
    _set_number_ticks(axes, [value for series in chart["series"] for value in series["x"]], bool(chart.get("log_x")))


def _set_number_ticks(axes: matplotlib.axes.Axes, x: Sequence[float], is_log: bool) -> None:
    """Write the x-axis numbers with `axis_number`. If all x are integers, only mark integers."""
    text, are_integers = axis_number(max(x, default=0)), all(float(value).is_integer() for value in x)
    axes.xaxis.set_major_formatter(lambda value, _: text(value))
    if is_log:
        values = sorted(set(x))
        if are_integers and len(values) <= MAX_TICKS:
            axes.set_xticks(values)
            axes.minorticks_off()
    else:
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=are_integers))


def _draw_heatmap(axes: matplotlib.axes.Axes, chart: Mapping[str, Any]) -> None:
    """Draw a `Heatmap` with the first row at the top. Write numbers into the cells if they fit."""
    values = heatmap_values(chart)
    low, high = colour_limits(chart)
    colours = DIVERGING if low < 0 < high else POSITIVE
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="none")
    for set_ticks, names in ((axes.set_xticks, chart["x"]), (axes.set_yticks, chart["y"])):
        shown = ticks(names)
        is_wide = set_ticks == axes.set_xticks and sum(map(len, shown.values())) > MAX_CHARACTERS
        set_ticks(list(shown), list(shown.values()), rotation=90 if is_wide else 0)
    if values.size <= MAX_CELLS_WITH_NUMBERS:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                is_dark = np.dot(image.cmap(image.norm(value))[:3], (0.299, 0.587, 0.114)) < 0.5
                colour = "white" if is_dark else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, size=8)
    label_axes(axes, {**chart, "title": ""})
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes).set_label(chart["value_label"])


def label_axes(axes: matplotlib.axes.Axes, chart: Mapping[str, Any]) -> None:
    """Set the title, labels and scales of a chart."""
    axes.set_title(chart["title"])
    axes.set_xlabel(chart["x_label"])
    axes.set_ylabel(chart["y_label"])
    for axis, is_log, set_scale in (
        (axes.xaxis, chart.get("log_x"), axes.set_xscale),
        (axes.yaxis, chart.get("log_y"), axes.set_yscale),
    ):
        if is_log:
            set_scale("log")
            # The default formatter writes TeX, and its minor labels would overlap on a wide scale.
            axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(matplotlib.ticker.LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
    axes.grid(alpha=0.7, color=RULE)
    axes.set_axisbelow(True)


def add_legend(axes: matplotlib.axes.Axes) -> None:
    """Add a legend with each label once. Without labels, add none."""
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    if handles:
        columns = 1 + len(handles) // 12
        axes.legend(list(handles.values()), list(handles), ncols=columns, fontsize="small")


def line_colours(series: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the colour of each line: its own if set, grey for reference lines, else one per name."""
    free = [line["name"] for line in series if not line.get("is_reference") and "colour" not in line]
    colours = colours_of(free)
    return [line.get("colour") or (GREY if line.get("is_reference") else colours[line["name"]]) for line in series]


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return a colour per name: distinct colours for a few names, a gradual scale for many, such as layers."""
    names = list(dict.fromkeys(names))
    if len(names) <= len(COLOURS):
        return dict(zip(names, COLOURS, strict=False))
    scale = matplotlib.colormaps["viridis"](np.linspace(0, 1, len(names)))
    return dict(zip(names, map(matplotlib.colors.to_hex, scale), strict=True))


def colour_limits(chart: Mapping[str, Any]) -> tuple[float, float]:
    """Return the ends of a heatmap's colour scale. If it has both signs, centre it at zero."""
    values = heatmap_values(chart)
    finite = values[np.isfinite(values)].tolist()
    low = chart["low"] if chart.get("low") is not None else min(finite, default=0.0)
    high = chart["high"] if chart.get("high") is not None else max(finite, default=1.0)
    if low < 0 < high:
        low, high = -max(-low, high), max(-low, high)
    return (low, high) if low < high else (low, low + 1.0)


def heatmap_values(chart: Mapping[str, Any]) -> np.ndarray:
    """Return the values of a heatmap, `[rows, columns]`, with NaN for null."""
    return np.array(chart["values"], float).reshape(len(chart["y"]), len(chart["x"]))


def ticks(names: Sequence[float | str]) -> dict[int, str]:
    """Return position → label for at most `MAX_TICKS` of the rows or columns in `names`."""
    return {i: tick_text(names[i]) for i in range(0, len(names), -(-len(names) // MAX_TICKS) or 1)}


def tick_text(value: float | str) -> str:
    """Return the label of a heatmap's row or column."""
    return value if isinstance(value, str) else f"{value:g}"


def axis_number(most: float, digits: int = 4) -> Callable[[float], str]:
    """Return the number format for an axis up to `most`. All numbers get the same letter, such as 0.2M and 1M."""
    letter, size = next(((letter, size) for letter, size in LETTERS if most >= size), ("", 1))
    if most >= MAX_WITH_LETTERS:
        return lambda x: f"{x:.3g}"
    return lambda x: f"{x / size:,.{digits}g}{letter}" if x and letter else f"{x:,.6g}"


def short_number(number: float) -> str:
    """Format a number of parameters, tokens or FLOPs. From a million on, use a letter, such as 6.8B."""
    return axis_number(number, 3)(number)


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
