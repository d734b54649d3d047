"""Loss curves of several runs, as a figure and a table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import rich.box
import rich.markup
import rich.table

from difftx.errors import UserError
from difftx.files import write_atomically
from difftx.report.charts import add_legend, axis_number, label_axes, save_figure, series_colours
from difftx.report.runs import X_AXES, Metric, RunRecord, XAxis, check_comparable, data_notes, match_runs

METRIC_LABELS = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte"}
SMOOTHED_OVER = 21  # Values in the window of `smoothed`.
COLUMNS = ("architecture", "tokens", "loss", "perplexity", "bits_per_byte", "tokens_per_second", "seconds")


def write_curves(
    pattern: str, out: Path, metric: Metric = "loss", against: XAxis = "tokens"
) -> tuple[list[dict[str, Any]], list[Path], list[str]]:
    """Draw the loss of the runs that match a glob against one of `X_AXES`.

    Return a table's rows, one per run, the files written, and notes on runs with different data.
    """
    runs = match_runs(pattern, "curves")
    check_comparable(runs, metric)
    if not any(run.evaluations(metric) for run in runs) and metric != "loss":
        raise UserError(f"--curves={pattern!r}: no run has a validation in {metric} yet")
    table = [{"run": run.name, **summary(run)} for run in runs]
    files = save_figure(_draw(runs, metric, against), out / "curves")
    write_atomically(out / "curves.json", json.dumps(table, indent=2) + "\n")
    return table, [*files, out / "curves.json"], data_notes(runs)


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


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the means of the finite values in a centred window of `SMOOTHED_OVER`, which have no lag.

    The window shrinks towards the first value, where losses fall steeply. Near the last value, it has fewer values
    after its centre. At a non-finite value, the result is that of the previous finite value, or NaN if there is none.
    """
    finite = np.flatnonzero(np.isfinite(values))
    indices = np.arange(len(finite))
    half = np.minimum(SMOOTHED_OVER // 2, indices)
    start, stop = indices - half, np.minimum(indices + half + 1, len(finite))
    sums = np.append(0.0, np.cumsum(np.asarray(values, float)[finite]))
    means = (sums[stop] - sums[start]) / (stop - start)
    before = np.searchsorted(finite, np.arange(len(values)), side="right")
    return np.append(np.nan, means)[before]


def training_losses(run: RunRecord) -> tuple[list[int], np.ndarray]:
    """Return the logged steps, and the training loss at each of them, with NaN for a non-finite loss."""
    rows = run.split("train")
    return [row["step"] for row in rows], np.array([row["loss"] for row in rows], float)


def summary(run: RunRecord) -> dict[str, Any]:
    """Return architecture, tokens, median speed and seconds of training, and the numbers of the last validation."""
    train = run.split("train")
    last = next(reversed(run.validations()), {})
    speeds = sorted(row["tokens_per_second"] for row in train)
    return {
        "architecture": run.config.model.architecture,
        "tokens": train[-1]["tokens"],
        **{name: last.get(name) for name in ("loss", "perplexity", "bits_per_byte")},
        "tokens_per_second": speeds[len(speeds) // 2],  # The median excludes compilation and pauses.
        "seconds": run.progress([train[-1]["step"]])["seconds"][0],
    }


def _draw(runs: Sequence[RunRecord], metric: Metric, against: XAxis) -> matplotlib.figure.Figure:
    """Draw each run's validations, with the last value in the legend, and its smoothed training loss.

    Only the metric "loss" has training losses.
    """
    figure = matplotlib.figure.Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for run, colour in zip(runs, series_colours(len(runs)), strict=True):
        valid = run.evaluations(metric)
        x, y = run.progress([row["step"] for row in valid])[against], [row[metric] for row in valid]
        if metric == "loss":
            steps, losses = training_losses(run)
            trained, losses = run.progress(steps)[against], smoothed(losses)
            axes.plot(trained, losses, color=colour, linewidth=1, alpha=0.5)
            x, y = (x, y) if valid else (trained[-1:], losses[-1:].tolist())
        label = f"{run.name}: {y[-1]:.3f}" if y else run.name
        axes.plot(x, y, "o-", color=colour, markersize=4, linewidth=2, label=label)
    title = "validation (points) and smoothed training loss (thin)" if metric == "loss" else "validation"
    label_axes(axes, {"title": title, "x_label": X_AXES[against], "y_label": METRIC_LABELS[metric]})
    axes.spines[["top", "right"]].set_visible(False)
    written = axis_number(max(axes.get_xlim()))
    axes.xaxis.set_major_formatter(lambda x, _: written(x))
    # Cut the y-axis above the first tenth of each line, whose losses would leave little room for the others.
    lines = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    later = np.concatenate([line[len(line) // 10 :] for line in lines])
    later = later[np.isfinite(later)]
    if len(later) and np.ptp(later):
        margin = 0.05 * np.ptp(later)
        axes.set_ylim(later.min() - margin, later.max() + margin)
    add_legend(axes)
    return figure


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
