"""Sections of the report: figures of one or several runs, whose data are thinned, and tables of the values."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import bokeh.models
import bokeh.plotting
import numpy as np

from difftx.evals.result import format_value
from difftx.report import interactive
from difftx.report.charts import heatmap_values, series_colours
from difftx.report.curves import METRIC_LABELS, smoothed, training_losses
from difftx.report.runs import X_AXES, Metric, RunRecord
from difftx.training import lambda_range
from difftx.training.goodput import SECTIONS as WALL_TIME_LABELS

MAX_POINTS = 2_000  # Maximum number of points per line. More would enlarge the page without being visible.
MAX_POINTS_OF_MANY = 400  # Maximum number of points per line in a figure of many lines, such as one per layer.
MAX_CELLS = 128 * 128  # Maximum number of cells of a heatmap.
MAX_CROSSINGS = 10  # Maximum number of events in the note on the layers whose λ left its useful range.
MAX_VALUE_ROWS = 12  # Maximum number of rows in the table of a line chart's values.
MAX_VALUES = 400  # Maximum number of cells of a heatmap that is also shown as a table.

# Parameters named `chart` are JSON objects with the fields of `LineChart` or `Heatmap` of difftx/evals/result.py.
Lines = Mapping[str, tuple[Any, Any]]  # Name of a line → its x and y values.


@dataclasses.dataclass(frozen=True)
class Cell:
    """A text in a table with a verdict, which is shown as a word and as a colour, or with a unit.

    A cell may span several columns, so that a value of several runs is shown once.
    """

    text: str
    verdict: Literal["better", "worse", "equal", ""] | None = None  # "": neither direction is better.
    unit: str = ""
    span: int = 1


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts. The first column names the rows."""

    header: list[str]
    rows: Sequence[Sequence[str | Cell]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure with a heading, and a table of the figure's values."""

    title: str
    figure: bokeh.plotting.figure
    values: Table | None = None
    note: str = ""
    shown_for: str = ""  # The panel is shown if the section's controls have these choices: "against-steps axes-log".


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Panels and tables under a heading."""

    id: str
    title: str
    panels: list[Panel]
    tables: list[tuple[str, Table]] = dataclasses.field(default_factory=list)  # Pairs of a caption and a table.
    # Name of a control → its choices as (value, label). The page opens with the first choice.
    controls: Mapping[str, Sequence[tuple[str, str]]] = dataclasses.field(default_factory=dict)


def losses(runs: Sequence[RunRecord], metric: Metric) -> Section:
    """Draw training loss (raw and smoothed) and validation against each of `X_AXES`, on linear and logarithmic axes.

    The metric "bits_per_byte" is for runs whose tokenizers differ. Their training losses cannot be compared.
    """
    panels = []
    if metric == "loss":
        sources = {}
        for run in runs:
            steps, raw = training_losses(run)
            kept = thinned(raw, MAX_POINTS)
            smooth = smoothed(raw)[kept]
            sources[run.name] = _source(run, [steps[i] for i in kept], raw=raw[kept], value=smooth)
        panels += _loss_panels("Training loss, raw and smoothed", METRIC_LABELS["loss"], runs, sources)
    sources = {}
    for run in runs:
        if rows := run.evaluations(metric):
            values = np.array([row[metric] for row in rows])
            sources[run.name] = _source(run, [row["step"] for row in rows], value=values)
    panels += _loss_panels("Validation loss", METRIC_LABELS[metric], runs, sources)
    controls: dict[str, Sequence[tuple[str, str]]] = {
        "against": list(X_AXES.items()),
        "axes": [("linear", "linear"), ("log", "logarithmic")],
    }
    return Section(id="curves", title="Curves", panels=panels, controls=controls)


def lambdas(runs: Sequence[RunRecord]) -> Section:
    """Draw λ of each layer against steps, in one figure for each differential model."""
    panels = []
    for run in runs:
        rows = [row for row in run.split("train") if row.get("lambda")]
        if not rows:
            continue
        rows = [rows[i] for i in evenly_spaced(len(rows), MAX_POINTS_OF_MANY)]
        steps = [row["step"] for row in rows]
        values = zip(*(row["lambda"] for row in rows), strict=True)
        lines = {f"layer {layer}": (steps, of_layer) for layer, of_layer in enumerate(values, 1)}
        title = f"λ of each layer: {run.name}"
        panels.append(panel_over_steps(title, lines, "λ", note=_crossings_note(run)))
    return Section(id="lambda", title="λ by layer", panels=panels)


def gradients(runs: Sequence[RunRecord]) -> Section:
    """Draw the gradient norm against steps. Mark skipped updates, and the rewinds and stops in the journal."""
    lines = {}
    for run in runs:
        rows = [row for row in run.split("train") if row.get("grad_norm") is not None]
        kept = thinned(np.array([row["grad_norm"] for row in rows]), MAX_POINTS)
        if rows:
            lines[run.name] = [rows[i]["step"] for i in kept], [rows[i]["grad_norm"] for i in kept]
    if not lines:
        return Section(id="gradients", title="Gradient norm and spikes", panels=[])
    log_y = all(norm > 0 for _, norms in lines.values() for norm in norms)
    panel = panel_over_steps("Gradient norm", lines, "gradient norm before clipping", log_y=log_y)
    for run in runs:
        rows = [row for row in run.split("train") if row.get("skipped") and row.get("grad_norm") is not None]
        if rows:
            steps, norms = [row["step"] for row in rows], [row["grad_norm"] for row in rows]
            style = {"marker": "x", "size": 9, "color": interactive.MARK_COLOUR, "line_width": 2}
            panel.figure.scatter(steps, norms, legend_label=f"{run.name}: update skipped", **style)
    tables, events = [], []
    for run in runs:
        for entry in run.journal:
            details = [f"{name} {value}" for name, value in entry.items() if name not in ("event", "step")]
            events.append((run.name, entry["step"], ", ".join([str(entry["event"]), *details])))
    if events:
        interactive.mark_events(panel.figure, events)
        table = Table(["run", "step", "event"], [[run, format_value(step), text] for run, step, text in events])
        tables = [("Rewinds and stops, from the journal", table)]
    return Section(id="gradients", title="Gradient norm and spikes", panels=[panel], tables=tables)


def wall_time(runs: Sequence[RunRecord]) -> Table:
    """Return the parts of each run's wall time in seconds, as logged last in the rows with the split "goodput"."""
    seconds = {}
    for run in runs:
        for column, value in (run.split("goodput") or [{}])[-1].items():
            if column.endswith("_seconds") and column != "wall_seconds" and value is not None:
                name = column.removesuffix("_seconds")
                seconds.setdefault(run.name, {})[WALL_TIME_LABELS.get(name, name)] = value
    names = dict.fromkeys(name for of_run in seconds.values() for name in of_run)
    rows = [
        [run, *(f"{(s := of_run.get(name, 0)):,.1f} ({s / (sum(of_run.values()) or 1):.0%})" for name in names)]
        for run, of_run in seconds.items()
    ]
    return Table(["run", *names], rows)


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return the ascending indices of at most `most` values: the least and the greatest in each stretch of values."""
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), most // 2 - 1):
        finite = stretch[np.isfinite(values[stretch])]
        if len(finite):
            kept |= {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])}
    return np.array(sorted(kept))


def _source(run: RunRecord, steps: Sequence[int], **columns: np.ndarray) -> bokeh.models.ColumnDataSource:
    """Return a data source with the given columns, which have a value per step, and a column for each of `X_AXES`."""
    data: dict[str, Any] = {axis: np.array(values) for axis, values in run.progress(steps).items()}
    return bokeh.models.ColumnDataSource(data | columns)


def _loss_panels(
    title: str, y_label: str, runs: Sequence[RunRecord], sources: Mapping[str, bokeh.models.ColumnDataSource]
) -> list[Panel]:
    """Return a panel for each of `X_AXES`, on linear and logarithmic axes. The section's controls show one of them."""
    panels = []
    for x, scale in itertools.product(X_AXES if sources else (), ("linear", "log")):
        lines = []
        for run, colour in zip(runs, series_colours(len(runs)), strict=True):
            if source := sources.get(run.name):
                line = interactive.Line(name=run.name, source=source, x=x, y="value", colour=colour)
                lines.append(line)
                if "raw" in source.data:
                    lines.append(dataclasses.replace(line, y="raw", faint=True))
        is_log = scale == "log"
        figure = interactive.line_figure(lines, x_label=X_AXES[x], y_label=y_label, log_x=is_log, log_y=is_log)
        if not is_log:
            ends = [float(np.max(source.data[x], initial=0)) for source in sources.values()]
            interactive.number_axis(figure, max(ends))
        values = {run: (source.data[x], source.data["value"]) for run, source in sources.items()}
        table, shown_for = _series_values(X_AXES[x], values), f"against-{x} axes-{scale}"
        panels.append(Panel(title=title, figure=figure, values=table, shown_for=shown_for))
    return panels


def _crossings_note(run: RunRecord) -> str:
    """Return a note on the layers whose λ left the range in which attention cancels noise, or "" if there are none."""
    rows = run.split(lambda_range.LAMBDA_SPLIT)
    if not rows:
        return ""
    crossings = [
        f"layer {row['layer']} at step {row['step']:,} (λ = {format_value(row['value'])})"
        for row in rows[:MAX_CROSSINGS]
    ]
    more = f" and {len(rows) - MAX_CROSSINGS:,} more times" if len(rows) > MAX_CROSSINGS else ""
    inside = f"[{lambda_range.LOWEST_LAMBDA:g}, {lambda_range.HIGHEST_LAMBDA:g}]"
    return (
        f"Warning: λ left {inside} in {', '.join(crossings)}{more}. Below this range, "
        f"{lambda_range.BELOW}; above it, {lambda_range.ABOVE}. The layer no longer cancels noise."
    )


def panel_over_steps(title: str, lines: Lines, y_label: str, *, note: str = "", log_y: bool = False) -> Panel:
    """Return a panel of lines against training steps."""
    series = [{"name": name, "x": steps, "y": values} for name, (steps, values) in lines.items()]
    chart = {"kind": "line", "series": series, "x_label": "steps", "y_label": y_label, "log_y": log_y}
    return chart_panel(title, chart, note)


def chart_panel(title: str, chart: Mapping[str, Any], note: str) -> Panel:
    """Return a panel of a chart with a table of its values."""
    if chart["kind"] == "line" and len(chart["series"]) > interactive.MAX_NAMED_LINES:
        first, last = chart["series"][0]["name"], chart["series"][-1]["name"]
        note = f"{note} Colours run from {first}, dark, to {last}, bright; hovering over a line names it.".strip()
    if chart["kind"] == "heatmap":
        note = f"The colour shows: {chart['value_label']}. {note}".strip()
    return Panel(title=title, figure=interactive.chart_figure(chart), values=_chart_values(chart), note=note)


def thinned_lines(chart: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return a line chart with at most `MAX_POINTS` points per line, and a note, empty if no points were left out."""
    series, note = [], ""
    for line in chart["series"]:
        kept = thinned(np.array(line["y"], float), MAX_POINTS)
        if len(kept) < len(line["y"]):
            note = f"Thinned to {MAX_POINTS:,} points per line."
            columns = [name for name in ("x", "y", "low", "high") if line.get(name) is not None]
            line = {**line, **{name: [line[name][i] for i in kept] for name in columns}}
        series.append(line)
    return {**chart, "series": series}, note


def averaged_heatmap(chart: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return a heatmap with at most `MAX_CELLS` cells, and a note, empty unless cells were averaged in blocks."""
    rows, columns = len(chart["y"]), len(chart["x"])
    block = next(n for n in itertools.count(1) if -(-rows // n) * -(-columns // n) <= MAX_CELLS)
    if block == 1:
        return chart, ""
    values = np.full((-(-rows // block) * block, -(-columns // block) * block), np.nan)
    values[:rows, :columns] = heatmap_values(chart)
    blocks = values.reshape(len(values) // block, block, -1, block)
    counts = np.isfinite(blocks).sum((1, 3))
    means = np.where(counts > 0, np.nansum(blocks, (1, 3)) / np.maximum(counts, 1), np.nan)
    smaller = {"x": chart["x"][::block], "y": chart["y"][::block], "values": means.tolist()}
    return {**chart, **smaller}, f"Each cell is the mean of {block} × {block}."


def _chart_values(chart: Mapping[str, Any]) -> Table | None:
    """Return a chart's values as a table, or None for a heatmap of more than `MAX_VALUES` cells."""
    if chart["kind"] == "line":
        return _series_values(chart["x_label"], {line["name"]: (line["x"], line["y"]) for line in chart["series"]})
    if len(chart["x"]) * len(chart["y"]) > MAX_VALUES:
        return None
    header = [f"{chart['y_label']} \\ {chart['x_label']}", *map(format_value, chart["x"])]
    rows = zip(chart["y"], chart["values"], strict=True)
    return Table(header, [[format_value(y), *map(format_value, row)] for y, row in rows])


def _series_values(x_label: str, series: Lines) -> Table:
    """Return a table of the lines at up to `MAX_VALUE_ROWS` points of the first line, evenly spaced by index.

    The other lines show their y at the nearest x, and "–" where they are more than half an interval of theirs away: a
    run with slightly more FLOPs than another still has a value at each end.
    """
    if not series:
        return Table([x_label], [])
    first = np.array(next(iter(series.values()))[0], float)
    rows = []
    for x in first[evenly_spaced(len(first), MAX_VALUE_ROWS)]:
        row = [format_value(float(x))]
        for xs, ys in series.values():
            xs = np.array(xs, float)
            margin = np.ptp(xs) / max(len(xs) - 1, 1) / 2 if len(xs) else 0
            is_covered = len(xs) and xs.min() - margin <= x <= xs.max() + margin
            row.append(format_value(ys[int(np.argmin(np.abs(xs - x)))]) if is_covered else "–")
        rows.append(row)
    return Table([x_label, *series], rows)


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced indices from 0 to `count` - 1, including both ends."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, most)).round().astype(int))
