"""Interactive figures drawn with Bokeh, from `LineChart` and `Heatmap` of difftx/evals/result.py."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import bokeh.models
import bokeh.plotting
import matplotlib.colors
import numpy as np

from difftx.report import charts

MAX_CHARACTERS = 40  # Maximum number of characters of a heatmap's x labels together. More would overlap on a phone.
MAX_TICK_LABELS = 200  # Maximum number of ticks with a label such as "2M" on an axis of tokens. Zooming in shows more.
HEIGHT = 240  # Height of a figure's frame in pixels, without axes and legend.
MAX_NAMED_LINES = 12  # A figure with more lines has no legend.
# Up to four lines show their tooltips at the same time, on different sides of the pointer, so that they do not overlap.
# A figure with more lines, such as one per layer, shows only the tooltip of the line under the pointer.
TOOLTIP_SIDES: tuple[Literal["left", "right", "above", "below"], ...] = ("left", "right", "above", "below")
# A Bokeh legend is HTML with its own colours. This style replaces them by the colours of the page.
LEGEND_STYLE = """.bk-label { color: var(--ink) !important; white-space: normal !important; max-width: 60vw;
  overflow-wrap: anywhere }
.bk-item { --item-background-color: transparent !important;
  --item-background-inactive-color: color-mix(in srgb, var(--paper) 70%, transparent) !important }"""
MAX_NAMED_CELLS = 2_500  # A larger heatmap's tooltips have no row and column names, which would enlarge the page.
TOOLS = "pan,box_zoom,wheel_zoom,reset,save"
DASHES = ("solid", "dashed", "dotted", "dotdash")  # Styles of the lines of the first run, the second, and so on.
MARK_COLOUR = "#D55E00"  # Colour of events and of skipped updates.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a figure. Its x and y are names of columns in a data source, which several figures may share."""

    name: str
    source: bokeh.models.ColumnDataSource
    x: str
    y: str
    colour: str
    dash: str = "solid"
    faint: bool = False  # Whether to draw the line behind the others, without tooltip and legend, as for raw values.
    has_band: bool = False  # Whether to draw a band around the line, between the source's columns "low" and "high".


def line_figure(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    is_scatter: bool = False,
) -> bokeh.plotting.figure:
    """Draw lines over a common x axis. A tooltip shows the value of a line at the x that is nearest to the pointer.

    With `is_scatter`, draw solid lines as points. Dashed lines, such as references, stay lines.
    """
    scales = {"x_axis_type": "log" if log_x else "linear", "y_axis_type": "log" if log_y else "linear"}
    figure = _figure(x_label, y_label, **scales)
    is_named = sum(not line.faint for line in lines) <= MAX_NAMED_LINES
    hovered: list[Any] = []
    for line in sorted(lines, key=lambda line: not line.faint):  # Faint lines are drawn first, below the others.
        if line.has_band:
            figure.varea(line.x, "low", "high", source=line.source, color=line.colour, alpha=0.2)
        style: dict[str, Any] = {"source": line.source, "color": line.colour}
        if line.faint:
            figure.line(line.x, line.y, name=line.name, alpha=0.45, line_width=1, **style)
            continue
        style |= {"legend_label": line.name} if is_named else {}
        if is_scatter and line.dash == "solid":
            hovered.append(figure.scatter(line.x, line.y, name=line.name, size=7, **style))
            continue
        hovered.append(figure.line(line.x, line.y, name=line.name, line_dash=line.dash, line_width=2, **style))
        if len(line.source.data[line.x]) < 30:  # Mark the points, because a line of one point is invisible.
            figure.scatter(line.x, line.y, size=6, **style)
    for i, shown in enumerate(hovered):
        # Tooltips do not contain axis labels. Two tooltips with labels would not fit on a phone.
        hover = _hover(shown, [("", "$name"), ("x", f"@{{{shown.glyph.x}}}"), ("y", f"@{{{shown.glyph.y}}}")])
        if len(hovered) <= len(TOOLTIP_SIDES):
            hover.mode, hover.attachment = "vline", TOOLTIP_SIDES[i]
        figure.add_tools(hover)
    if figure.legend:
        legend = figure.legend[0]
        legend.update(location="top_left", margin=0, background_fill_alpha=0, border_line_alpha=0)
        legend.update(click_policy="hide", stylesheets=[LEGEND_STYLE])
        figure.add_layout(legend, "below")
    return figure


def chart_figure(chart: Mapping[str, Any]) -> bokeh.plotting.figure:
    """Draw a `LineChart` or `Heatmap`, given as a JSON object.

    A series may also have `colour_of`, the name that it shares a colour with, and `dash`, an index of `DASHES`.
    """
    if chart["kind"] == "heatmap":
        return _heatmap(chart)
    lines = []
    for series, colour in zip(chart["series"], charts.line_colours(chart["series"]), strict=True):
        names = [name for name in ("x", "y", "low", "high") if series.get(name) is not None]
        columns: dict[str, Any] = {name: np.array(series[name], float) for name in names}
        source, has_band = bokeh.models.ColumnDataSource(columns), {"low", "high"} <= set(names)
        dash = "dashed" if series.get("is_reference") else DASHES[series.get("dash", 0) % len(DASHES)]
        line = Line(name=series["name"], source=source, x="x", y="y", colour=colour, dash=dash, has_band=has_band)
        lines.append(line)
    options = {name: bool(chart.get(name)) for name in ("log_x", "log_y", "is_scatter")}
    figure = line_figure(lines, x_label=chart["x_label"], y_label=chart["y_label"], **options)
    x = [value for series in chart["series"] for value in series["x"]]
    if all(float(value).is_integer() for value in x):
        log = options["log_x"]
        fixed = bokeh.models.FixedTicker(ticks=charts.log_ticks(x))
        figure.xaxis.ticker = fixed if log else bokeh.models.BasicTicker(min_interval=1, num_minor_ticks=0)
    return figure


def number_axis(figure: bokeh.plotting.figure, most: float) -> None:
    """Begin a linear x-axis at 0, and label multiples of a step with `axis_number`, such as 2M.

    `most` is the largest x. Ticks between the multiples, which a reader sees after zooming in, have all digits.
    """
    figure.x_range.update(start=0)  # Otherwise a single point would have an axis of a width of 2.
    figure.xaxis.formatter = bokeh.models.NumeralTickFormatter(format="0,0.[00]")
    if most >= MAX_TICK_LABELS:
        step = 10 ** math.ceil(math.log10(most / MAX_TICK_LABELS))
        written = charts.axis_number(most)
        multiples = range(0, int(1.2 * most) + step, step)
        figure.xaxis.major_label_overrides = {x: written(x) for x in multiples}


def mark_events(figure: bokeh.plotting.figure, events: Sequence[tuple[str, int, str]]) -> None:
    """Draw a vertical line for each event (run, step, text) at its step. A tooltip shows the run and the text."""
    texts = [f"{run}: {text}" for run, _, text in events]
    source = bokeh.models.ColumnDataSource({"x": [step for _, step, _ in events], "text": texts})
    shown = figure.vspan(x="x", source=source, color=MARK_COLOUR, line_dash="dashed", line_width=2)
    figure.add_tools(_hover(shown, [("step", "@x"), ("event", "@text")]))


def _heatmap(chart: Mapping[str, Any]) -> bokeh.plotting.figure:
    columns, rows = chart["x"], chart["y"]
    values = charts.heatmap_values(chart).astype(np.float32)
    figure = _figure(
        chart["x_label"],
        chart["y_label"],
        x_range=bokeh.models.Range1d(start=-0.5, end=len(columns) - 0.5),
        y_range=bokeh.models.Range1d(start=len(rows) - 0.5, end=-0.5),  # The first row is at the top.
        frame_height=HEIGHT + 60,
    )
    data: dict[str, Any] = {"image": [values]}
    column_text, row_text = "$x{0}", "$y{0}"
    if values.size <= MAX_NAMED_CELLS:
        data["column"] = [[[charts.tick_text(x) for x in columns] for _ in rows]]
        data["row"] = [[[charts.tick_text(y)] * len(columns) for y in rows]]
        column_text, row_text = "@column", "@row"
    low, high = charts.colour_limits(chart)
    palette = list(map(matplotlib.colors.to_hex, charts.DIVERGING(range(256)))) if low < 0 < high else "Viridis256"
    mapper = bokeh.models.LinearColorMapper(palette=palette, low=low, high=high, nan_color=charts.GREY)
    source = bokeh.models.ColumnDataSource(data)
    shown = figure.image("image", source=source, x=-0.5, y=-0.5, dw=len(columns), dh=len(rows))
    shown.glyph.color_mapper = mapper
    tooltips = [(chart["x_label"], column_text), (chart["y_label"], row_text), (chart["value_label"], "@image")]
    figure.add_tools(_hover(shown, tooltips))
    widest = max((len(charts.tick_text(name)) for name in columns), default=1)
    fitting = min(charts.MAX_TICKS, max(1, MAX_CHARACTERS // max(widest, 1)))
    for axis, labels in ((figure.xaxis, charts.ticks(columns, fitting)), (figure.yaxis, charts.ticks(rows))):
        axis.major_label_overrides = labels
        axis.ticker = bokeh.models.FixedTicker(ticks=list(labels))
    figure.grid.visible = False
    bar = bokeh.models.ColorBar(color_mapper=mapper, width=12, background_fill_alpha=0)
    figure.add_layout(bar, "right")
    return figure


def _figure(x_label: str, y_label: str, **options: Any) -> bokeh.plotting.figure:
    chosen: dict[str, Any] = {"frame_height": HEIGHT, "sizing_mode": "stretch_width", "tools": TOOLS} | options
    figure = bokeh.plotting.figure(active_drag=None, **chosen)  # Dragging scrolls the page unless a tool is active.
    figure.toolbar.update(logo=None, autohide=False)
    figure.xaxis.axis_label, figure.yaxis.axis_label = x_label, y_label
    if options.get("x_axis_type") == "linear":
        figure.xaxis.formatter = bokeh.models.BasicTickFormatter(power_limit_high=6)
    return figure


def _hover(renderer: Any, tooltips: Sequence[tuple[str, str]]) -> bokeh.models.HoverTool:
    """Return a hover tool without a button in the toolbar."""
    return bokeh.models.HoverTool(renderers=[renderer], tooltips=list(tooltips), visible=False)
