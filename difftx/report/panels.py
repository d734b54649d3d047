"""Sections of the report: figures of one or several runs, with data thinned for the page.

Charts are JSON objects with the fields of `LineChart` or `Heatmap` of difftx/evals/result.py.
"""

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
from difftx.report.tables import Table, chart_values, evenly_spaced, event_text, series_values, shown
from difftx.training import metrics

MOST_POINTS = 2_000  # Most points of a line; more would enlarge the page without being visible.
MOST_POINTS_OF_MANY = 400  # Most points of a line in a figure of many lines, such as one per layer.
MOST_CELLS = 128 * 128  # Most cells of a heatmap.
MOST_CROSSINGS = 10  # Most crossings of λ's range that a note lists.

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # Name of a line → its x and y values.
Results = Mapping[int, Mapping[str, Any]]  # Step → result of one suite, ascending.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure with its heading, and its values as a table."""

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
    # Name of a control → its choices as (value, label). The page opens with the first choice.
    controls: dict[str, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)


def losses(runs: Sequence[RunRecord], *, comparable: bool) -> Section:
    """Draw training loss (raw and smoothed) and validation against each of `X_AXES`, on linear and logarithmic axes.

    Args:
        runs: Runs to draw.
        comparable: Whether all runs have the same tokenizer. If not, only bits per byte are drawn.
    """
    panels = []
    if comparable:
        label = METRIC_LABELS["loss"]
        panels += _loss_panels("Training loss, raw and smoothed", label, runs, _training_sources(runs))
    metric = validation_metric(runs)
    if comparable or metric == "bits_per_byte":
        label = METRIC_LABELS[metric]
        panels += _loss_panels(f"Validation, {label}", label, runs, _validation_sources(runs, metric))
    controls = {"against": list(X_AXES.items()), "axes": [("linear", "linear"), ("log", "logarithmic")]}
    return Section(id="curves", title="Curves", panels=panels, controls=controls)


def evaluations(runs: Sequence[RunRecord]) -> Section:
    """Draw the charts of each suite's newest results.

    If several steps were evaluated, also draw the suites' numbers, and the lines of charts with `over_steps`, against
    steps.
    """
    suites = dict.fromkeys(suite for run in runs for suite in run.results)
    panels = []
    for suite in suites:
        results = {run.name: run.results[suite] for run in runs if suite in run.results}
        panels += _number_panels(suite, results)
        newest = {run: of_run[max(of_run)].get("charts", []) for run, of_run in results.items()}
        panels += [_chart_panel(suite, chart) for chart in _merged(newest)]
        for run, of_run in results.items():
            panels += _charts_over_steps(suite, run, of_run)
    return Section(id="evaluations", title="Evaluations", panels=panels)


def lambdas(runs: Sequence[RunRecord]) -> Section:
    """Draw λ of each layer against steps, in one figure per run that has λ."""
    panels = []
    for run in runs:
        rows = [row for row in run.split("train") if row.get("lambda")]
        if not rows:
            continue
        rows = [rows[i] for i in evenly_spaced(len(rows), MOST_POINTS_OF_MANY)]
        steps = [row["step"] for row in rows]
        values = zip(*(row["lambda"] for row in rows), strict=True)
        lines = {f"layer {layer}": (steps, of_layer) for layer, of_layer in enumerate(values, 1)}
        title = f"λ of each layer: {run.name}"
        panels.append(_panel_over_steps(title, lines, "λ", note=_crossings_note(run)))
    return Section(id="lambda", title="λ", panels=panels)


def gradients(runs: Sequence[RunRecord]) -> Section:
    """Draw the gradient norm against steps, with the skipped updates and the journal's rewinds and stops."""
    lines = {run.name: _gradient_norms(run) for run in runs}
    lines = {name: (steps, norms) for name, (steps, norms) in lines.items() if steps}
    if not lines:
        return Section(id="gradients", title="Gradient norm and spikes", panels=[])
    log_y = all(norm > 0 for _, norms in lines.values() for norm in norms)
    panel = _panel_over_steps("Gradient norm", lines, "gradient norm before clipping", log_y=log_y)
    for run in runs:
        rows = [row for row in run.split("train") if row.get("skipped") and row.get("grad_norm") is not None]
        if rows:
            steps, norms = [row["step"] for row in rows], [row["grad_norm"] for row in rows]
            mark_points(panel.figure, steps, norms, f"{run.name}: update skipped")
    tables = []
    events = [(run.name, entry["step"], event_text(entry)) for run in runs for entry in run.journal]
    if events:
        mark_events(panel.figure, [step for _, step, _ in events], [f"{run}: {text}" for run, _, text in events])
        table = Table(["run", "step", "event"], [[run, shown(step), text] for run, step, text in events])
        tables = [("Rewinds and stops, from the journal", table)]
    return Section(id="gradients", title="Gradient norm and spikes", panels=[panel], tables=tables)


def wall_time(runs: Sequence[RunRecord]) -> Section:
    """Draw the parts of each run's wall time, from the last row of its split "goodput"."""
    parts_of_run = {}
    for run in runs:
        rows = run.split("goodput")
        parts = {
            name.removesuffix("_seconds").replace("_", " "): float(value)
            for name, value in (rows[-1] if rows else {}).items()
            if name.endswith("_seconds") and name != "wall_seconds" and value is not None
        }
        if parts:
            parts_of_run[run.name] = parts
    panels = []
    if parts_of_run:
        names = list(next(iter(parts_of_run.values())))
        rows = [[run, *(f"{parts.get(name, 0):,.1f}" for name in names)] for run, parts in parts_of_run.items()]
        figure, table = stacked_bars(parts_of_run, "seconds of wall time"), Table(["run", *names], rows)
        panels = [Panel(title="Where the time went", figure=figure, values=table)]
    return Section(id="goodput", title="Goodput", panels=panels)


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return the ascending indices of at most `most` values: the minimum and the maximum of each stretch of values.

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


def _training_sources(runs: Sequence[RunRecord]) -> dict[str, bokeh.models.ColumnDataSource]:
    """Return a run's name → columns of `X_AXES`, the raw training loss ("raw") and the smoothed one ("value")."""
    sources = {}
    for run in runs:
        steps, raw = training_losses(run)
        kept = thinned(raw, MOST_POINTS)
        progress = run.progress([steps[i] for i in kept])
        columns: dict[str, Any] = {name: np.array(values) for name, values in progress.items()}
        columns |= {"raw": raw[kept], "value": np.array(smoothed(raw))[kept]}
        sources[run.name] = bokeh.models.ColumnDataSource(columns)
    return sources


def _validation_sources(runs: Sequence[RunRecord], metric: Metric) -> dict[str, bokeh.models.ColumnDataSource]:
    """Return the name of each run with validations → columns of `X_AXES` and the metric ("value")."""
    sources = {}
    for run in runs:
        rows = run.evaluations(metric)
        if rows:
            columns: dict[str, Any] = run.progress([row["step"] for row in rows])
            columns |= {"value": [row[metric] for row in rows]}
            sources[run.name] = bokeh.models.ColumnDataSource(columns)
    return sources


def _loss_panels(
    title: str, y_label: str, runs: Sequence[RunRecord], sources: Mapping[str, bokeh.models.ColumnDataSource]
) -> list[Panel]:
    """Return a panel for each of `X_AXES` on linear and on logarithmic axes; the section's controls choose one."""
    panels = []
    for x, scale in itertools.product(X_AXES if sources else (), ("linear", "log")):
        lines = []
        for run, colour in zip(runs, series_colours(len(runs)), strict=True):
            source = sources.get(run.name)
            if source and "raw" in source.data:
                lines.append(Line(name=run.name, source=source, x=x, y="raw", colour=colour, faint=True))
            if source:
                lines.append(Line(name=run.name, source=source, x=x, y="value", colour=colour))
        is_log = scale == "log"
        figure = line_figure(lines, x_label=X_AXES[x], y_label=y_label, log_x=is_log, log_y=is_log)
        values = {run: (source.data[x], source.data["value"]) for run, source in sources.items()}
        table, shown_for = series_values(X_AXES[x], values), f"against-{x} axes-{scale}"
        panels.append(Panel(title=title, figure=figure, values=table, shown_for=shown_for))
    return panels


def _number_panels(suite: str, results: Mapping[str, Results]) -> list[Panel]:
    """Return a panel for each number of a suite that some run has at several steps, except constant numbers.

    Args:
        suite: Name of the suite.
        results: Name of a run → its results.
    """
    panels = []
    of_all_runs = [result["numbers"] for of_run in results.values() for result in of_run.values()]
    for name in dict.fromkeys(name for numbers in of_all_runs for name in numbers):
        lines = {}
        for run, of_run in results.items():
            values = {step: result["numbers"].get(name) for step, result in of_run.items()}
            values = {step: value for step, value in values.items() if isinstance(value, int | float)}
            lines[run] = list(values), list(values.values())
        is_constant = len({value for _, values in lines.values() for value in values}) < 2
        if max(len(steps) for steps, _ in lines.values()) > 1 and not is_constant:
            panels.append(_panel_over_steps(f"{suite}: {name} over the steps", lines, name))
    return panels


def _charts_over_steps(suite: str, run: str, results: Results) -> list[Panel]:
    """Return a panel for each line of the charts with `over_steps`; each x, such as a layer, becomes a line."""
    found: dict[tuple[str, str], dict[float, dict[int, float]]] = {}  # (Title, x label) → x → step → y.
    for step, result in results.items():
        for chart in result.get("charts", []):
            for line in chart["series"] if chart.get("over_steps") else []:
                values = found.setdefault((f"{chart['title']}: {line['name']}", chart["x_label"]), {})
                for x, y in zip(line["x"], line["y"], strict=True):
                    values.setdefault(x, {})[step] = y
    panels = []
    for (title, x_label), values in found.items():
        if max(map(len, values.values()), default=0) < 2:
            continue
        lines = {f"{x_label} {x:g}": (list(of_x), list(of_x.values())) for x, of_x in values.items()}
        panels.append(_panel_over_steps(f"{suite}: {title}, over the steps: {run}", lines, title))
    return panels


def _merged(charts_of_run: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the charts of several runs: line charts of the same name merged into one, heatmaps separate."""
    if len(charts_of_run) == 1:
        (charts,) = charts_of_run.values()
        return list({chart["name"]: dict(chart) for chart in charts}.values())
    merged: dict[str, dict[str, Any]] = {}
    for run, charts in charts_of_run.items():
        for chart in charts:
            if chart["kind"] == "heatmap":
                merged[f"{chart['name']} {run}"] = {**chart, "title": f"{run}: {chart['title']}"}
                continue
            series = [{**line, "name": f"{run}: {line['name']}"} for line in chart["series"]]
            merged.setdefault(chart["name"], {**chart, "series": []})["series"] += series
    return list(merged.values())


def _gradient_norms(run: RunRecord) -> tuple[list[int], list[float]]:
    """Return steps and the gradient norm at each step, without the steps whose norm is not finite."""
    rows = [row for row in run.split("train") if row.get("grad_norm") is not None]
    kept = thinned(as_floats([row["grad_norm"] for row in rows]), MOST_POINTS)
    return [rows[i]["step"] for i in kept], [rows[i]["grad_norm"] for i in kept]


def _crossings_note(run: RunRecord) -> str:
    """Return a note on the layers whose λ left the range in which they cancel noise, or an empty text."""
    rows = run.split(metrics.LAMBDA_SPLIT)
    if not rows:
        return ""
    crossings = [
        f"layer {row['layer']} at step {row['step']:,} (λ = {shown(row['value'])})" for row in rows[:MOST_CROSSINGS]
    ]
    more = f" and {len(rows) - MOST_CROSSINGS:,} more times" if len(rows) > MOST_CROSSINGS else ""
    inside = f"[{metrics.LOWEST_LAMBDA:g}, {metrics.HIGHEST_LAMBDA:g}]"
    return (
        f"Warning: λ left {inside} in {', '.join(crossings)}{more}. Below it the second map is added to the first, "
        "above it the second map dominates: the layer no longer cancels noise."
    )


def _panel_over_steps(title: str, lines: Lines, y_label: str, *, note: str = "", log_y: bool = False) -> Panel:
    series = [{"name": name, "x": steps, "y": values} for name, (steps, values) in lines.items()]
    chart = {"kind": "line", "series": series, "x_label": "steps", "y_label": y_label, "log_y": log_y}
    return _panel(title, chart, note)


def _chart_panel(suite: str, chart: Mapping[str, Any]) -> Panel:
    chart, note = _thinned_lines(chart) if chart["kind"] == "line" else _averaged_heatmap(chart)
    return _panel(f"{suite}: {chart['title']}", chart, note)


def _panel(title: str, chart: Mapping[str, Any], note: str) -> Panel:
    if chart["kind"] == "line" and len(chart["series"]) > MOST_NAMED_LINES:
        first, last = chart["series"][0]["name"], chart["series"][-1]["name"]
        note = f"{note} Colours run from {first}, dark, to {last}, bright; hovering over a line names it.".strip()
    return Panel(title=title, figure=chart_figure(chart), values=chart_values(chart), note=note)


def _thinned_lines(chart: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return a line chart with at most `MOST_POINTS` points per line, and a note if points were left out."""
    series, note = [], ""
    for line in chart["series"]:
        kept = thinned(as_floats(line["y"]), MOST_POINTS)
        if len(kept) < len(line["y"]):
            note = f"Thinned to {MOST_POINTS:,} points a line."
            columns = [name for name in ("x", "y", "low", "high") if line.get(name) is not None]
            line = {**line, **{name: [line[name][i] for i in kept] for name in columns}}
        series.append(line)
    return {**chart, "series": series}, note


def _averaged_heatmap(chart: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return a heatmap with at most `MOST_CELLS` cells, and a note if a cell is the mean of a block of cells."""
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
    smaller = {"x": chart["x"][::block], "y": chart["y"][::block], "values": means.tolist()}
    return {**chart, **smaller}, f"Each cell is the mean of {block} × {block}."
