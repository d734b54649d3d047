"""Parts of the report: figures of one or several runs with few points, and tables of values."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from difftx.evals.result import format_value
from difftx.model.attention import LARGEST_LOGITS
from difftx.report.arms import Arm
from difftx.report.charts import COLOURS, heatmap_values
from difftx.report.curves import METRIC_LABELS, loss_chart, thinned
from difftx.report.runs import X_AXES, Metric, RunRecord
from difftx.training import lambda_range
from difftx.training.goodput import SECTIONS as WALL_TIME_LABELS
from difftx.training.metrics import EVENTS

MAX_POINTS = 300  # Maximum points per line. More would enlarge the page, but would not be visible.
MAX_POINTS_OF_MANY = 100  # Maximum points per line in a figure with many lines, such as one per layer.
MAX_CROSSINGS = 10  # Maximum number of events in the note on layers whose λ left its useful range.
LAMBDA = "A differential layer attends with A1 − λ A2, so λ is how much of the second softmax it subtracts."
DIM = 0.02  # A heatmap row counts as empty up to this share of the largest value.


@dataclasses.dataclass(frozen=True)
class Cell:
    """A text in a table, with a unit, or with a verdict that is shown as a word and a colour.

    A cell may span several columns, to show a value of several runs once.
    """

    text: str
    verdict: Literal["better", "worse", "equal", "open", "no better than chance"] | None = None
    unit: str = ""
    span: int = 1


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts. The first column has the names of the rows."""

    header: list[str]
    rows: Sequence[Sequence[str | Cell]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure with a heading."""

    title: str
    chart: Mapping[str, Any]  # As described in difftx/report/charts.py.
    note: str = ""
    shown_for: str = ""  # Choices in the page's controls that show the panel, such as "against-steps axes-log".

    @property
    def is_informative(self) -> bool:
        """Whether the values of the chart differ.

        A heatmap must also have two non-empty rows, and a line chart lines with distinguishable colours.
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
    """A section of the page: numbers, figures and samples that answer one question, and folded parts."""

    id: str
    title: str
    explanation: str = ""
    basis: str = ""  # Steps of the results, and how much was measured.
    numbers: Table = dataclasses.field(default_factory=lambda: Table([], []))
    further: Table = dataclasses.field(default_factory=lambda: Table([], []))  # Numbers that are folded away.
    panels: Sequence[Panel] = ()
    folded: Sequence[Panel] = ()
    tables: Sequence[tuple[str, Table]] = ()  # Pairs of caption and table.
    samples: Mapping[str, Sequence[tuple[str, str]]] = dataclasses.field(default_factory=dict)  # Prompt → completions.


def loss_panels(arms: Sequence[Arm], colours: Mapping[str, str], metric: Metric) -> list[Panel]:
    """Return a panel of the losses against each of `X_AXES`, on linear and on logarithmic axes.

    The page's controls select one of them. The metric "bits_per_byte" is for runs with different tokenizers, because
    their training losses per token cannot be compared.
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
    """Return the section on training: λ, gradient norms, raw losses, and actions of the guards.

    Show each figure of λ where λ left its range, or else the first one. Fold the rest. Show gradient norms only if
    updates were skipped, or a run was rewound or stopped. If not, fold them too.
    """
    runs = [run for arm in arms for run in arm.runs]
    lambdas = [panel for run in runs for panel in _lambda_panels(run)]
    shown = [panel for panel in lambdas if panel.note] or lambdas[:1]
    norms, events = _gradient_panels(arms, colours) + _logit_panels(arms, colours), _events(runs)
    raw = []
    if metric == "loss":
        lines = _logged_lines(arms, colours, "loss")
        raw.append(panel_over_steps("Training loss of each batch", lines, METRIC_LABELS["loss"], log_y=True))
    has_spikes = any(row.get("skipped") for run in runs for row in run.split("train")) or events.rows
    shown, folded = (shown + norms, raw) if has_spikes else (shown, norms + raw)
    folded = [panel for panel in lambdas if panel not in shown] + folded
    tables = [("Rewinds and stops", events)] if events.rows else []
    return Section(
        id="training",
        title="Training",
        explanation=LAMBDA if lambdas else "",
        panels=shown,
        folded=folded,
        tables=tables,
    )


def _lambda_panels(run: RunRecord) -> list[Panel]:
    """Return a panel of each layer's λ against steps, if the run has λ."""
    rows = [row for row in run.split("train") if row.get("lambda")]
    if len(rows) > MAX_POINTS_OF_MANY:
        rows = [rows[i] for i in np.linspace(0, len(rows) - 1, MAX_POINTS_OF_MANY).round().astype(int)]
    steps = [row["step"] for row in rows]
    values = zip(*(row["lambda"] for row in rows), strict=True)
    series = [{"name": f"layer {layer}", "x": steps, "y": of_layer} for layer, of_layer in enumerate(values, 1)]
    return [panel_over_steps(f"λ of each layer: {run.name}", series, "λ", note=_crossings_note(run))] if rows else []


def _gradient_panels(arms: Sequence[Arm], colours: Mapping[str, str]) -> list[Panel]:
    """Return a panel of the gradient norm against steps, with skipped updates marked, if runs have logged the norm."""
    series = _logged_lines(arms, colours, "grad_norm")
    for line in _logged_lines(arms, colours, "grad_norm", only_skipped=True):
        end = ", update skipped"
        series.append({**line, "name": line["name"] + end, "group": line["group"] + end, "style": "points"})
    log_y = all(y > 0 for line in series for y in line["y"])
    return [panel_over_steps("Gradient norm", series, "gradient norm before clipping", log_y=log_y)] if series else []


def _logit_panels(arms: Sequence[Arm], colours: Mapping[str, str]) -> list[Panel]:
    """Return a panel of the largest attention logit over all layers and heads against steps, if a run has logged it."""

    def values(run: RunRecord) -> tuple[list[int], list[float]]:
        rows = [row for row in run.split("train") if row.get(LARGEST_LOGITS)]
        found = {row["step"]: float(np.max(np.asarray(row[LARGEST_LOGITS], float))) for row in rows}
        finite = {step: value for step, value in found.items() if np.isfinite(value)}
        return [*finite], [*finite.values()]

    series = run_lines(arms, colours, values)
    return [panel_over_steps("Largest attention logit", series, "largest logit of a step")] if series else []


def _logged_lines(
    arms: Sequence[Arm], colours: Mapping[str, str], column: str, *, only_skipped: bool = False
) -> list[dict[str, Any]]:
    """Return a line per run with the finite values of a logged column, thinned."""

    def values(run: RunRecord) -> tuple[list[int], list[float]]:
        rows = [row for row in run.split("train") if row.get("skipped") or not only_skipped]
        rows = [row for row in rows if row.get(column) is not None]
        kept = thinned(np.array([row[column] for row in rows]), MAX_POINTS)
        return [rows[i]["step"] for i in kept], [rows[i][column] for i in kept]

    return run_lines(arms, colours, values)


def run_lines(
    arms: Sequence[Arm], colours: Mapping[str, str], values: Callable[[RunRecord], tuple[list[int], list[float]]]
) -> list[dict[str, Any]]:
    """Return a line per run in the colour of its arm. `values` returns the x and y of a run."""
    return [
        {"name": run.name, "group": arm.name, "colour": colours[arm.name], "x": x, "y": y}
        for arm in arms
        for run in arm.runs
        for x, y in (values(run),)
        if x
    ]


def _events(runs: Sequence[RunRecord]) -> Table:
    """Return a table of the runs' rewinds and stops."""
    rows = []
    for run in runs:
        for row in run.rows:
            if row["split"] in EVENTS:
                details = [f"{name} {value}" for name, value in row.items() if name not in ("split", "step")]
                rows.append([run.name, format_value(row["step"]), ", ".join([row["split"], *details])])
    return Table(["run", "step", "event"], rows)


def wall_time(runs: Sequence[RunRecord]) -> Table:
    """Return the parts of each run's wall time in seconds, from its last row with the split "goodput"."""
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
