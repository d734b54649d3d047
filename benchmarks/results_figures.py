"""Figures of docs/results.md and docs/exploratory.md, made from the records that benchmarks/results.py collects.

Intervals are 95 % Student's t intervals over seeds.
"""

import collections
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.figure

from benchmarks.controls_study import LENGTHS
from benchmarks.controls_tables import FAMILIES, PAIRS, SIGNIFICANT, holm, of_size, p_value, values
from benchmarks.optimizer_study import OPTIMIZERS, WARMUPS, Cell, cells
from benchmarks.optimizer_tables import NUMBER, TITLES, runs_of
from benchmarks.results_tables import (
    BY_SEED,
    CACHE_SIZE,
    REFERENCE,
    SOLVED_FROM,
    SOLVED_NUMBER,
    TASK_COLUMNS,
    TEST_LOSS,
    WHOLE,
    Estimate,
    Record,
    by_rates,
    caches,
    estimate,
    of_seeds,
    paired_numbers,
)
from difftx.configs import controls
from difftx.configs.transfer import ARCHITECTURES, MUP
from difftx.report.charts import COLOURS, add_legend, label_axes, save_figure

ARM_COLOURS = {"diff": COLOURS[0], REFERENCE: COLOURS[1], "diff_v2": COLOURS[2]}


def draw_arms(records: Sequence[Record], path: Path) -> None:
    """Draw every arm's seeds on the tasks of a study, and means and intervals except for tasks in `BY_SEED`."""
    tasks = [task for task in TASK_COLUMNS if any(r["task"] == task for r in records)]
    figure = matplotlib.figure.Figure(figsize=(10, 1.2 + 0.3 * len({r["arm"] for r in records})), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True):
        columns = TASK_COLUMNS[task]
        arms = list(dict.fromkeys(r["arm"] for r in records if r["task"] == task))[::-1]
        for y, arm in enumerate(arms):
            values = list(of_seeds(records, task, arm, columns[0].number).values())
            colour = {"diff": COLOURS[0], REFERENCE: COLOURS[1]}.get(arm, COLOURS[-1])
            if task in BY_SEED:
                axes.plot(values, [y] * len(values), "o", color=colour, alpha=0.5)
                continue
            centre, half = estimate(values)
            axes.errorbar(centre, y, xerr=half, fmt="o", capsize=3, color=colour)
            axes.plot(values, [y] * len(values), "|", color=colour, alpha=0.6)
        axes.set_yticks(range(len(arms)), arms)
        if columns[0].number.startswith("exact_match/"):
            axes.set_xlim(-0.03, 1.03)  # An accuracy.
        label_axes(axes, {"title": task, "x_label": columns[0].title, "y_label": ""})
    save_figure(figure, path)


def draw_family(records: Sequence[Record], family: str, path: Path, *, purposes: bool = False) -> None:
    """Draw a family's contrasts of the test loss. Those that are significant after correction are filled.

    Labels are the contrasts' titles, or with `purposes` what they ask for.
    """
    contrasts = FAMILIES[family][::-1]
    found = [values(records, contrast, TEST_LOSS) for contrast in contrasts]
    corrected = holm([p_value(of) for of in found])
    figure = matplotlib.figure.Figure(figsize=(10, 1.2 + 0.35 * len(contrasts)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=COLOURS[-1], linewidth=1)
    for y, (of, p) in enumerate(zip(found, corrected, strict=True)):
        mean, half = estimate(of)
        filled = None if p < SIGNIFICANT else "none"
        axes.errorbar(mean, y, xerr=half, fmt="o", capsize=3, color=COLOURS[0], markerfacecolor=filled)
        axes.plot(of, [y] * len(of), "|", color=COLOURS[0], alpha=0.6)
    labels = [contrast.asks if purposes else contrast.title.replace("`", "") for contrast in contrasts]
    axes.set_yticks(range(len(contrasts)), labels)
    label_axes(axes, {"title": "", "x_label": "difference in bits per byte of the test text", "y_label": ""})
    save_figure(figure, path)


def draw_solved(records: Sequence[Record], path: Path) -> None:
    """Draw the accuracy of each run on recall by arm, with a panel per number of distractors."""
    tasks = list(dict.fromkeys(r["task"] for r in records))
    arms = list(dict.fromkeys(r["arm"] for r in records))[::-1]
    figure = matplotlib.figure.Figure(figsize=(10, 1.2 + 0.3 * len(arms)), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True):
        for y, arm in enumerate(arms):
            own = [r["numbers"][SOLVED_NUMBER] for r in records if (r["task"], r["arm"]) == (task, arm)]
            axes.plot(own, [y] * len(own), "o", color=ARM_COLOURS.get(arm, COLOURS[-1]), alpha=0.5)
        axes.axvline(SOLVED_FROM, color=COLOURS[-1], linewidth=1, linestyle="--")
        axes.set_yticks(range(len(arms)), arms)
        axes.set_xlim(-0.03, 1.03)
        title = f"{controls.DISTRACTORS[task]} distractors"
        label_axes(axes, {"title": title, "x_label": "accuracy, one key asked for", "y_label": ""})
    save_figure(figure, path)


def draw_sizes(records: Sequence[Record], path: Path) -> None:
    """Draw the differences of pairs of arms against the tokens per parameter, with a panel per size of question 4."""
    tasks = [task for task in LENGTHS if any(r["task"] == task for r in records)]
    figure = matplotlib.figure.Figure(figsize=(4 + 4 * len(tasks), 4), layout="constrained")
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        axes.axhline(0, color=COLOURS[-1], linewidth=1)
        for place, (arm, reference) in enumerate(PAIRS):
            if not (differences := of_size(records, task, arm, reference)):
                continue
            centres, halves = zip(*(estimate([*of.values()]) for of in differences.values()), strict=True)
            # Side by side, so that intervals are visible.
            x = [tokens * 1.05 ** (place - 2.5) for tokens in differences]
            axes.errorbar(
                x, centres, yerr=halves, fmt="o-", capsize=3, color=COLOURS[place], label=f"{arm} − {reference}"
            )
        parameters = max(r["parameters"] for r in records if r["task"] == task and r["arm"] == REFERENCE)
        labels = {"title": f"{parameters / 1e6:.2f}M parameters", "x_label": "tokens per parameter"}
        label_axes(axes, labels | {"y_label": "difference in bits per byte", "log_x": True})
        axes.set_xticks([*LENGTHS[task]], [str(tokens) for tokens in LENGTHS[task]])
        axes.minorticks_off()
    add_legend(panels[0])  # All pairs have runs of the smallest models.
    save_figure(figure, path)


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
                names = [name for name in caches(records, task) if name == WHOLE or name.endswith(kind)]
                sizes = [next(iter(of_seeds(records, task, arm, CACHE_SIZE + name).values())) for name in names]
                if number == "loss_loss":
                    whole = f"cache/{number}_{WHOLE}"
                    values = [paired_numbers(records, task, arm, f"cache/{number}_{name}", whole) for name in names]
                else:
                    values = [[*of_seeds(records, task, arm, f"cache/{number}_{name}").values()] for name in names]
                centres, halves = zip(*map(estimate, values), strict=True)
                label = f"{arm}, fewer {kind}"
                axes.errorbar(sizes, centres, yerr=halves, fmt=style, capsize=3, color=colour, label=label)
        title = task.replace("books-0.8m", "books, models of 0.8M parameters")
        labels = {"title": title, "x_label": "bytes of the cache per token", "y_label": y_label}
        label_axes(axes, labels | {"log_x": True})
        axes.set_xticks([2**power for power in range(7, 12) if axes.get_xlim()[0] < 2**power < axes.get_xlim()[1]])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        add_legend(axes)
    save_figure(figure, path)


def draw_warmup(records: Sequence[Record], own_steps: int, path: Path) -> None:
    """Draw the best loss of diff and the Transformer against the steps of warm-up.

    `own_steps` is the warm-up of runs that do not override it.
    """
    figure = matplotlib.figure.Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    for arm, colour in (("diff", COLOURS[0]), (REFERENCE, COLOURS[1])):
        best: dict[int, float] = collections.defaultdict(lambda: math.inf)
        for r in records:
            if r["arm"] == arm and r["changes"].keys() <= {"optimizer.warmup_steps", "optimizer.learning_rate"}:
                steps = int(r["changes"].get("optimizer.warmup_steps", own_steps))
                best[steps] = min(best[steps], r["numbers"]["loss/bits_per_byte"])
        axes.plot(*zip(*sorted(best.items()), strict=True), "o-", color=colour, label=arm)
    label_axes(
        axes, {"title": "books", "x_label": "steps of warm-up, of 500", "y_label": "bits per byte", "log_x": True}
    )
    axes.set_xticks(sorted(best), [f"{steps:g}" for steps in sorted(best)])
    axes.minorticks_off()
    add_legend(axes)
    save_figure(figure, path)


def draw_optimizers(records: Sequence[Record], path: Path) -> None:
    """Draw the loss of each arm against the length of the warm-up, one panel per optimizer."""
    figure = matplotlib.figure.Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(OPTIMIZERS), sharey=True)
    for axes, optimizer in zip(panels, OPTIMIZERS, strict=True):
        for arm in dict.fromkeys(cell.arm for cell in cells() if cell.optimizer == optimizer):
            found: list[Estimate] = [
                estimate([r["numbers"][NUMBER] for r in runs_of(records, Cell(arm, optimizer, warmup))])
                for warmup in WARMUPS
            ]
            axes.errorbar(
                [100 * warmup for warmup in WARMUPS],
                [value.mean for value in found],
                yerr=[value.half or 0 for value in found],
                fmt="o-",
                capsize=3,
                color=ARM_COLOURS[arm],
                label=arm,
            )
        label_axes(
            axes,
            {
                "title": TITLES[optimizer],
                "x_label": "warm-up, % of the steps",
                "y_label": "bits per byte" if axes is panels[0] else "",
                "log_x": True,
            },
        )
        axes.set_xticks([100 * warmup for warmup in WARMUPS], [f"{100 * warmup:g}" for warmup in WARMUPS])
        axes.minorticks_off()
        add_legend(axes)
    save_figure(figure, path)


def draw_transfer(records: Sequence[Record], path: Path) -> None:
    """Draw the loss of both sizes against the learning rate, one panel per architecture."""
    figure = matplotlib.figure.Figure(figsize=(10, 3.6), layout="constrained")
    lines = {("0.1m", ""): "0.1M parameters", ("3m", ""): "3M, standard", ("3m", MUP): "3M, µP and CompleteP"}
    panels = figure.subplots(1, len(ARCHITECTURES))
    for axes, architecture in zip(panels, ARCHITECTURES, strict=True):
        for ((task, end), label), colour in zip(lines.items(), COLOURS, strict=False):
            found = by_rates(records, task, architecture + end, NUMBER)
            axes.errorbar(
                found.keys(),
                [value.mean for value in found.values()],
                yerr=[value.half or 0 for value in found.values()],
                fmt="o-",
                capsize=3,
                color=colour,
                label=label,
            )
        label_axes(
            axes,
            {"title": architecture, "x_label": "learning rate", "y_label": "bits per byte", "log_x": True},
        )
        add_legend(axes)
    save_figure(figure, path)
