"""Parts of the report: figures of one or several runs, whose data are thinned, and tables of values."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from difftx.evals.result import format_together, format_value
from difftx.report.arms import Arm
from difftx.report.charts import COLOURS, heatmap_values
from difftx.report.curves import METRIC_LABELS, loss_chart, thinned, training_losses
from difftx.report.runs import X_AXES, Metric, RunRecord
from difftx.training import lambda_range
from difftx.training.goodput import SECTIONS as WALL_TIME_LABELS

MAX_POINTS = 300  # Maximum number of points per line. More would enlarge the page without being visible.
MAX_POINTS_OF_MANY = 100  # Maximum number of points per line in a figure of many lines, such as one per layer.
MAX_CROSSINGS = 10  # Maximum number of events in the note on the layers whose λ left its useful range.
MAX_VALUE_ROWS = 12  # Maximum number of rows in the table of a line chart's values.
MAX_VALUES = 400  # Maximum number of cells of a heatmap that is also shown as a table.
DIM = 0.02  # Share of a heatmap's largest value up to which a row counts as empty.


@dataclasses.dataclass(frozen=True)
class Cell:
    """A text in a table with a verdict, which is shown as a word and as a colour, or with a unit.

    A cell may span several columns, so that a value of several runs is shown once.
    """

    text: str
    verdict: Literal["better", "worse", "equal", "open", "no better than chance"] | None = None
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
    chart: Mapping[str, Any]  # As difftx/report/charts.py describes charts.
    note: str = ""
    shown_for: str = ""  # The panel is shown if the page's controls have these choices: "against-steps axes-log".

    @property
    def values(self) -> Table | None:
        """The chart's values as a table, or None for a heatmap of more than `MAX_VALUES` cells."""
        chart = self.chart
        if chart["kind"] == "line":
            return _series_values(chart["x_label"], {line["name"]: (line["x"], line["y"]) for line in chart["series"]})
        if len(chart["x"]) * len(chart["y"]) > MAX_VALUES:
            return None
        header = [f"{chart['y_label']} \\ {chart['x_label']}", *map(format_value, chart["x"])]
        columns = [list(map(format_value, chart["y"])), *map(format_together, zip(*chart["values"], strict=True))]
        return Table(header, [list(row) for row in zip(*columns, strict=True)])

    @property
    def is_informative(self) -> bool:
        """Whether the values of the chart differ.

        A heatmap also needs two rows that are not empty, and a line chart lines whose colours can be told apart.
        """
        chart = self.chart
        if chart["kind"] == "heatmap":
            values = np.nan_to_num(np.abs(heatmap_values(chart)))
            bright = values.max(axis=1, initial=0) > DIM * values.max(initial=0)
            return values.size > 1 and np.ptp(values) > 0 and (bright.sum() > 1 or len(bright) == 1)
        lines = [line for line in chart["series"] if not line.get("is_reference")]
        values = [np.array(line["y"], float) for line in lines]
        return len(lines) <= len(COLOURS) and any(len(y) > 1 and np.ptp(y) != 0 for y in values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: the numbers, figures and samples that answer its question, and what the reader may unfold."""

    id: str
    title: str
    explanation: str = ""
    basis: str = ""  # Steps of the results, and how much was measured.
    numbers: Table = dataclasses.field(default_factory=lambda: Table([], []))
    further: Table = dataclasses.field(default_factory=lambda: Table([], []))  # Numbers that are folded away.
    panels: Sequence[Panel] = ()
    folded: Sequence[Panel] = ()
    tables: Sequence[tuple[str, Table]] = ()  # Pairs of a caption and a table.
    samples: Mapping[str, Sequence[tuple[str, str]]] = dataclasses.field(default_factory=dict)  # Prompt → completions.


def loss_panels(arms: Sequence[Arm], colours: Mapping[str, str], metric: Metric) -> list[Panel]:
    """Return a panel of the losses against each of `X_AXES`, on linear and logarithmic axes.

    The page's controls show one of them. The metric "bits_per_byte" is for runs whose tokenizers differ, so that their
    training losses cannot be compared.
    """
    panels = []
    for against in X_AXES:
        chart = loss_chart(arms, colours, metric, against, MAX_POINTS)
        if not chart["series"]:
            return []
        for scale in ("linear", "log"):
            is_log = scale == "log"
            scaled = chart | ({"log_x": True, "log_y": True, "y_limits": None} if is_log else {})
            panels.append(Panel(title=chart["title"], chart=scaled, shown_for=f"against-{against} axes-{scale}"))
    return panels


def training(arms: Sequence[Arm], colours: Mapping[str, str], metric: Metric) -> Section:
    """Return the section on the training: λ, gradient norms, raw losses, and what the guards did.

    One figure of λ is shown, and those whose λ left its range. The others are folded, unless updates were skipped.
    """
    runs = [run for arm in arms for run in arm.runs]
    lambdas = [panel for run in runs for panel in _lambda_panels(run)]
    shown = [panel for panel in lambdas if panel.note] or lambdas[:1]
    norms, events = _gradient_panels(arms, colours), _events(runs)
    raw = [_raw_losses(arms, colours)] if metric == "loss" else []
    has_spikes = any(row.get("skipped") for run in runs for row in run.split("train")) or events.rows
    shown, folded = (shown + norms, raw) if has_spikes else (shown, norms + raw)
    folded = [panel for panel in lambdas if panel not in shown] + folded
    tables = [("Rewinds and stops, from the journal", events)] if events.rows else []
    return Section(id="training", title="Training", panels=shown, folded=folded, tables=tables)


def _lambda_panels(run: RunRecord) -> list[Panel]:
    """Return a panel of λ of each layer against steps, if the run has λ."""
    rows = [row for row in run.split("train") if row.get("lambda")]
    rows = [rows[i] for i in evenly_spaced(len(rows), MAX_POINTS_OF_MANY)]
    steps = [row["step"] for row in rows]
    values = zip(*(row["lambda"] for row in rows), strict=True)
    series = [{"name": f"layer {layer}", "x": steps, "y": of_layer} for layer, of_layer in enumerate(values, 1)]
    return [panel_over_steps(f"λ of each layer: {run.name}", series, "λ", note=_crossings_note(run))] if rows else []


def _gradient_panels(arms: Sequence[Arm], colours: Mapping[str, str]) -> list[Panel]:
    """Return a panel of the gradient norm against steps with the skipped updates, if it is known."""

    def norms(run: RunRecord, *, skipped: bool = False) -> tuple[list[int], list[float]]:
        rows = [row for row in run.split("train") if row.get("grad_norm") is not None]
        found = [row for row in rows if row.get("skipped") or not skipped]
        kept = thinned(np.array([row["grad_norm"] for row in found]), MAX_POINTS)
        return [found[i]["step"] for i in kept], [found[i]["grad_norm"] for i in kept]

    series = run_lines(arms, colours, norms)
    for line in run_lines(arms, colours, lambda run: norms(run, skipped=True)):
        end = ", update skipped"
        series.append({**line, "name": line["name"] + end, "group": line["group"] + end, "style": "points"})
    log_y = all(y > 0 for line in series for y in line["y"])
    return [panel_over_steps("Gradient norm", series, "gradient norm before clipping", log_y=log_y)] if series else []


def _raw_losses(arms: Sequence[Arm], colours: Mapping[str, str]) -> Panel:
    def losses(run: RunRecord) -> tuple[list[int], list[float]]:
        steps, losses = training_losses(run)
        kept = thinned(losses, MAX_POINTS)
        return [steps[i] for i in kept], losses[kept].tolist()

    series = run_lines(arms, colours, losses)
    return panel_over_steps("Training loss of each batch", series, METRIC_LABELS["loss"], log_y=True)


def run_lines(
    arms: Sequence[Arm], colours: Mapping[str, str], values: Callable[[RunRecord], tuple[list[int], list[float]]]
) -> list[dict[str, Any]]:
    """Return a line for each run that has values, given its x and y, in the colour of its arm."""
    return [
        {"name": run.name, "group": arm.name, "colour": colours[arm.name], "x": x, "y": y}
        for arm in arms
        for run in arm.runs
        for x, y in (values(run),)
        if x
    ]


def _events(runs: Sequence[RunRecord]) -> Table:
    """Return a table of the rewinds and stops in the journals."""
    rows = []
    for run in runs:
        for entry in run.journal:
            details = [f"{name} {value}" for name, value in entry.items() if name not in ("event", "step")]
            rows.append([run.name, format_value(entry["step"]), ", ".join([str(entry["event"]), *details])])
    return Table(["run", "step", "event"], rows)


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


def panel_over_steps(
    title: str, series: Sequence[Mapping[str, Any]], y_label: str, *, log_y: bool = False, note: str = ""
) -> Panel:
    """Return a panel of lines against training steps."""
    chart = {"kind": "line", "series": series, "x_label": "steps", "y_label": y_label, "log_y": log_y}
    return Panel(title=title, note=note, chart=chart)


def _series_values(x_label: str, series: Mapping[str, tuple[Any, Any]]) -> Table:
    """Return a table of the lines at up to `MAX_VALUE_ROWS` points of the first line, evenly spaced by index.

    `series` has the x and y of each line by name. The other lines show their y at the nearest x, and "–" where they are
    more than half an interval of theirs away: a run with slightly more FLOPs than another still has a value at each
    end.
    """
    if not series:
        return Table([x_label], [])
    first = np.array(next(iter(series.values()))[0], float)
    shown = first[evenly_spaced(len(first), MAX_VALUE_ROWS)]
    columns = [format_together(shown.tolist())]
    for xs, ys in series.values():
        xs, column = np.array(xs, float), []
        margin = np.ptp(xs) / max(len(xs) - 1, 1) / 2 if len(xs) else 0
        for x in shown:
            is_covered = len(xs) and xs.min() - margin <= x <= xs.max() + margin
            column.append(ys[int(np.argmin(np.abs(xs - x)))] if is_covered else None)
        columns.append(format_together(column))
    return Table([x_label, *series], [list(row) for row in zip(*columns, strict=True)])


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced indices from 0 to `count` - 1, including both ends."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, most)).round().astype(int))
