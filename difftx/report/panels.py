"""Sections of the report: the figures of one or several runs, with their data reduced for the page."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import bokeh.models
import bokeh.plotting
import numpy as np

from difftx.report.charts import as_floats, series_colours
from difftx.report.curves import METRIC_LABELS, smoothed, training_losses, validation_metric
from difftx.report.interactive import (
    MOST_NAMED_LINES,
    Line,
    chart_figure,
    line_figure,
    mark_events,
    mark_points,
    stacked_bars,
)
from difftx.report.runs import X_AXES, Metric, RunRecord
from difftx.report.tables import Table, chart_values, event_text, series_values, shown
from difftx.training import lambda_range

MOST_POINTS = 2_000  # Most points of a line; more would enlarge the page without being visible.
MOST_POINTS_OF_MANY = 400  # Most points of a line in a figure of many lines, such as one per layer.
MOST_CELLS = 128 * 128  # Most cells of a heatmap.
MOST_CROSSINGS = 10  # Most crossings of λ's range that a note lists.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure with its heading, and its values as a table."""

    id: str
    title: str
    figure: bokeh.plotting.figure
    values: Table | None = None
    note: str = ""
    shown_for: str = ""  # Choices of the section's controls that show the panel, such as "against-steps axes-log".


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Panels and tables under a heading."""

    id: str
    title: str
    panels: list[Panel]
    tables: list[tuple[str, Table]] = dataclasses.field(default_factory=list)  # (Caption, table).
    # Name of a control → its choices as (value, label). The first choice is selected at first.
    controls: dict[str, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)


def losses(runs: Sequence[RunRecord], *, comparable: bool) -> Section:
    """Draw training loss (raw and smoothed) and validation against each of `X_AXES`, on linear and logarithmic axes.

    Args:
        runs: Runs to draw.
        comparable: Whether all runs have the same tokenizer. If not, only bits per byte are drawn.
    """
    metric = validation_metric(runs)
    found = []
    if comparable or metric == "bits_per_byte":
        sources = _validation(runs, metric)
        found.append((f"validation-{metric}", f"Validation, {METRIC_LABELS[metric]}", METRIC_LABELS[metric], sources))
    if comparable:
        found.insert(0, ("training", "Training loss, raw and smoothed", METRIC_LABELS["loss"], _training(runs)))
    panels = []
    for (name, title, y_label, sources), quantity, scale in itertools.product(found, X_AXES, ("linear", "log")):
        if not sources:
            continue
        lines = []
        for (run, source), colour in zip(sources.items(), series_colours(len(runs)), strict=False):
            if "raw" in source.data:
                lines.append(Line(name=run, source=source, x=quantity, y="raw", colour=colour, faint=True))
            lines.append(Line(name=run, source=source, x=quantity, y="value", colour=colour))
        is_log = scale == "log"
        figure = line_figure(lines, x_label=X_AXES[quantity], y_label=y_label, log_x=is_log, log_y=is_log)
        series = {run: (source.data[quantity], source.data["value"]) for run, source in sources.items()}
        panels.append(
            Panel(
                id=f"{name}-{quantity}-{scale}",
                title=title,
                figure=figure,
                values=series_values(X_AXES[quantity], series),
                shown_for=f"against-{quantity} axes-{scale}",
            )
        )
    controls = {"against": list(X_AXES.items()), "axes": [("linear", "linear"), ("log", "logarithmic")]}
    return Section(id="curves", title="Curves", panels=panels, controls=controls)


def evaluations(runs: Sequence[RunRecord]) -> Section:
    """Draw the charts of each suite's newest results.

    If several steps were evaluated, also draw the suites' numbers, and the lines of charts with `over_steps`, against
    steps.
    """
    results = {run.name: run.results for run in runs}
    panels = []
    for suite in dict.fromkeys(suite for found in results.values() for suite in found):
        of_suite = {run: found[suite] for run, found in results.items() if suite in found}
        panels += _over_steps(suite, of_suite)
        newest = {run: list(steps.values())[-1].get("charts", []) for run, steps in of_suite.items()}
        panels += [_chart_panel(suite, chart) for chart in _merged(newest)]
        panels += [panel for run, steps in of_suite.items() for panel in _lines_over_steps(suite, run, steps)]
    return Section(id="evaluations", title="Evaluations", panels=panels)


def lambdas(runs: Sequence[RunRecord]) -> Section:
    """Draw λ of each layer against steps, in one figure per run that has λ."""
    panels = []
    for run in runs:
        rows = [row for row in run.split("train") if row.get("lambda")]
        rows = [rows[i] for i in _spread(len(rows), MOST_POINTS_OF_MANY)]
        layers = max((len(row["lambda"]) for row in rows), default=0)
        if not layers:
            continue
        steps = [row["step"] for row in rows]
        series = [
            {"name": f"layer {i + 1}", "x": steps, "y": [row["lambda"][i] for row in rows]} for i in range(layers)
        ]
        chart = {"kind": "line", "series": series, "x_label": "steps", "y_label": "λ"}
        panels.append(_panel(f"lambda-{run.name}", f"λ of each layer: {run.name}", chart, _crossings(run)))
    return Section(id="lambda", title="λ", panels=panels)


def _crossings(run: RunRecord) -> str:
    """Return a note on the layers whose λ left the range in which they cancel noise, or an empty text."""
    rows = run.split(lambda_range.SPLIT)
    if not rows:
        return ""
    told = [
        f"layer {row['layer']} at step {row['step']:,} (λ = {shown(row['value'])})" for row in rows[:MOST_CROSSINGS]
    ]
    more = f" and {len(rows) - MOST_CROSSINGS:,} more times" if len(rows) > MOST_CROSSINGS else ""
    return (
        f"Warning: λ left [{lambda_range.LOWEST:g}, {lambda_range.HIGHEST:g}] in {', '.join(told)}{more}. Below it the "
        "second map is added to the first, above it the second map dominates: the layer no longer cancels noise."
    )


def gradients(runs: Sequence[RunRecord]) -> Section:
    """Draw the gradient norm against steps, with the skipped updates and the journal's rewinds and stops."""
    series, skipped, told = [], {}, []
    for run in runs:
        rows = [row for row in run.split("train") if row.get("grad_norm") is not None]
        norms = np.array([row["grad_norm"] for row in rows], float)
        rows = [rows[i] for i in thinned(norms, MOST_POINTS)]
        if rows:
            x, y = [row["step"] for row in rows], [row["grad_norm"] for row in rows]
            series.append({"name": run.name, "x": x, "y": y})
        skipped[run.name] = [row for row in run.split("train") if row.get("skipped")]
        told += [(run.name, entry) for entry in run.journal]
    if not series:
        return Section(id="gradients", title="Gradient norm and spikes", panels=[])
    chart = {
        "kind": "line",
        "series": series,
        "x_label": "steps",
        "y_label": "gradient norm before clipping",
        "log_y": all(value > 0 for line in series for value in line["y"]),
    }
    panel = _panel("gradient-norm", "Gradient norm", chart)
    for name, rows in skipped.items():
        drawn = [row for row in rows if row.get("grad_norm") is not None]
        if drawn:
            x, y = [row["step"] for row in drawn], [row["grad_norm"] for row in drawn]
            mark_points(panel.figure, x, y, f"{name}: update skipped")
    tables = []
    if told:
        mark_events(panel.figure, [entry["step"] for _, entry in told], [f"{r}: {event_text(e)}" for r, e in told])
        rows = [[run, shown(entry["step"]), event_text(entry)] for run, entry in told]
        tables = [("Rewinds and stops, from the journal", Table(["run", "step", "event"], rows))]
    return Section(id="gradients", title="Gradient norm and spikes", panels=[panel], tables=tables)


def wall_time(runs: Sequence[RunRecord]) -> Section:
    """Draw the parts of each run's wall time, from the last row of its split "goodput"."""
    bars = {}
    for run in runs:
        rows = run.split("goodput")
        parts = {
            name.removesuffix("_seconds").replace("_", " "): float(value)
            for name, value in (rows[-1] if rows else {}).items()
            if name.endswith("_seconds") and name != "wall_seconds" and value is not None
        }
        if parts:
            bars[run.name] = parts
    panels = []
    if bars:
        header = ["run", *next(iter(bars.values()))]
        values = Table(
            header, [[run, *(f"{parts.get(name, 0):,.1f}" for name in header[1:])] for run, parts in bars.items()]
        )
        figure = stacked_bars(bars, "seconds of wall time")
        panels = [Panel(id="goodput", title="Where the time went", figure=figure, values=values)]
    return Section(id="goodput", title="Goodput", panels=panels)


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return the ascending indices of at most `most` values: the least and the greatest of each stretch.

    A spike of a single step is therefore kept.
    """
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), most // 2 - 1):
        finite = stretch[np.isfinite(values[stretch])]
        if len(finite):
            kept |= {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])}
    return np.array(sorted(kept))


def _spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced indices below `count`, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)) if count else np.arange(0)


def _training(runs: Sequence[RunRecord]) -> dict[str, bokeh.models.ColumnDataSource]:
    sources = {}
    for run in runs:
        steps, raw = training_losses(run)
        kept = thinned(as_floats(raw), MOST_POINTS)
        columns = run.progress([steps[i] for i in kept])
        smooth = np.array(smoothed(raw))[kept]
        data: dict[str, Any] = {name: np.array(column) for name, column in columns.items()}
        data |= {"raw": np.array(raw)[kept], "value": smooth}
        sources[run.name] = bokeh.models.ColumnDataSource(data)
    return sources


def _validation(runs: Sequence[RunRecord], metric: Metric) -> dict[str, bokeh.models.ColumnDataSource]:
    sources = {}
    for run in runs:
        rows = run.evaluations(metric)
        if rows:
            columns: dict[str, Any] = run.progress([row["step"] for row in rows])
            columns |= {"value": [row[metric] for row in rows]}
            sources[run.name] = bokeh.models.ColumnDataSource(columns)
    return sources


def _over_steps(suite: str, of_suite: Mapping[str, Mapping[int, Any]]) -> list[Panel]:
    """Return a panel for each number of a suite that some run has at several steps, except constant numbers."""
    names = dict.fromkeys(n for steps in of_suite.values() for result in steps.values() for n in result["numbers"])
    panels = []
    for name in names:
        series = []
        for run, steps in of_suite.items():
            found = {step: result["numbers"].get(name) for step, result in steps.items()}
            found = {step: value for step, value in found.items() if isinstance(value, int | float)}
            series.append({"name": run, "x": list(found), "y": list(found.values())})
        is_constant = len({value for line in series for value in line["y"]}) < 2
        if max(len(line["x"]) for line in series) > 1 and not is_constant:
            chart = {"kind": "line", "series": series, "x_label": "steps", "y_label": name}
            panels.append(_panel(f"{suite}-{name}-steps", f"{suite}: {name} over the steps", chart))
    return panels


def _lines_over_steps(suite: str, run: str, steps: Mapping[int, Any]) -> list[Panel]:
    """Return a panel for each line of the charts with `over_steps`: its value at each x (such as a layer) by step."""
    found: dict[tuple[str, str], dict[float, dict[int, float]]] = {}  # (Chart and line, x label) → x → step → value.
    for step, result in steps.items():
        for chart in result.get("charts", []):
            for line in chart["series"] if chart.get("over_steps") else []:
                values = found.setdefault((f"{chart['title']}: {line['name']}", chart["x_label"]), {})
                for x, y in zip(line["x"], line["y"], strict=True):
                    values.setdefault(x, {})[step] = y
    panels = []
    for (title, x_label), values in found.items():
        if max(map(len, values.values()), default=0) < 2:
            continue
        series = [{"name": f"{x_label} {x:g}", "x": list(of_x), "y": list(of_x.values())} for x, of_x in values.items()]
        chart = {"kind": "line", "series": series, "x_label": "steps", "y_label": title}
        panels.append(_panel(f"{suite}-{run}-{title}-steps", f"{suite}: {title}, over the steps: {run}", chart))
    return panels


def _merged(charts_of_run: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the charts of several runs: line charts of the same name merged into one, heatmaps separate."""
    single = len(charts_of_run) == 1
    merged: dict[str, dict[str, Any]] = {}
    for run, charts in charts_of_run.items():
        for chart in charts:
            if chart["kind"] == "line" and not single:
                series = [{**line, "name": f"{run}: {line['name']}"} for line in chart["series"]]
                if chart["name"] in merged:
                    merged[chart["name"]]["series"] += series
                else:
                    merged[chart["name"]] = {**chart, "series": series}
            else:
                title = chart["title"] if single else f"{run}: {chart['title']}"
                merged[chart["name"] if single else f"{chart['name']} {run}"] = {**chart, "title": title}
    return list(merged.values())


def _chart_panel(suite: str, chart: Mapping[str, Any]) -> Panel:
    chart, note = _thin_chart(chart)
    return _panel(f"{suite}-{chart['name']}-{chart['title']}", f"{suite}: {chart['title']}", chart, note)


def _panel(id: str, title: str, chart: Mapping[str, Any], note: str = "") -> Panel:
    if chart["kind"] == "line" and len(chart["series"]) > MOST_NAMED_LINES:
        first, last = chart["series"][0]["name"], chart["series"][-1]["name"]
        note = f"{note} Colours run from {first}, dark, to {last}, bright; hovering over a line names it.".strip()
    return Panel(id=id, title=title, figure=chart_figure(chart), values=chart_values(chart), note=note)


def _thin_chart(chart: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return a chart that is small enough for the page, and a note on how it was reduced."""
    if chart["kind"] == "line":
        lines = [_thin_series(line) for line in chart["series"]]
        note = "" if lines == chart["series"] else f"Thinned to {MOST_POINTS:,} points a line."
        return {**chart, "series": lines}, note
    rows, columns = len(chart["y"]), len(chart["x"])
    block = 1
    while -(-rows // block) * -(-columns // block) > MOST_CELLS:
        block += 1
    if block == 1:
        return chart, ""
    values = np.full((-(-rows // block) * block, -(-columns // block) * block), np.nan)
    values[:rows, :columns] = [as_floats(row) for row in chart["values"]]
    blocks = values.reshape(len(values) // block, block, -1, block)
    counts = np.isfinite(blocks).sum((1, 3))
    means = np.where(counts > 0, np.nansum(blocks, (1, 3)) / np.maximum(counts, 1), np.nan)
    thin = {"x": chart["x"][::block], "y": chart["y"][::block], "values": means.tolist()}
    return {**chart, **thin}, f"Each cell is the mean of {block} × {block}."


def _thin_series(line: Mapping[str, Any]) -> Mapping[str, Any]:
    kept = thinned(as_floats(line["y"]), MOST_POINTS)
    if len(kept) == len(line["y"]):
        return line
    columns = {name: line.get(name) for name in ("x", "y", "low", "high")}
    return {**line, **{name: [column[i] for i in kept] for name, column in columns.items() if column is not None}}
