"""Figures of docs/results.md and docs/exploratory.md, made from the records that studies/results.py collects.

This module has no command: `python studies/results.py render` calls its functions. Each draws the records of one
study, and writes them to a path without suffix (`difftx.report.charts.save_figure`). Intervals are 95 % Student's t
intervals over seeds.
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.axes
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from difftx.configs import controls
from difftx.configs.transfer import ARCHITECTURES, MUP
from difftx.report.charts import COLOURS, add_legend, label_axes, save_figure
from studies.answer_tables import NOT_PLANNED, WARMUP_ROWS, warmup_contrasts
from studies.answer_tables import OPTIMIZERS as WARMUP_OPTIMIZERS
from studies.controls_study import LENGTHS
from studies.controls_tables import FAMILIES, SIGNIFICANT, contrast_values, tested
from studies.exploratory_tables import TASK_COLUMNS
from studies.optimizer_study import OPTIMIZERS, WARMUPS, Cell, cells
from studies.optimizer_tables import TITLES, runs_of
from studies.post_hoc_tables import log_worth_estimates, worth_interval
from studies.study_records import (
    BIMODAL_TASKS,
    CACHE_SIZE_PREFIX,
    REFERENCE,
    SOLVED_ACCURACY,
    SOLVED_NUMBER,
    TEST_LOSS,
    VALIDATION_LOSS,
    WHOLE_CACHE,
    Estimate,
    Record,
    cache_names,
    differences_within_runs,
    estimate,
    estimates_by_rate,
    numbers_by_seed,
)

MAIN_COLOURS = {"diff": COLOURS[0], REFERENCE: COLOURS[1]}  # Colours of the two arms that every study compares.
ARM_COLOURS = MAIN_COLOURS | {"diff_v2": COLOURS[2]}
# Arm → its colour and its label in the figure of README.md, which uses the names of docs/results.md.
WORTH_LINES = {
    "gdla": (COLOURS[2], "gdla"),
    "gated": (COLOURS[4], "gated"),
    "diff": (COLOURS[0], "diff (the paper's)"),
    "zero-norm": (COLOURS[3], "zero-norm (λ = 0)"),
}
WORTH_LIMITS = (0.76, 1.6)
LABEL_GAP = 0.062  # Smallest distance between labels of lines, as a share of the axis.
DIFFERENCE_LABEL = "difference in bits per byte of the test text"
ACCURACY_LIMITS = (-0.03, 1.03)  # Ends of the axis of an accuracy, with room for points at 0 and 1.


def _draw_line(
    axes: matplotlib.axes.Axes, x: Iterable[float], values: Iterable[Estimate], *, fmt: str = "o-", **style: Any
) -> None:
    """Draw means with their intervals as a line; single seeds have no interval."""
    means, half_widths = zip(*values, strict=True)
    axes.errorbar([*x], means, yerr=[half or 0 for half in half_widths], fmt=fmt, capsize=3, **style)


def draw_arms(records: Sequence[Record], path: Path) -> None:
    """Draw every arm's seeds on the tasks of a study, and means and intervals except for tasks in `BIMODAL_TASKS`."""
    tasks = [task for task in TASK_COLUMNS if any(r["task"] == task for r in records)]
    figure = matplotlib.figure.Figure(figsize=(10, 1.2 + 0.3 * len({r["arm"] for r in records})), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True):
        column = TASK_COLUMNS[task][0]
        arms = list(dict.fromkeys(r["arm"] for r in records if r["task"] == task))[::-1]
        for y, arm in enumerate(arms):
            values = list(numbers_by_seed(records, task, arm, column.number).values())
            colour = MAIN_COLOURS.get(arm, COLOURS[-1])
            if task in BIMODAL_TASKS:
                axes.plot(values, [y] * len(values), "o", color=colour, alpha=0.5)
                continue
            mean, half_width = estimate(values)
            axes.errorbar(mean, y, xerr=half_width, fmt="o", capsize=3, color=colour)
            axes.plot(values, [y] * len(values), "|", color=colour, alpha=0.6)
        axes.set_yticks(range(len(arms)), arms)
        if column.number.startswith("exact_match/"):
            axes.set_xlim(*ACCURACY_LIMITS)
        label_axes(axes, {"title": task, "x_label": column.title, "y_label": ""})
    save_figure(figure, path)


def draw_family(records: Sequence[Record], family: str, path: Path) -> None:
    """Draw a family's contrasts of the test loss. Those that are significant after correction are filled."""
    contrasts = FAMILIES[family][::-1]
    values_of_each = [contrast_values(records, contrast, TEST_LOSS) for contrast in contrasts]
    figure = matplotlib.figure.Figure(figsize=(10, 1.2 + 0.35 * len(contrasts)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=COLOURS[-1], linewidth=1)
    for y, (values, (_, p)) in enumerate(zip(values_of_each, tested(values_of_each), strict=True)):
        _draw_difference(axes, y, values, is_filled=p < SIGNIFICANT)
    axes.set_yticks(range(len(contrasts)), [contrast.title.replace("`", "") for contrast in contrasts])
    label_axes(axes, {"title": "", "x_label": DIFFERENCE_LABEL, "y_label": ""})
    save_figure(figure, path)


def _draw_difference(axes: matplotlib.axes.Axes, y: float, values: Sequence[float], *, is_filled: bool) -> None:
    """Draw a difference with its interval at the height `y`, and its value for each seed as a small line."""
    mean, half_width = estimate(values)
    fill = None if is_filled else "none"
    axes.errorbar(mean, y, xerr=half_width, fmt="o", capsize=3, color=COLOURS[0], markerfacecolor=fill)
    axes.plot(values, [y] * len(values), "|", color=COLOURS[0], alpha=0.6)


def draw_warmup_contrasts(records: Sequence[Record], path: Path) -> None:
    """Draw the table of question 2, with a panel per optimizer. Contrasts whose planned test decides are filled."""
    labels = [*WARMUP_ROWS][::-1]
    figure = matplotlib.figure.Figure(figsize=(10, 1.4 + 0.35 * len(labels)), layout="constrained")
    panels = figure.subplots(1, len(WARMUP_OPTIMIZERS), sharey=True, sharex=True)
    for axes, optimizer in zip(panels, WARMUP_OPTIMIZERS, strict=True):
        axes.axvline(0, color=COLOURS[-1], linewidth=1)
        for y, label in enumerate(labels):
            if found := warmup_contrasts(records, label).get(optimizer):
                _draw_difference(axes, y, found.values, is_filled=found.verdict not in ("open", NOT_PLANNED))
        axes.set_yticks(range(len(labels)), labels)
        axes.xaxis.set_major_locator(matplotlib.ticker.MultipleLocator(0.03))  # The labels have room.
        label_axes(axes, {"title": optimizer, "x_label": DIFFERENCE_LABEL, "y_label": ""})
    save_figure(figure, path)


def draw_solved(records: Sequence[Record], path: Path) -> None:
    """Draw the accuracy of each run on recall by arm, with a panel per number of distractors."""
    tasks = list(dict.fromkeys(r["task"] for r in records))
    arms = list(dict.fromkeys(r["arm"] for r in records))[::-1]
    figure = matplotlib.figure.Figure(figsize=(10, 1.2 + 0.3 * len(arms)), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True):
        for y, arm in enumerate(arms):
            values = [r["numbers"][SOLVED_NUMBER] for r in records if (r["task"], r["arm"]) == (task, arm)]
            axes.plot(values, [y] * len(values), "o", color=ARM_COLOURS.get(arm, COLOURS[-1]), alpha=0.5)
        axes.axvline(SOLVED_ACCURACY, color=COLOURS[-1], linewidth=1, linestyle="--")
        axes.set_yticks(range(len(arms)), arms)
        axes.set_xlim(*ACCURACY_LIMITS)
        title = f"{controls.DISTRACTORS[task]} distractors"
        label_axes(axes, {"title": title, "x_label": "accuracy, one key asked for", "y_label": ""})
    save_figure(figure, path)


def draw_worth(records: Sequence[Record], path: Path) -> None:
    """Draw how many of the Transformer's tokens an arm's tokens are worth, with a panel per size of question 4."""
    figure = matplotlib.figure.Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, len(LENGTHS), sharey=True, width_ratios=[len(of) for of in LENGTHS.values()])
    for axes, (task, lengths) in zip(panels, LENGTHS.items(), strict=True):
        axes.axhline(1, color=COLOURS[-1], linewidth=1.5)
        ends = {1.0: (COLOURS[-1], REFERENCE)}
        for index, (arm, (colour, label)) in enumerate(WORTH_LINES.items()):
            intervals = [worth_interval(of) for of in log_worth_estimates(records, task, arm)]
            worths, lows, highs = (np.array(of) for of in zip(*intervals, strict=True))
            # The arms are side by side, so that their intervals do not cover each other.
            x = np.array([*lengths]) * 1.03 ** (index - (len(WORTH_LINES) - 1) / 2)
            axes.errorbar(x, worths, yerr=[worths - lows, highs - worths], fmt="o-", capsize=3, color=colour)
            ends[worths[-1]] = (colour, label)
        parameters = max(r["parameters"] for r in records if r["task"] == task and r["arm"] == REFERENCE)
        title = f"{float(f'{parameters:.2g}'):,.0f} parameters"
        labels = {"title": title, "x_label": "tokens per parameter", "y_label": ""}
        label_axes(axes, labels | {"log_x": True, "log_y": True})
        axes.set_xticks([*lengths], [str(tokens) for tokens in lengths])
        axes.set_xlim(0.8 * min(lengths), 1.25 * max(lengths))
        axes.set_ylim(*WORTH_LIMITS)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        _label_ends(axes, ends)
    ticks = (0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5)
    panels[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[0].set_ylabel("worth of a model's tokens (Transformer = 1)")
    panels[0].text(0.03, 0.94, "↑ better than the Transformer", transform=panels[0].transAxes)
    panels[0].text(0.03, 0.04, "↓ worse", transform=panels[0].transAxes)
    save_figure(figure, path)


def _label_ends(axes: matplotlib.axes.Axes, ends: Mapping[float, tuple[str, str]]) -> None:
    """Write the labels of lines next to their last points: value → colour and label."""
    to_share = axes.transAxes.inverted()
    heights = {value: to_share.transform(axes.transData.transform((1, value)))[1] for value in sorted(ends)}
    positions = spread([*heights.values()], LABEL_GAP)
    for height, (colour, label) in zip(positions, (ends[value] for value in heights), strict=True):
        axes.text(1.02, height, label, color=colour, transform=axes.transAxes, va="center", fontsize="medium")


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Return rising heights moved by as little as possible, so that neighbours are at least `gap` apart."""
    groups: list[list[float]] = []  # Heights that touch each other, which are spread around their mean.
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _ends(groups[-1], gap)[0] - _ends(groups[-2], gap)[1] < gap:
            last = groups.pop()
            groups[-1] = groups[-1] + last
    return [_ends(group, gap)[0] + i * gap for group in groups for i in range(len(group))]


def _ends(group: Sequence[float], gap: float) -> tuple[float, float]:
    """Return the first and the last height of a group of neighbours, which are `gap` apart."""
    middle, half = sum(group) / len(group), (len(group) - 1) * gap / 2
    return middle - half, middle + half


def draw_caches(records: Sequence[Record], path: Path) -> None:
    """Draw what each cache adds to the loss, and the accuracy of recall, against its size, with a line for each arm.

    Points are means and intervals over seeds.
    """
    tasks = list(dict.fromkeys(r["task"] for r in records))
    panels = [(task, "loss_loss", "added loss, nats per token") for task in tasks]
    panels.append(("recall", "exact_match_accuracy", "share of right answers"))
    figure = matplotlib.figure.Figure(figsize=(15, 3.6), layout="constrained")
    for axes, (task, number, y_label) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        arms = list(dict.fromkeys(r["arm"] for r in records if r["task"] == task))
        for arm in arms:
            colour = COLOURS[0] if arm == "diff" else COLOURS[1]
            for kind, style in (("bits", "o-"), ("tokens", "s--")):
                sizes, values = [], []
                for name in cache_names(records, task):
                    if name == WHOLE_CACHE or name.endswith(kind):
                        # All seeds have caches of the same size.
                        sizes.append(next(iter(numbers_by_seed(records, task, arm, CACHE_SIZE_PREFIX + name).values())))
                        values.append(estimate(_cache_numbers(records, task, arm, number, name)))
                _draw_line(axes, sizes, values, fmt=style, color=colour, label=f"{arm}, fewer {kind}")
        title = task.replace("books-0.8m", "books, models of 0.8M parameters")
        labels = {"title": title, "x_label": "bytes of the cache per token", "y_label": y_label}
        label_axes(axes, labels | {"log_x": True})
        axes.set_xticks([2**power for power in range(7, 12) if axes.get_xlim()[0] < 2**power < axes.get_xlim()[1]])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        add_legend(axes)
    save_figure(figure, path)


def _cache_numbers(records: Sequence[Record], task: str, arm: str, number: str, cache: str) -> list[float]:
    """Return a number of each of an arm's runs with a cache; a loss is relative to that with the whole cache."""
    compressed = f"cache/{number}_{cache}"
    if number == "loss_loss":
        return differences_within_runs(records, task, arm, compressed, f"cache/{number}_{WHOLE_CACHE}")
    return list(numbers_by_seed(records, task, arm, compressed).values())


def draw_warmup(records: Sequence[Record], path: Path, *, default_steps: int, total_steps: int) -> None:
    """Draw the best loss of diff and the Transformer against the steps of warm-up.

    `default_steps` is the warm-up of runs that do not override it, and `total_steps` the length of each run.
    """
    figure = matplotlib.figure.Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    best: dict[int, float] = {}
    for arm, colour in MAIN_COLOURS.items():
        best = collections.defaultdict(lambda: math.inf)
        for r in records:
            if r["arm"] == arm and r["changes"].keys() <= {"optimizer.warmup_steps", "optimizer.learning_rate"}:
                steps = int(r["changes"].get("optimizer.warmup_steps", default_steps))
                best[steps] = min(best[steps], r["numbers"]["loss/bits_per_byte"])
        axes.plot(*zip(*sorted(best.items()), strict=True), "o-", color=colour, label=arm)
    labels = {"title": "books", "x_label": f"steps of warm-up, of {total_steps}", "y_label": "bits per byte"}
    label_axes(axes, labels | {"log_x": True})
    axes.set_xticks(sorted(best), [f"{steps:g}" for steps in sorted(best)])
    axes.minorticks_off()
    add_legend(axes)
    save_figure(figure, path)


def draw_optimizers(records: Sequence[Record], path: Path) -> None:
    """Draw the loss of each arm against the length of the warm-up, one panel per optimizer."""
    figure = matplotlib.figure.Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(OPTIMIZERS), sharey=True)
    percentages = [100 * warmup for warmup in WARMUPS]
    for axes, optimizer in zip(panels, OPTIMIZERS, strict=True):
        for arm in dict.fromkeys(cell.arm for cell in cells() if cell.optimizer == optimizer):
            values = [
                estimate([r["numbers"][VALIDATION_LOSS] for r in runs_of(records, Cell(arm, optimizer, warmup))])
                for warmup in WARMUPS
            ]
            _draw_line(axes, percentages, values, color=ARM_COLOURS[arm], label=arm)
        y_label = "bits per byte" if axes is panels[0] else ""
        labels = {"title": TITLES[optimizer], "x_label": "warm-up, % of the steps", "y_label": y_label}
        label_axes(axes, labels | {"log_x": True})
        axes.set_xticks(percentages, [f"{percentage:g}" for percentage in percentages])
        axes.minorticks_off()
        add_legend(axes)
    save_figure(figure, path)


def draw_transfer(records: Sequence[Record], path: Path) -> None:
    """Draw the loss of both sizes against the learning rate, one panel per architecture."""
    figure = matplotlib.figure.Figure(figsize=(10, 3.6), layout="constrained")
    # (task, end of the arm's name) → label.
    lines = {("0.1m", ""): "0.1M parameters", ("3m", ""): "3M, standard", ("3m", MUP): "3M, µP and CompleteP"}
    panels = figure.subplots(1, len(ARCHITECTURES))
    for axes, architecture in zip(panels, ARCHITECTURES, strict=True):
        for ((task, end), label), colour in zip(lines.items(), COLOURS, strict=False):
            values = estimates_by_rate(records, task, architecture + end, VALIDATION_LOSS)
            _draw_line(axes, values.keys(), values.values(), color=colour, label=label)
        labels = {"title": architecture, "x_label": "learning rate", "y_label": "bits per byte"}
        label_axes(axes, labels | {"log_x": True})
        add_legend(axes)
    save_figure(figure, path)
