"""Tables and values of docs/results.md on recall: solved runs, attention weights, λ and the number of distractors."""

import statistics
from collections.abc import Sequence

import scipy.stats

from benchmarks.controls_study import GAIN
from benchmarks.controls_tables import (
    NORM_OR_GAIN,
    SIGNIFICANT,
    Contrast,
    by_seed,
    cell_of,
    holm,
    p_text,
    values,
    versus,
)
from benchmarks.results_tables import (
    SOLVED_NUMBER,
    Record,
    estimate,
    is_solved,
    markdown,
    provenance,
    signed,
)
from difftx.configs.controls import DISTRACTORS

SOLVED_AT = "exact_match/solved_at_step"


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


def solved_p(records: Sequence[Record], task: str, one: str, other: str) -> str:
    """Return the p-value of Fisher's exact test on the solved runs of two arms, without a correction."""
    return p_text(fisher([r for r in records if r["task"] == task], versus(one, other, "")))


def solved_table(records: Sequence[Record], task: str) -> str:
    """Return a table of a task's cells: tuned rate and gain, solved runs, and the step at which a run solves it."""
    records = [r for r in records if r["task"] == task]
    rows = []
    for cell in dict.fromkeys(map(cell_of, records)):
        own = [r for r in records if cell_of(r) == cell]
        steps = [f"{r['numbers'][SOLVED_AT]:g}" if is_solved(r) else "–" for r in sorted(own, key=lambda r: r["seed"])]
        accuracies = [r["numbers"][SOLVED_NUMBER] for r in own]
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
        rows.append([contrast.title, contrast.asks, *counts, p_text(p), better])
    return markdown(["contrast", "asks for", "first solved", "second", "p, corrected", "the first is"], rows)


ATTENTION_COLUMNS = {
    "to the answer": "answer",
    "to other pairs": "others",
    "to distractors": "noise",
    "to the answer, with sign": "answer_signed",
    "to distractors, with sign": "noise_signed",
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


# ── Question 6: does the subtraction help more among more distractors? ──

FEW = next(iter(DISTRACTORS))
SUBTRACTIONS = (versus("diff", "zero-norm", "with the norm"), versus("diff-gain", "zero-gain", "with a gain"))


def accuracies(records: Sequence[Record], contrast: Contrast, task: str) -> list[float]:
    """Return the difference of two arms' accuracies on a task by seed."""
    return values([r for r in records if r["task"] == task], contrast, SOLVED_NUMBER)


def noise_growth(records: Sequence[Record], contrast: Contrast, task: str) -> list[float]:
    """Return how much larger the difference of two arms' accuracies is on a task than with 15 distractors, by seed."""
    seeds = [{r["seed"] for r in records if (r["task"], r["arm"]) == (name, *contrast.plus)} for name in (FEW, task)]
    if seeds[0] != seeds[1]:
        raise AssertionError(f"{contrast.title}: the tasks have runs of different seeds")
    few, many = (accuracies(records, contrast, name) for name in (FEW, task))
    return [b - a for a, b in zip(few, many, strict=True)]


def helps_against_noise(records: Sequence[Record], contrast: Contrast, task: str) -> bool:
    """Return whether the arm with the subtraction solves more runs of a task, and its lead in accuracy has grown."""
    own = [r for r in records if r["task"] == task]
    one, other = (sum(outcomes(own, *of)) for of in (contrast.plus, contrast.minus))
    growth = estimate(noise_growth(records, contrast, task))
    return one > other and growth.half is not None and growth.mean > growth.half


def noise_table(records: Sequence[Record]) -> str:
    """Return a table of the subtraction's contrasts by the number of distractors."""
    rows = []
    done = [task for task in DISTRACTORS if any(r["task"] == task for r in records)]
    for contrast in SUBTRACTIONS:
        for task in done:
            counts = (solved_count(records, task, *of) for of in (contrast.plus, contrast.minus))
            row = [
                contrast.title,
                str(DISTRACTORS[task]),
                *counts,
                signed(estimate(accuracies(records, contrast, task))),
            ]
            if task == FEW:
                rows.append([*row, "", ""])
                continue
            growth = signed(estimate(noise_growth(records, contrast, task)))
            rows.append([*row, growth, "yes" if helps_against_noise(records, contrast, task) else "not shown"])
    header = ["contrast", "distractors", "first solved", "second", "difference of accuracies", "its growth"]
    return markdown([*header, "helps against noise"], rows)


# ── Question 3: λ without a norm ──


def lambdas_table(records: Sequence[Record]) -> str:
    """Return a table of learning rates: solved runs, and λ of each layer at the last step by seed."""
    rows = []
    for rate in dict.fromkeys(r["learning_rate"] for r in records):
        own = sorted((r for r in records if r["learning_rate"] == rate), key=lambda r: r["seed"])
        layers = [name for name in own[0]["numbers"] if name.startswith("lambda/")]
        by_layer = (", ".join(f"{r['numbers'][name]:.2f}" for r in own) for name in layers)
        rows.append([f"{rate:g}", f"{sum(map(is_solved, own))} of {len(own)}", *by_layer])
    return markdown(["rate", "solved", "λ of layer 1, by seed", "λ of layer 2"], rows) + provenance(records)


# ── NC3 of the review: does training align A1 and A2 in noise? ──

FIRST = "first/"  # Prefix of numbers of a run's first evaluation.
ALIGNMENT = {"attention/cosine_noise": "distractors", "attention/cosine_answer": "the answer"}
AT_DISTRACTORS = next(iter(ALIGNMENT))


def alignment_growth(records: Sequence[Record], arm: str, number: str = AT_DISTRACTORS) -> list[float]:
    """Return by how much a cosine of A1 and A2 grows from the first tenth of the training to its end, by seed."""
    first, last = (by_seed(records, arm, name) for name in (FIRST + number, number))
    return [last[seed] - first[seed] for seed in last]


def alignment_value(records: Sequence[Record], arm: str) -> str:
    """Return the growth of the cosine at distractors with its interval."""
    return signed(estimate(alignment_growth(records, arm)))


def alignment_contrast(records: Sequence[Record], one: str, other: str) -> str:
    """Return by how much more the cosine at distractors grows in one arm than in another."""
    first, last = (values(records, versus(one, other, ""), name) for name in (FIRST + AT_DISTRACTORS, AT_DISTRACTORS))
    return signed(estimate([b - a for a, b in zip(first, last, strict=True)]))


def alignment_table(records: Sequence[Record]) -> str:
    """Return a table of cosines of A1 and A2 at the first tenth of the training and at its end."""
    rows = []
    for arm in dict.fromkeys(map(cell_of, records)):
        for number, where in ALIGNMENT.items():
            first, last = (estimate(list(by_seed(records, arm, name).values())) for name in (FIRST + number, number))
            rows.append([arm, where, str(first), str(last), signed(estimate(alignment_growth(records, arm, number)))])
    return markdown(["arm", "cosine of A1 and A2 at", "first tenth", "end", "growth"], rows) + provenance(records)


PLACEHOLDERS = {
    "attention": attention_table,
    "solved_table": solved_table,
    "solved_family": solved_family_table,
    "solved_count": solved_count,
    "solved_p": solved_p,
    "noise": noise_table,
    "lambdas": lambdas_table,
    "alignment": alignment_table,
    "alignment_value": alignment_value,
    "alignment_contrast": alignment_contrast,
}
