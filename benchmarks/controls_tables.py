"""Tables and values of docs/results.md on the preregistered questions (benchmarks/controls_study.py).

A contrast is a sum of cells with signs, such as `diff` − `zero-norm`. Its value is the mean over seeds of this sum of
paired numbers. The contrasts of a question are a family, whose p-values Holm's method corrects.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import scipy.stats

from benchmarks.controls_study import GAIN, RATE
from benchmarks.results_tables import TEST_LOSS, Record, estimate, is_solved, markdown, provenance, signed
from difftx.configs import controls

SOLVED_AT = "exact_match/solved_at_step"
SIGNIFICANT = 0.05  # Largest corrected p-value at which the page says that an arm is better.


class Contrast(NamedTuple):
    """A contrast: what it asks for, the cells with sign plus, and those with sign minus."""

    asks: str
    plus: Sequence[str]
    minus: Sequence[str]

    @property
    def title(self) -> str:
        if len(self.plus) == 1:
            return f"`{self.plus[0]}` − `{self.minus[0]}`"
        return " ".join(
            f"{sign} `{name}`" for sign, names in (("+", self.plus), ("−", self.minus)) for name in names
        ).removeprefix("+ ")


def _versus(one: str, other: str, asks: str) -> Contrast:
    return Contrast(asks, (one,), (other,))


NORM_OR_GAIN = (
    _versus("diff", "zero-norm", "the subtraction, with the norm"),
    _versus("diff-gain", "zero-gain", "the subtraction, with a gain"),
    _versus("diff", "diff-gain", "the norm in place of a gain, with the subtraction"),
    _versus("zero-norm", "zero-gain", "the norm in place of a gain, without the subtraction"),
    _versus("diff-gain", "diff-plain", "the gain, with the subtraction"),
    _versus("diff", "transformer", "all of it"),
    _versus("diff", "transformer-gain", "all of it, against the stronger baseline"),
)
MUON, SHORT_WARMUP = "optimizer.name=muon", "optimizer.warmup_fraction=0.01"


def _warmup_contrasts() -> Sequence[Contrast]:
    found = []
    for name, changes in (("AdamW", []), ("Muon", [MUON])):
        long, short = (
            {arm: ", ".join([arm, *changes, *warmup]) for arm in ("transformer", "diff")}
            for warmup in ([], [SHORT_WARMUP])
        )
        found += [_versus(short[arm], long[arm], f"{arm}'s need for a long warm-up, {name}") for arm in short]
        found.append(
            Contrast(
                f"whether diff needs it more, {name}",
                (short["diff"], long["transformer"]),
                (long["diff"], short["transformer"]),
            )
        )
        found.append(_versus(long["diff"], long["transformer"], f"all of it, {name}"))
    return found


# Name of a family → its contrasts. The families of questions without runs are here too, because the analysis was
# committed before the runs.
FAMILIES: Mapping[str, Sequence[Contrast]] = {
    "norm-or-gain": NORM_OR_GAIN,
    "again": tuple(contrast for contrast in NORM_OR_GAIN if "diff-plain" not in contrast.minus),
    "main": (
        _versus("diff", "zero-norm", "the subtraction, with the norm"),
        _versus("diff", "transformer", "all of it"),
        _versus("diff", "transformer-gain", "all of it, against the stronger baseline"),
    ),
    "lambda": (
        _versus("diff, lambda_bound=sigmoid", "diff", "λ between 0 and 1"),
        _versus("diff, lambda_bound=tanh", "diff", "λ between -1 and 1"),
        _versus("diff, optimizer.lambda_learning_rate_factor=0.1", "diff", "a slower λ"),
        _versus("diff, optimizer.lambda_weight_decay=0.1", "diff", "a decayed λ"),
    ),
    "warmup": _warmup_contrasts(),
}


def cell_of(record: Record) -> str:
    """Return the name of a record's cell: the arm, and the changes that are not tuned."""
    tuned = {RATE} | ({GAIN} if record["arm"].endswith("-gain") else set())
    changes = (
        f"{name.removeprefix('model.')}={x}" for name, x in sorted(record["changes"].items()) if name not in tuned
    )
    return ", ".join([record["arm"], *changes])


def by_seed(records: Sequence[Record], cell: str, number: str) -> dict[int, float]:
    """Return seed → a number of a cell's runs."""
    found = {r["seed"]: r["numbers"][number] for r in records if cell_of(r) == cell}
    return {seed: found[seed] for seed in sorted(found)}


def values(records: Sequence[Record], contrast: Contrast, number: str) -> list[float]:
    """Return a contrast for each seed, in the order of the seeds."""
    signs = [*((1, cell) for cell in contrast.plus), *((-1, cell) for cell in contrast.minus)]
    found = [(sign, by_seed(records, cell, number)) for sign, cell in signs]
    if len({tuple(of) for _, of in found}) != 1:
        raise AssertionError(f"{contrast.title}: the cells have runs of different seeds")
    return [sum(sign * of[seed] for sign, of in found) for seed in found[0][1]]


def p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's t test that the mean of differences is zero."""
    if not any(differences):  # Two names of one cell, such as an arm whose best gain is 1.
        return 1.0
    return float(scipy.stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of a family after Holm's correction, in the same order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    raised = ((len(order) - rank) * p_values[i] for rank, i in enumerate(order))
    corrected = dict(zip(order, itertools.accumulate(raised, max), strict=True))
    return [min(1.0, corrected[i]) for i in range(len(p_values))]


def verdict(mean: float, corrected: float, contrast: Contrast) -> str:
    """Return the page's verdict on a contrast of losses."""
    if corrected >= SIGNIFICANT:
        return "open"
    if len(contrast.plus) > 1:
        return "larger" if mean > 0 else "smaller"
    return "worse" if mean > 0 else "better"


def family_table(records: Sequence[Record], family: str, number: str = TEST_LOSS) -> str:
    """Return a table of a family's contrasts in bits per byte, of the test text unless `number` is another loss."""
    contrasts = FAMILIES[family]
    found = [values(records, contrast, number) for contrast in contrasts]
    rows = []
    for contrast, of, p in zip(contrasts, found, holm([p_value(of) for of in found]), strict=True):
        mean = estimate(of)
        rows.append([contrast.title, contrast.asks, signed(mean), f"{p:.3f}", verdict(mean.mean, p, contrast)])
    return markdown(["contrast", "asks for", "bits per byte", "p, corrected", "the first is"], rows)


def contrast_value(records: Sequence[Record], one: str, other: str, number: str = TEST_LOSS) -> str:
    """Return the difference of two cells with its interval. Their names have no spaces after commas."""
    contrast = _versus(one.replace(",", ", "), other.replace(",", ", "), "")
    return signed(estimate(values(records, contrast, number)))


def cells_table(records: Sequence[Record], number: str = TEST_LOSS) -> str:
    """Return a table of cells: tuned rate and gain, and the loss in bits per byte."""
    rows = []
    for cell in dict.fromkeys(map(cell_of, records)):
        run = next(r for r in records if cell_of(r) == cell)
        of_recipe = controls.TUNED.get(run["task"], {}).get(run["arm"], {})
        gain = run["changes"].get(GAIN) or (f"{of_recipe[GAIN]:g}" if GAIN in of_recipe else "")
        losses = by_seed(records, cell, number).values()
        rows.append([cell, f"{run['parameters']:,}", f"{run['learning_rate']:g}", gain, str(estimate(list(losses)))])
    return markdown(["arm", "parameters", "rate", "gain", "bits per byte"], rows) + provenance(records)


# ── Recall: solved runs ──


def outcomes(records: Sequence[Record], cell: str) -> list[bool]:
    """Return for each run of a cell whether it has solved the task."""
    return [is_solved(r) for r in records if cell_of(r) == cell]


def solved_count(records: Sequence[Record], task: str, cell: str) -> str:
    """Return the number of a cell's runs that have solved the task, such as "2 of 6"."""
    own = outcomes([r for r in records if r["task"] == task], cell)
    return f"{sum(own)} of {len(own)}"


def fisher(records: Sequence[Record], contrast: Contrast) -> float:
    """Return the p-value of Fisher's exact test on the solved runs of a contrast's two cells."""
    table = [
        [sum(own), len(own) - sum(own)] for own in (outcomes(records, *of) for of in (contrast.plus, contrast.minus))
    ]
    return float(scipy.stats.fisher_exact(table).pvalue)


def solved_table(records: Sequence[Record], task: str) -> str:
    """Return a table of a task's cells: tuned rate and gain, solved runs, and the step at which a run solves it."""
    records = [r for r in records if r["task"] == task]
    rows = []
    for cell in dict.fromkeys(map(cell_of, records)):
        own = [r for r in records if cell_of(r) == cell]
        steps = [f"{r['numbers'][SOLVED_AT]:g}" if is_solved(r) else "–" for r in sorted(own, key=lambda r: r["seed"])]
        accuracies = [r["numbers"]["exact_match/retrieval"] for r in own]
        rows.append(
            [
                cell,
                f"{own[0]['learning_rate']:g}",
                own[0]["changes"].get(GAIN, ""),
                solved_count(records, task, cell),
                ", ".join(steps),
                f"{statistics.median(accuracies):.3f}",
            ]
        )
    header = ["arm", "rate", "gain", "solved", "step of the first solution, by seed", "median accuracy"]
    return markdown(header, rows) + provenance(records)


def solved_family_table(records: Sequence[Record], task: str) -> str:
    """Return a table of the contrasts of norm, gain and subtraction by solved runs."""
    records = [r for r in records if r["task"] == task]
    corrected = holm([fisher(records, contrast) for contrast in NORM_OR_GAIN])
    rows = []
    for contrast, p in zip(NORM_OR_GAIN, corrected, strict=True):
        counts = [solved_count(records, task, cell) for cell in (*contrast.plus, *contrast.minus)]
        better = "open" if p >= SIGNIFICANT else "better" if counts[0] > counts[1] else "worse"
        rows.append([contrast.title, contrast.asks, *counts, f"{p:.3f}", better])
    return markdown(["contrast", "asks for", "first solved", "second", "p, corrected", "the first is"], rows)


ATTENTION_COLUMNS = {
    "to the answer": "answer",
    "to other pairs": "others",
    "to distractors": "noise",
    "to position 0": "first",
    "Gini": "gini",
    "cosine of A1 and A2, answer": "cosine_answer",
    "distractors": "cosine_noise",
}


def attention_table(records: Sequence[Record], task: str) -> str:
    """Return a table of the suite attention: means over the solved runs of each cell that has its numbers."""
    own = [r for r in records if r["task"] == task and "attention/answer" in r["numbers"] and is_solved(r)]
    rows = []
    for cell in dict.fromkeys(map(cell_of, own)):
        runs = [r["numbers"] for r in own if cell_of(r) == cell]
        found = ([run.get(f"attention/{name}") for run in runs] for name in ATTENTION_COLUMNS.values())
        rows.append([cell, str(len(runs)), *("" if None in of else str(estimate(of)) for of in found)])
    return markdown(["arm", "solved runs", *ATTENTION_COLUMNS], rows)


PLACES = {
    "attention": attention_table,
    "family": family_table,
    "contrast": contrast_value,
    "cells": cells_table,
    "solved_table": solved_table,
    "solved_family": solved_family_table,
    "solved_count": solved_count,
}
