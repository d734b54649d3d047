"""Records of runs, as benchmarks/results.py collects them, to the tables, values and figures of docs/results.md.

Intervals are Student's, 95 %, over seeds.
"""

import collections
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.figure
import scipy.stats

from difftx.errors import UserError
from difftx.report.charts import COLOURS, add_legend, label_axes, save_figure

CONFIDENCE = 0.95

type Record = dict[str, Any]


class Estimate(NamedTuple):
    """A mean over seeds, and half of its interval's width; None for one seed."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        decimals = 3 if abs(self.mean) < 10 else max(0, 3 - int(math.log10(abs(self.mean))))
        return f"{self.mean:.{decimals}f}" + ("" if self.half is None else f" ± {self.half:.{decimals}f}")


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and interval of a sample."""
    count = len(values)
    if count < 2:
        return Estimate(values[0], None)
    width = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
    return Estimate(statistics.fmean(values), float(width * statistics.stdev(values) / math.sqrt(count)))


class Column(NamedTuple):
    """A column of a table of arms."""

    title: str
    number: str
    minus_reference: bool = False  # Of each seed what it has more than the Transformer's.


REFERENCE = "transformer"
TASK_COLUMNS = {
    "books": (
        Column("bits per byte", "loss/bits_per_byte"),
        Column("more than transformer", "loss/bits_per_byte", minus_reference=True),
        Column("AR-Hit, nats", "recall/ar_hit_loss"),
        Column("Others, nats", "recall/others_loss"),
    ),
    "recall": (
        Column("accuracy, one key asked for", "exact_match/retrieval"),
        Column("more than transformer", "exact_match/retrieval", minus_reference=True),
        Column("accuracy, all keys", "exact_match/mqar"),
        Column("loss, nats", "loss/loss"),
    ),
}
INSIDE_COLUMNS = {
    "books": (
        Column("largest logit", "outliers/logits_top_1"),
        Column("median logit", "outliers/logits_median"),
        Column("largest hidden state", "outliers/hidden_top_1"),
        Column("median", "outliers/hidden_median"),
        Column("λ, layer 1", "lambda/1"),
        Column("λ, layer 2", "lambda/2"),
    ),
    "recall": (
        Column("attention to the answer", "attention/answer"),
        Column("to other pairs", "attention/others"),
        Column("to distractors", "attention/noise"),
        Column("Gini", "attention/gini"),
        Column("λ, layer 1", "lambda/1"),
        Column("λ, layer 2", "lambda/2"),
    ),
}
# What `compare` compares.
COMPARED = {
    task: [column.number for column in columns if not column.minus_reference] for task, columns in TASK_COLUMNS.items()
}


def render(collected: Mapping[str, Sequence[Record]], template: str) -> str:
    """Return the page: the template with a table or a value in place of each `{{…}}`.

    Raises:
        UserError: a place that nothing fills.
    """

    def fill(found: re.Match[str]) -> str:
        kind, *arguments = found[1].split()
        if kind not in PLACES:
            raise UserError(f"{{{{{found[1]}}}}}: no such place; known: {', '.join(PLACES)}")
        studies, *rest = arguments
        if missing := set(studies.split("+")) - collected.keys():
            known = ", ".join(collected)
            raise UserError(f"{{{{{found[1]}}}}}: no such study as {', '.join(missing)}; docs/results.json has {known}")
        return PLACES[kind]([record for study in studies.split("+") for record in collected[study]], *rest)

    return re.sub(r"\{\{(.+?)\}\}", fill, template)


def of_seeds(records: Iterable[Record], task: str, arm: str, number: str) -> dict[int, float]:
    """Return seed → a number."""
    return {
        r["seed"]: r["numbers"][number]
        for r in records
        if (r["task"], r["arm"]) == (task, arm) and number in r["numbers"]
    }


def difference(records: Sequence[Record], task: str, arm: str, number: str, reference: str = REFERENCE) -> str:
    """Return what an arm has more than another, by pairs of one seed, hence one data order."""
    own, other = (of_seeds(records, task, name, number) for name in (arm, reference))
    found = estimate([own[seed] - other[seed] for seed in own.keys() & other.keys()])
    return f"{'+' if found.mean > 0 else ''}{found}"


def arms_table(records: Sequence[Record], task: str, columns: Sequence[Column], *, first: bool) -> str:
    """Return a row for each arm: means over seeds; in the first table of the runs also what they were."""
    records = [r for r in records if r["task"] == task]
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        run = next(r for r in records if r["arm"] == arm)
        cells = [f"{run['parameters']:,}", f"{run['learning_rate']:g}"] * first
        for _, number, minus_reference in columns:
            if not of_seeds(records, task, arm, number) or (minus_reference and arm == REFERENCE):
                cells.append("")
            elif minus_reference:
                cells.append(difference(records, task, arm, number))
            else:
                cells.append(str(estimate(list(of_seeds(records, task, arm, number).values()))))
        rows.append([arm, *cells])
    table = markdown(["arm", *["parameters", "rate"] * first, *(c.title for c in columns)], rows)
    return table + provenance(records) * first


def rates_table(records: Sequence[Record], task: str, number: str) -> str:
    """Return a row for each arm and change, a column for each learning rate, a row's best in bold."""
    best = max if number.startswith("exact_match/") else min
    rows: dict[str, dict[float, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    chosen = [r for r in records if r["task"] == task]
    for r in chosen:
        changes = [
            f"{name.removeprefix('model.')}={value}"
            for name, value in r["changes"].items()
            if name != "optimizer.learning_rate"
        ]
        rows[", ".join([r["arm"], *changes])][r["learning_rate"]].append(r["numbers"][number])
    rates = sorted({r["learning_rate"] for r in chosen})
    cells = []
    for name, found in rows.items():
        means = {rate: estimate(values) for rate, values in found.items()}
        top = best(means.values(), key=lambda e: e.mean)
        cells.append([name, *(_bold(means[rate], top) if rate in means else "" for rate in rates)])
    return markdown(["", *(f"{rate:g}" for rate in rates)], cells) + provenance(chosen)


def growth_table(records: Sequence[Record], task: str, number: str, *arms: str) -> str:
    """Return a row for each size and length of training: the Transformer's number, and what other arms have more.

    Sizes of a task have names that begin with it, such as books-0.8m. Each arm is at the learning rate that was best
    for it there, by the lowest seed.
    """
    records = [r for r in records if r["arm"] in (REFERENCE, *arms) and r["task"].startswith(task)]
    rows = []
    for name, tokens in dict.fromkeys((r["task"], r["tokens"]) for r in records):
        here = [r for r in records if (r["task"], r["tokens"]) == (name, tokens)]
        rates = {arm: _best_rate([r for r in here if r["arm"] == arm], number) for arm in (REFERENCE, *arms)}
        best = [r for r in here if r["learning_rate"] == rates[r["arm"]]]
        reference = of_seeds(best, name, REFERENCE, number)
        size = next(r["parameters"] for r in best if r["arm"] == REFERENCE)
        cells = [
            f"{difference(best, name, arm, number)} ({rates[arm]:g})" if rates[arm] is not None else "" for arm in arms
        ]
        top = f"{estimate(list(reference.values()))} ({rates[REFERENCE]:g})"
        rows.append((size, tokens, [f"{size:,}", f"{tokens:,}", top, *cells]))
    rows.sort(key=lambda row: row[:2])
    header = ["parameters", "tokens", REFERENCE, *(f"{arm}, more" for arm in arms)]
    return markdown(header, [cells for _, _, cells in rows]) + provenance(records)


def _best_rate(records: Sequence[Record], number: str) -> float | None:
    lowest = min((r["seed"] for r in records), default=None)
    tried = {r["learning_rate"]: r["numbers"][number] for r in records if r["seed"] == lowest}
    return min(tried, key=tried.__getitem__) if tried else None


def _bold(value: Estimate, top: Estimate) -> str:
    return f"**{value}**" if value == top else str(value)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(records: Sequence[Record]) -> str:
    """Return the line below a table: how much was run, where, from which commit."""
    seeds = sorted({r["seed"] for r in records})
    commits = dict.fromkeys(r["commit"][:7] for r in records)
    hardware = dict.fromkeys(r["hardware"] for r in records)
    minutes = sum(r["wall_seconds"] for r in records) / 60
    tokens = dict.fromkeys(f"{r['tokens']:,}" for r in records)
    sweeps = "\n".join(f"    {sweep}" for sweep in dict.fromkeys(r["sweep"] for r in records))
    return (
        f"\n\n{sweeps}\n\n{len(records)} runs of {' or '.join(tokens)} tokens, {'seeds' if len(seeds) > 1 else 'seed'} "
        f"{', '.join(map(str, seeds))}; {minutes:.0f} minutes of {' and '.join(hardware)} in all; "
        f"commit {', '.join(commits)}; jax {', '.join(dict.fromkeys(r['jax'] for r in records))}."
    )


def mean(records: Sequence[Record], task: str, arm: str, number: str) -> str:
    """Return an arm's mean over seeds."""
    return str(estimate(list(of_seeds(records, task, arm, number).values())))


# First word of a place in the template → what fills it, of a study's records and the other words.
PLACES: dict[str, Callable[..., str]] = {
    "arms": lambda records, task: arms_table(records, task, TASK_COLUMNS[task], first=True),
    "inside": lambda records, task: arms_table(records, task, INSIDE_COLUMNS[task], first=False),
    "rates": rates_table,
    "growth": growth_table,
    "mean": mean,
    "difference": difference,
}


def draw(records: Sequence[Record], folder: Path) -> None:
    """Draw the headline: every arm's mean and interval on both tasks, and its seeds."""
    figure = matplotlib.figure.Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (task, columns) in zip(
        figure.subplots(1, len(TASK_COLUMNS), sharey=True), TASK_COLUMNS.items(), strict=True
    ):
        arms = list(dict.fromkeys(r["arm"] for r in records if r["task"] == task))[::-1]
        for y, arm in enumerate(arms):
            values = list(of_seeds(records, task, arm, columns[0].number).values())
            centre, half = estimate(values)
            colour = {"diff": COLOURS[0], REFERENCE: COLOURS[1]}.get(arm, COLOURS[-1])
            axes.errorbar(centre, y, xerr=half, fmt="o", capsize=3, color=colour)
            axes.plot(values, [y] * len(values), "|", color=colour, alpha=0.6)
        axes.set_yticks(range(len(arms)), arms)
        if columns[0].number.startswith("exact_match/"):
            axes.set_xlim(-0.03, 1.03)  # A share; wide intervals are cut off.
        label_axes(axes, {"title": task, "x_label": columns[0].title, "y_label": ""})
    save_figure(figure, folder / "results")


def draw_warmup(records: Sequence[Record], own_steps: int, folder: Path) -> None:
    """Draw the best loss of both models against the warm-up; `own_steps` is that of runs that were told none."""
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
    add_legend(axes)
    save_figure(figure, folder / "results_warmup")
