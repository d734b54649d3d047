"""Loss curves of several runs, as a figure and a table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.box
import rich.markup
import rich.table

from difftx.errors import UserError
from difftx.evals.result import format_together
from difftx.files import write_atomically
from difftx.report.arms import Arm, arms_of
from difftx.report.charts import colours_of, draw, save_figure
from difftx.report.runs import (
    X_AXES,
    Metric,
    RunRecord,
    XAxis,
    baselines_first,
    check_comparable,
    data_notes,
    match_runs,
)

METRIC_LABELS = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte"}
SMOOTHED_OVER = 21  # Maximum number of values that `smoothed` averages.
COLUMNS = ("architecture", "tokens", "loss", "perplexity", "bits_per_byte", "tokens_per_second", "seconds")


def write_curves(
    pattern: str, out: Path, metric: Metric = "loss", against: XAxis = "tokens"
) -> tuple[list[dict[str, Any]], list[Path], list[str]]:
    """Draw the loss of the runs that match a glob against one of `X_AXES`.

    Return the rows of a table, one per run, the files written, and notes on runs with different data.
    """
    runs = match_runs(pattern, "curves")
    check_comparable(runs, metric)
    if not any(run.evaluations(metric) for run in runs) and metric != "loss":
        raise UserError(f"--curves={pattern!r}: no run has a validation in {metric} yet")
    table = [{"run": run.name, **summary(run)} for run in runs]
    arms = arms_of(baselines_first(runs))
    chart = loss_chart(arms, colours_of([arm.name for arm in arms]), metric, against)
    files = save_figure(draw(chart, (9, 5.5)), out / "curves")
    write_atomically(out / "curves.json", json.dumps(table, indent=2) + "\n")
    return table, [*files, out / "curves.json"], data_notes(runs)


def format_table(rows: list[dict[str, Any]]) -> rich.table.Table:
    """Format the rows of `write_curves` as a table for a terminal."""
    table = rich.table.Table(title="last evaluation of each run", box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # Wrap long names, because the names of a sweep's runs differ at their ends.
    table.add_column("run", overflow="fold")
    for name in COLUMNS:
        title = name.replace("_", "\n")
        table.add_column(title, justify="left" if name == "architecture" else "right", no_wrap=True)
    columns = [[row["run"] for row in rows], *(format_together([row[name] for row in rows]) for name in COLUMNS)]
    for texts in zip(*columns, strict=True):
        table.add_row(*map(rich.markup.escape, texts))
    return table


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return centred moving averages of the finite values over `SMOOTHED_OVER` values. They have no lag.

    The window shrinks towards the first value, where losses fall steeply. Near the last value, it is cut off. A
    non-finite value gets the result of the previous finite one, or NaN if there is none.
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
    """Return the logged steps, and the training loss at each, with NaN for a non-finite loss."""
    rows = run.split("train")
    return [row["step"] for row in rows], np.array([row["loss"] for row in rows], float)


def summary(run: RunRecord) -> dict[str, Any]:
    """Return architecture, tokens, median speed and seconds of training, and the numbers of the last validation."""
    train = run.split("train")
    _, last = run.last_validation()
    speeds = sorted(row["tokens_per_second"] for row in train)
    return {
        "architecture": run.config.model.architecture,
        "tokens": train[-1]["tokens"],
        **{name: last.get(name) for name in ("loss", "perplexity", "bits_per_byte")},
        "tokens_per_second": speeds[len(speeds) // 2],  # The median ignores compilation and pauses.
        "seconds": run.progress([train[-1]["step"]])["seconds"][0],
    }


def loss_chart(
    arms: Sequence[Arm], colours: Mapping[str, str], metric: Metric, against: XAxis, most: int | None = None
) -> dict[str, Any]:
    """Return a chart with each run's validation losses and its smoothed training losses, in the colour of its arm.

    The legend shows each arm's mean of the last values. Only the metric "loss" has training losses. `most` limits the
    number of points per line of training losses.
    """
    series: list[dict[str, Any]] = []
    for arm in arms:
        last: list[float] = []
        of_arm: list[dict[str, Any]] = []
        for run in arm.runs:
            values = run.evaluations(metric)
            x, y = run.progress([*values])[against], [*values.values()]
            if metric == "loss":
                steps, losses = training_losses(run)
                kept, losses = thinned(losses, most or len(losses)), smoothed(losses)
                trained, losses = run.progress([steps[i] for i in kept])[against], losses[kept].tolist()
                name = f"{run.name}, training"
                of_arm.append({"name": name, "group": "", "x": trained, "y": losses, "style": "faint"})
                x, y = (x, y) if values else (trained[-1:], losses[-1:])
            last += y[-1:]
            of_arm.append({"name": run.name, "x": x, "y": y})
        legend = f"{arm.title}: {np.mean(last):.3f}" if len(last) == len(arm.runs) else arm.title
        series += [{"colour": colours[arm.name], "group": legend} | line for line in of_arm]
    return {
        "kind": "line",
        "title": "Loss of validation (points) and smoothed training (thin)" if metric == "loss" else "Validation",
        "x_label": X_AXES[against],
        "y_label": METRIC_LABELS[metric],
        "series": series,
        "y_limits": _later_limits(series),
    }


def _later_limits(series: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return y-axis limits that ignore the first losses of each line, which would flatten the rest of the chart.

    Training losses fall steeply in the first quarter of the line, validation losses in the first tenth.
    """
    skipped = (len(line["y"]) // (4 if line.get("style") == "faint" else 10) for line in series)
    later = np.concatenate([np.asarray(line["y"][n:], float) for line, n in zip(series, skipped, strict=True)])
    later = later[np.isfinite(later)]
    if not len(later) or not np.ptp(later):
        return None
    margin = 0.05 * np.ptp(later)
    return later.min() - margin, later.max() + margin


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return the ascending indices of at most `most` values: the smallest and the largest in each stretch of values."""
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), most // 2 - 1):
        finite = stretch[np.isfinite(values[stretch])]
        if len(finite):
            kept |= {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])}
    return np.array(sorted(kept))
