"""Tables and values of docs/results.md on the preregistered questions (studies/controls_study.py).

This module has no command: `python studies/results.py render` calls the functions in `PLACEHOLDERS`.

A contrast is a sum of cells with signs, such as `diff` − `zero-norm`. Its value is the mean over seeds of this sum of
paired numbers. The contrasts of a question are a family, whose p-values Holm's method corrects. Losses and their
differences are in bits per byte. A `number` is a key of a record's "numbers", by default the loss on the test text.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import scipy.stats

from difftx.configs import controls
from studies.controls_study import GAIN, RATE
from studies.study_records import (
    TEST_LOSS,
    VALIDATION_LOSS,
    Estimate,
    Record,
    estimate,
    markdown,
    one_per_seed,
    provenance,
    signed,
)

MARGINAL = 0.02  # The page calls a decided contrast marginal from this corrected p-value on.
SIGNIFICANT = 0.05  # Largest corrected p-value at which the page says that an arm is better.


class Contrast(NamedTuple):
    """A sum of cells with signs."""

    effect: str  # What the contrast measures, such as "the whole architecture".
    plus: Sequence[str]  # Names of the cells with sign plus.
    minus: Sequence[str]  # Names of the cells with sign minus.

    @property
    def title(self) -> str:
        """The sum in Markdown, such as "`diff` − `zero-norm`"."""
        if len(self.plus) == 1:
            return f"`{self.plus[0]}` − `{self.minus[0]}`"
        return " ".join(
            f"{sign} `{name}`" for sign, names in (("+", self.plus), ("−", self.minus)) for name in names
        ).removeprefix("+ ")

    @property
    def pair(self) -> tuple[str, str]:
        """The cell with sign plus and the one with sign minus. Raise `ValueError` if the contrast has more cells."""
        (first,), (second,) = self.plus, self.minus
        return first, second


def versus(cell: str, reference: str, effect: str) -> Contrast:
    """Return the contrast `cell` − `reference`."""
    return Contrast(effect, (cell,), (reference,))


# What a learned λ adds to λ = 0. The plan calls it "the subtraction", but no arm has the parameters without the sign.
SECOND_MAP = "the second attention map (11 % of the parameters)"
NORM_OR_GAIN_CONTRASTS = (
    versus("diff", "zero-norm", f"{SECOND_MAP}, with the norm"),
    versus("diff-gain", "zero-gain", f"{SECOND_MAP}, with a gain"),
    versus("diff", "diff-gain", "the norm in place of a gain, with a learned λ"),
    versus("zero-norm", "zero-gain", "the norm in place of a gain, with λ = 0"),
    versus("diff-gain", "diff-plain", "the gain, with a learned λ"),
    versus("diff", "transformer", "the whole architecture"),
    versus("diff", "transformer-gain", "the whole architecture, against the Transformer with a gain"),
)
# Parts of the names of cells of question 2, as `cell_of` writes them.
MUON = "optimizer=muon"
SHORT_WARMUP = "warmup_steps=0.01"


def _warmup_contrasts() -> Sequence[Contrast]:
    """Return the contrasts of question 2: four for each optimizer."""
    found = []
    for name, changes in (("AdamW", []), ("Muon", [MUON])):
        long, short = (
            {arm: ", ".join([arm, *changes, *warmup]) for arm in ("transformer", "diff")}
            for warmup in ([], [SHORT_WARMUP])
        )
        found += [versus(short[arm], long[arm], f"{arm}'s need for a long warm-up, {name}") for arm in short]
        found.append(
            Contrast(
                f"diff's need minus transformer's, {name}",
                (short["diff"], long["transformer"]),
                (long["diff"], short["transformer"]),
            )
        )
        found.append(versus(long["diff"], long["transformer"], f"the whole architecture, {name}"))
    return found


# Name of a family → its contrasts. The families of questions without runs are here too, because the analysis was
# committed before the runs.
FAMILIES: Mapping[str, Sequence[Contrast]] = {
    "norm-or-gain": NORM_OR_GAIN_CONTRASTS,
    "again": tuple(contrast for contrast in NORM_OR_GAIN_CONTRASTS if "diff-plain" not in contrast.minus),
    "main": (
        versus("diff", "zero-norm", "the second attention map, with the norm"),
        versus("diff", "transformer", "the whole architecture"),
        versus("diff", "transformer-gain", "the whole architecture, against the Transformer with a gain"),
    ),
    "lambda": (
        versus("diff, lambda_bound=sigmoid", "diff", "λ between 0 and 1"),
        versus("diff, lambda_bound=tanh", "diff", "λ between -1 and 1"),
        versus("diff, lambda_learning_rate_factor=0.1", "diff", "a slower λ"),
        versus("diff, lambda_weight_decay=0.1", "diff", "a decayed λ"),
    ),
    "warmup": _warmup_contrasts(),
    "muon-subtraction": tuple(
        versus(", ".join(["diff", *changes]), ", ".join(["zero-norm", *changes]), f"{SECOND_MAP}, warm-up of {name}")
        for name, changes in (("50 %", [MUON]), ("1 %", [MUON, SHORT_WARMUP]))
    ),
    "differential": tuple(
        versus(arm, "transformer", f"what {arm} adds to a trained Transformer")
        for arm in ("zero-branch", "dex", "split")
    ),
    "distillation": tuple(
        versus(f"{arm}, teacher=start", arm, f"a teacher for {arm}") for arm in ("zero-branch", "dex", "split")
    ),
    "review": tuple(
        versus(arm, reference, f"{added} in place of {replaced}")
        for reference, replaced in (("transformer", "softmax"), ("diff", "differential attention"))
        for arm, added in (("top_k", "explicit top-k"), ("signed_mask", "a signed mask"))
    ),
}


def cell_of(record: Record) -> str:
    """Return the name of a record's cell: the arm, and the changes that are not tuned, without their config groups."""
    tuned = {RATE} | ({GAIN} if record["arm"].endswith("-gain") else set())
    changes = (
        f"{name.removesuffix('.name').rpartition('.')[2]}={value}"
        for name, value in sorted(record["changes"].items())
        if name not in tuned
    )
    return ", ".join([record["arm"], *changes])


def cell_numbers_by_seed(records: Sequence[Record], cell: str, number: str) -> dict[int, float]:
    """Return seed → a number of a cell's runs, in the order of the seeds."""
    found = one_per_seed((r for r in records if cell_of(r) == cell), number, f"cell {cell}")
    return {seed: found[seed] for seed in sorted(found)}


def contrast_values(records: Sequence[Record], contrast: Contrast, number: str) -> list[float]:
    """Return the value of a contrast for each seed, in the order of the seeds."""
    signs = [*((1, cell) for cell in contrast.plus), *((-1, cell) for cell in contrast.minus)]
    terms = [(sign, cell_numbers_by_seed(records, cell, number)) for sign, cell in signs]
    if len({tuple(numbers) for _, numbers in terms}) != 1:
        raise AssertionError(f"{contrast.title}: the cells have runs of different seeds")
    _, first = terms[0]
    return [sum(sign * numbers[seed] for sign, numbers in terms) for seed in first]


def p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's t test that the mean of differences is zero."""
    if not any(differences):  # Two names of one cell, such as an arm whose best gain is 1. The test would return NaN.
        return 1.0
    return float(scipy.stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of a family after Holm's correction, in the same order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    raised = ((len(order) - rank) * p_values[i] for rank, i in enumerate(order))
    corrected = dict(zip(order, itertools.accumulate(raised, max), strict=True))
    return [min(1.0, corrected[i]) for i in range(len(p_values))]


def tested(differences_of_each: Sequence[Sequence[float]]) -> list[tuple[Estimate, float]]:
    """Return the mean with its interval, and the corrected p-value, of each contrast of a family.

    The argument has the values of each contrast, one per seed.
    """
    corrected = holm([p_value(differences) for differences in differences_of_each])
    return list(zip(map(estimate, differences_of_each), corrected, strict=True))


def p_text(p: float) -> str:
    """Return a p-value with three decimals."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def verdict(mean: float, corrected: float, contrast: Contrast) -> str:
    """Return the page's verdict on a contrast of losses, from its mean and its corrected p-value."""
    if corrected >= SIGNIFICANT:
        return "open"
    if len(contrast.plus) > 1:
        return "larger" if mean > 0 else "smaller"
    return "worse" if mean > 0 else "better"


def family_table(records: Sequence[Record], family: str, number: str = TEST_LOSS) -> str:
    """Return a table with a row for each contrast of a family."""
    rows = [
        [contrast.title, contrast.effect, signed(value), p_text(p), marked(verdict(value.mean, p, contrast), p)]
        for contrast, (value, p) in family_results(records, family, number).items()
    ]
    return markdown(["contrast", "effect", "bits per byte", "p, corrected", "verdict"], rows)


def family_results(
    records: Sequence[Record], family: str, number: str = TEST_LOSS
) -> dict[Contrast, tuple[Estimate, float]]:
    """Return contrast → mean with its interval, and corrected p-value, of a family."""
    contrasts = FAMILIES[family]
    results = tested([contrast_values(records, contrast, number) for contrast in contrasts])
    return dict(zip(contrasts, results, strict=True))


def _among(family: str, words: Sequence[str]) -> Contrast:
    """Return the contrast of a family with two cells, or the one whose effect has these words."""
    effect = " ".join(words)
    pair = tuple(map(named_cell, words))
    [found] = [c for c in FAMILIES[family] if effect == c.effect or pair == (*c.plus, *c.minus)]
    return found


def verdicts_text(records: Sequence[Record], family: str, number: str = TEST_LOSS) -> str:
    """Return the different verdicts on the contrasts of a family, such as "open" or "open, worse"."""
    results = family_results(records, family, number).items()
    return ", ".join(sorted({verdict(value.mean, p, contrast) for contrast, (value, p) in results}))


def verdict_text(records: Sequence[Record], family: str, *words: str, number: str = TEST_LOSS) -> str:
    """Return the verdict on a contrast of a family, named by its two cells or by its effect."""
    contrast = _among(family, words)
    value, p = family_results(records, family, number)[contrast]
    return marked(verdict(value.mean, p, contrast), p)


def marked(found: str, p: float) -> str:
    """Return a verdict, followed by "marginal" if its corrected p-value is between `MARGINAL` and `SIGNIFICANT`."""
    return f"{found}, marginal" if MARGINAL <= p < SIGNIFICANT else found


def named_cell(word: str) -> str:
    """Return the cell that a word of a placeholder names. The word has no spaces after commas."""
    return word.replace(",", ", ")


def contrast_text(records: Sequence[Record], cell: str, reference: str, number: str = TEST_LOSS) -> str:
    """Return the difference of two cells with its interval."""
    contrast = versus(named_cell(cell), named_cell(reference), "")
    return signed(estimate(contrast_values(records, contrast, number)))


def effect_text(records: Sequence[Record], family: str, *words: str) -> str:
    """Return the value of a family's contrast with its interval; `words` are those of the contrast's effect."""
    return signed(estimate(contrast_values(records, _among(family, words), TEST_LOSS)))


def cells_table(records: Sequence[Record], number: str = TEST_LOSS) -> str:
    """Return a table with a row for each cell: parameters, learning rate, gain and loss."""
    rows = []
    for cell in dict.fromkeys(map(cell_of, records)):
        run = next(r for r in records if cell_of(r) == cell)
        recipe_fields = controls.TUNED.get(run["task"], {}).get(run["arm"], {})
        gain = run["changes"].get(GAIN) or (f"{recipe_fields[GAIN]:g}" if GAIN in recipe_fields else "")
        losses = cell_numbers_by_seed(records, cell, number).values()
        rows.append([cell, f"{run['parameters']:,}", f"{run['learning_rate']:g}", gain, str(estimate(list(losses)))])
    return markdown(["arm", "parameters", "rate", "gain", "bits per byte"], rows) + provenance(records)


PLACEHOLDERS = {
    "family": family_table,
    "contrast": contrast_text,
    "effect": effect_text,
    "verdict": verdict_text,
    "verdicts": verdicts_text,
    "validation_verdict": functools.partial(verdict_text, number=VALIDATION_LOSS),
    "cells": cells_table,
}
