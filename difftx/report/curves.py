"""Loss curves of several runs, as a figure and a table."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np
import rich.box
import rich.markup
import rich.table

from difftx.errors import UserError
from difftx.files import write_atomically
from difftx.report.charts import add_legend, label_axes, save_figure, series_colours
from difftx.report.runs import X_AXES, Metric, RunRecord, check_comparable, match_runs

METRIC_LABELS = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte"}
COLUMNS = ("architecture", "tokens", "loss", "perplexity", "bits_per_byte", "tokens_per_second", "seconds")


def write_curves(pattern: str, out: Path, metric: Metric = "loss") -> tuple[list[dict[str, Any]], list[Path]]:
    """Draw the loss curves of the runs that match a glob. Return a table's rows, one per run, and the files written."""
    runs = match_runs(pattern, "curves")
    check_comparable(runs, metric)
    if not any(run.evaluations(metric) for run in runs) and metric != "loss":
        raise UserError(f"--curves={pattern!r}: no run has a validation in {metric} yet")
    table = [{"run": run.name, **_summary(run)} for run in runs]
    files = save_figure(_draw(runs, metric), out / "curves")
    write_atomically(out / "curves.json", json.dumps(table, indent=2) + "\n")
    return table, [*files, out / "curves.json"]


def format_table(rows: list[dict[str, Any]]) -> rich.table.Table:
    """Return the rows of `write_curves` as a table for a terminal."""
    table = rich.table.Table(title="last evaluation of each run", box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # Long names are wrapped, not truncated, because names of a sweep's runs differ at their ends.
    table.add_column("run", overflow="fold")
    for name in COLUMNS:
        title = name.replace("_", "\n")
        table.add_column(title, justify="left" if name == "architecture" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(rich.markup.escape(_shown(row[name])) for name in ("run", *COLUMNS)))
    return table


def smoothed(values: Iterable[float], half_life: float = 10.0) -> list[float]:
    """Return the exponential moving average of the finite values, with bias correction and a half-life in values."""
    keep = 0.5 ** (1 / half_life)
    total = weight = 0.0
    averages = []
    for value in values:
        if np.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
        averages.append(total / weight if weight else float("nan"))
    return averages


def validation_metric(runs: Sequence[RunRecord]) -> Metric:
    """Return the metric of validation curves: bits per byte, which is independent of the tokenizer, if a run has it."""
    return "bits_per_byte" if any(run.evaluations("bits_per_byte") for run in runs) else "loss"


def training_losses(run: RunRecord) -> tuple[list[int], np.ndarray]:
    """Return the logged steps, and the training loss at each of them, with NaN for a non-finite loss."""
    rows = run.split("train")
    return [row["step"] for row in rows], np.array([row["loss"] for row in rows], float)


def _summary(run: RunRecord) -> dict[str, Any]:
    train = run.split("train")
    last = next((row for row in reversed(run.split("valid")) if row.get("suite") == "loss"), {})
    speeds = sorted(row["tokens_per_second"] for row in train)
    return {
        "architecture": run.config.model.architecture,
        "tokens": train[-1]["tokens"],
        **{name: last.get(name) for name in ("loss", "perplexity", "bits_per_byte")},
        "tokens_per_second": speeds[len(speeds) // 2],  # The median excludes compilation and pauses.
        "seconds": run.progress([train[-1]["step"]])["seconds"][0],
    }


def _draw(runs: Sequence[RunRecord], metric: Metric) -> matplotlib.figure.Figure:
    """Draw validations and, for the metric "loss", training losses. The four columns of subplots are the `X_AXES`."""
    rows = 2 if metric == "loss" else 1
    figure = matplotlib.figure.Figure(figsize=(16, 4 * rows), layout="constrained")
    grid = figure.subplots(rows, len(X_AXES), sharey="row", squeeze=False)
    shown = validation_metric(runs)
    for run, colour in zip(runs, series_colours(len(runs)), strict=True):
        for axes, quantity in zip(grid[0], X_AXES, strict=True):
            valid = run.evaluations(shown)
            x = run.progress([row["step"] for row in valid])[quantity]
            axes.plot(x, [row[shown] for row in valid], "o-", color=colour, label=run.name)
        if metric == "loss":
            steps, losses = training_losses(run)
            for axes, x in zip(grid[1], run.progress(steps).values(), strict=True):
                axes.plot(x, losses, color=colour, alpha=0.25, linewidth=0.8)
                axes.plot(x, smoothed(losses), color=colour, label=run.name)
    for axes_of_row, title, y in zip(grid, ("validation", "training, raw and smoothed"), (shown, "loss"), strict=False):
        for axes, label in zip(axes_of_row, X_AXES.values(), strict=True):
            label_axes(axes, {"title": title, "x_label": label, "y_label": METRIC_LABELS[y]})
    add_legend(grid[0][0])
    return figure


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
