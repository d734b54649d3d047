"""Tables and values of docs/results.md on the preregistered questions (benchmarks/controls_study.py).

A contrast is a sum of cells with signs, such as `diff` − `zero-norm`. Its value is the mean over seeds of this sum of
paired numbers. The contrasts of a question are a family, whose p-values Holm's method corrects.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats

from benchmarks.controls_study import ARCHITECTURES, GAIN, LENGTHS, RATE, STEPS
from benchmarks.results_tables import TEST_LOSS, Record, estimate, markdown, one_per_seed, provenance, signed
from difftx.configs import controls

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


def versus(one: str, other: str, asks: str) -> Contrast:
    """Return the contrast of two cells."""
    return Contrast(asks, (one,), (other,))


NORM_OR_GAIN = (
    versus("diff", "zero-norm", "the subtraction, with the norm"),
    versus("diff-gain", "zero-gain", "the subtraction, with a gain"),
    versus("diff", "diff-gain", "the norm in place of a gain, with the subtraction"),
    versus("zero-norm", "zero-gain", "the norm in place of a gain, without the subtraction"),
    versus("diff-gain", "diff-plain", "the gain, with the subtraction"),
    versus("diff", "transformer", "all of it"),
    versus("diff", "transformer-gain", "all of it, against the Transformer with a gain"),
)
MUON, SHORT_WARMUP = "optimizer=muon", "warmup_fraction=0.01"


def _warmup_contrasts() -> Sequence[Contrast]:
    found = []
    for name, changes in (("AdamW", []), ("Muon", [MUON])):
        long, short = (
            {arm: ", ".join([arm, *changes, *warmup]) for arm in ("transformer", "diff")}
            for warmup in ([], [SHORT_WARMUP])
        )
        found += [versus(short[arm], long[arm], f"{arm}'s need for a long warm-up, {name}") for arm in short]
        found.append(
            Contrast(
                f"whether diff needs it more, {name}",
                (short["diff"], long["transformer"]),
                (long["diff"], short["transformer"]),
            )
        )
        found.append(versus(long["diff"], long["transformer"], f"all of it, {name}"))
    return found


# Name of a family → its contrasts. The families of questions without runs are here too, because the analysis was
# committed before the runs.
FAMILIES: Mapping[str, Sequence[Contrast]] = {
    "norm-or-gain": NORM_OR_GAIN,
    "again": tuple(contrast for contrast in NORM_OR_GAIN if "diff-plain" not in contrast.minus),
    "main": (
        versus("diff", "zero-norm", "the subtraction, with the norm"),
        versus("diff", "transformer", "all of it"),
        versus("diff", "transformer-gain", "all of it, against the Transformer with a gain"),
    ),
    "lambda": (
        versus("diff, lambda_bound=sigmoid", "diff", "λ between 0 and 1"),
        versus("diff, lambda_bound=tanh", "diff", "λ between -1 and 1"),
        versus("diff, lambda_learning_rate_factor=0.1", "diff", "a slower λ"),
        versus("diff, lambda_weight_decay=0.1", "diff", "a decayed λ"),
    ),
    "warmup": _warmup_contrasts(),
    "muon-subtraction": tuple(
        versus(", ".join(["diff", *changes]), ", ".join(["zero-norm", *changes]), f"the subtraction, warm-up of {name}")
        for name, changes in (("50 %", [MUON]), ("1 %", [MUON, SHORT_WARMUP]))
    ),
    "differential": tuple(
        versus(arm, "transformer", f"what {arm} adds to a trained Transformer")
        for arm in ("zero-branch", "dex", "split")
    ),
    "review": tuple(
        versus(arm, other, f"{what} in place of {instead}")
        for other, instead in (("transformer", "softmax"), ("diff", "the subtraction"))
        for arm, what in (("top_k", "explicit top-k"), ("signed_mask", "a signed mask"))
    ),
}


def cell_of(record: Record) -> str:
    """Return the name of a record's cell: the arm, and the changes that are not tuned, without their config groups."""
    tuned = {RATE} | ({GAIN} if record["arm"].endswith("-gain") else set())
    changes = (
        f"{name.removesuffix('.name').rpartition('.')[2]}={x}"
        for name, x in sorted(record["changes"].items())
        if name not in tuned
    )
    return ", ".join([record["arm"], *changes])


def by_seed(records: Sequence[Record], cell: str, number: str) -> dict[int, float]:
    """Return seed → a number of a cell's runs."""
    found = one_per_seed((r for r in records if cell_of(r) == cell), number, f"cell {cell}")
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


def p_text(p: float) -> str:
    """Return a p-value with three decimals."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


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
        rows.append([contrast.title, contrast.asks, signed(mean), p_text(p), verdict(mean.mean, p, contrast)])
    return markdown(["contrast", "asks for", "bits per byte", "p, corrected", "the first is"], rows)


def contrast_value(records: Sequence[Record], one: str, other: str, number: str = TEST_LOSS) -> str:
    """Return the difference of two cells with its interval. Their names have no spaces after commas."""
    contrast = versus(one.replace(",", ", "), other.replace(",", ", "), "")
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


# ── Question 4: size and tokens ──

BASELINE, FAMILY_TOKENS = "transformer", 20
COMPARED_ARMS = tuple(arm for arm in ARCHITECTURES if arm != BASELINE)
PAIRS = (*((arm, BASELINE) for arm in COMPARED_ARMS), ("diff", "zero-norm"))  # The last pair is the subtraction.
SMALLEST, *_ = LENGTHS  # Task of the smallest models.
RESIZED_PAIRS = (("diff", BASELINE), ("diff", "zero-norm"))  # Pairs whose change with the size is in the family.
# These arms' longest runs, and their runs of larger models, were preregistered later. They have families of their own.
LATER_ARMS = ("diff_v2", "gdla", "gated")

type Differences = Mapping[int, Mapping[int, float]]  # Tokens per parameter → seed → difference of two arms.


def of_size(records: Sequence[Record], task: str, arm: str, reference: str = BASELINE) -> Differences:
    """Return tokens per parameter → seed → difference of two arms, for the lengths at which the first has runs."""
    found = {}
    for tokens, steps in LENGTHS[task].items():
        if seeds := by_seed(records, f"{arm}, steps={steps}", TEST_LOSS):
            contrast = versus(f"{arm}, steps={steps}", f"{reference}, steps={steps}", "")
            found[tokens] = dict(zip(seeds, values(records, contrast, TEST_LOSS), strict=True))
    return found


def slopes(differences: Differences) -> list[float]:
    """Return the least-squares slopes of differences over log2 of the tokens: bits per byte per doubling.

    They are those of the seeds that have runs of all lengths.
    """
    seeds = sorted(set.intersection(*(set(of) for of in differences.values())))
    y = [[of[seed] for seed in seeds] for of in differences.values()]
    return np.polyfit(np.log2([*differences]), np.array(y), 1)[0].tolist()


def sizes_table(records: Sequence[Record], task: str) -> str:
    """Return a table of a size's lengths of training: the Transformer's loss, and differences of pairs of arms."""
    records = [r for r in records if r["task"] == task]
    differences = {pair: of for pair in PAIRS if (of := of_size(records, task, *pair))}
    rows = []
    for tokens, steps in LENGTHS[task].items():
        if losses := by_seed(records, f"{BASELINE}, steps={steps}", TEST_LOSS):
            trained_on = next(r["tokens"] for r in records if r["changes"][STEPS] == str(steps))
            found = (signed(estimate([*of[tokens].values()])) if tokens in of else "" for of in differences.values())
            rows.append([str(tokens), f"{trained_on:,}", str(estimate([*losses.values()])), *found])
    pairs = (versus(*pair, "").title for pair in differences)
    return markdown(["tokens per parameter", "tokens", f"`{BASELINE}`", *pairs], rows) + provenance(records)


def size_change(records: Sequence[Record], task: str, arm: str, first: str, last: str) -> str:
    """Return by how much the difference of an arm from the Transformer changes between two lengths of training."""
    differences = of_size(records, task, arm)
    before, after = (differences[int(tokens)] for tokens in (first, last))
    return signed(estimate([difference - before[seed] for seed, difference in after.items()]))


def size_rates_table(records: Sequence[Record], task: str) -> str:
    """Return a table of the learning rates of a size: a row for each length, and a column for each arm."""
    rows = []
    for tokens, steps in LENGTHS[task].items():
        own = [r for r in records if (r["task"], r["changes"][STEPS]) == (task, str(steps))]
        rates = {r["arm"]: f"{r['learning_rate']:g}" for r in own}
        if rates:
            rows.append([str(tokens), *(rates.get(arm, "") for arm in ARCHITECTURES)])
    return markdown(["tokens per parameter", *(f"`{arm}`" for arm in ARCHITECTURES)], rows)


def size_seconds_table(records: Sequence[Record], task: str) -> str:
    """Return a table of the median seconds of a run of a size: a row for each length, and a column for each arm."""
    rows = []
    for tokens, steps in LENGTHS[task].items():
        own = [r for r in records if (r["task"], r["changes"][STEPS]) == (task, str(steps))]
        times = ([r["wall_seconds"] for r in own if r["arm"] == arm] for arm in ARCHITECTURES)
        if own:
            rows.append([str(tokens), *(f"{statistics.median(of):.0f}" if of else "" for of in times)])
    return markdown(["tokens per parameter", *(f"`{arm}`" for arm in ARCHITECTURES)], rows)


class SizeContrast(NamedTuple):
    """A contrast of question 4."""

    title: str  # The pair of arms.
    at: str  # What it is: the difference at a length, its slope, or its change with the size.
    values: list[float]  # One for each seed, in bits per byte.
    above_zero: str  # Verdict on a mean above zero.
    below_zero: str


def size_family(records: Sequence[Record], task: str) -> list[SizeContrast]:
    """Return a size's first family: differences at 20 tokens per parameter, slopes, and changes with the size.

    The changes are those from the smallest models, which need runs among the records.
    """
    differences = {}
    for pair in PAIRS:
        of = of_size(records, task, *pair)
        if pair[0] in LATER_ARMS:
            # Of the larger models, all runs of these arms were preregistered later.
            of = {tokens: of[tokens] for tokens in of if tokens <= FAMILY_TOKENS} if task == SMALLEST else {}
        if of:
            differences[pair] = of
    family = _differences_and_slopes(differences, FAMILY_TOKENS)
    if task != SMALLEST:
        for pair in RESIZED_PAIRS:
            smaller = of_size(records, SMALLEST, *pair)[FAMILY_TOKENS]
            change = [loss - smaller[seed] for seed, loss in differences[pair][FAMILY_TOKENS].items()]
            at = f"{FAMILY_TOKENS} tokens per parameter, change with the size"
            family.append(SizeContrast(versus(*pair, "").title, at, change, "rises", "falls"))
    return family


def later_family(records: Sequence[Record], task: str) -> list[SizeContrast]:
    """Return a size's second family: differences of the later arms in the longest runs, and their slopes."""
    differences = {(arm, BASELINE): of_size(records, task, arm) for arm in LATER_ARMS}
    return _differences_and_slopes(differences, max(LENGTHS[task]))


def _differences_and_slopes(differences: Mapping[tuple[str, str], Differences], tokens: int) -> list[SizeContrast]:
    """Return the differences of pairs of arms at a number of tokens per parameter, and then their slopes."""
    at, over = [], []
    for pair, of in differences.items():
        title = versus(*pair, "").title
        lengths = f"slope per doubling of the tokens, {min(of)} to {max(of)}"
        at.append(SizeContrast(title, f"{tokens} tokens per parameter", [*of[tokens].values()], "worse", "better"))
        over.append(SizeContrast(title, lengths, slopes(of), "rises", "falls"))
    return at + over


def _size_contrasts_table(family: Sequence[SizeContrast]) -> str:
    rows = []
    for contrast, p in zip(family, holm([p_value(contrast.values) for contrast in family]), strict=True):
        mean = estimate(contrast.values)
        found = contrast.above_zero if mean.mean > 0 else contrast.below_zero
        rows.append([contrast.title, contrast.at, signed(mean), p_text(p), "open" if p >= SIGNIFICANT else found])
    return markdown(["contrast", "at", "bits per byte", "p, corrected", "verdict"], rows)


def sizes_family_table(records: Sequence[Record], task: str) -> str:
    """Return a table of a size's first family of contrasts."""
    return _size_contrasts_table(size_family(records, task))


def sizes_later_table(records: Sequence[Record], task: str) -> str:
    """Return a table of a size's second family of contrasts."""
    return _size_contrasts_table(later_family(records, task))


PLACEHOLDERS = {
    "family": family_table,
    "contrast": contrast_value,
    "cells": cells_table,
    "sizes": sizes_table,
    "size_change": size_change,
    "size_seconds": size_seconds_table,
    "size_rates": size_rates_table,
    "sizes_family": sizes_family_table,
    "sizes_later": sizes_later_table,
}
