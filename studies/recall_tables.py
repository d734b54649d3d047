"""Tables and values of docs/results.md on recall: solved runs, attention weights, λ and the number of distractors.

This module has no command: `python studies/results.py render` calls the functions in `PLACEHOLDERS`. Cells and
contrasts are those of studies/controls_tables.py.
"""

import statistics
from collections.abc import Sequence

import scipy.stats

from difftx.configs.controls import DISTRACTORS
from studies.controls_study import GAIN, STEPS, TUNED_SEED
from studies.controls_tables import (
    NORM_OR_GAIN_CONTRASTS,
    SIGNIFICANT,
    Contrast,
    cell_numbers_by_seed,
    cell_of,
    contrast_values,
    holm,
    named_cell,
    p_text,
    versus,
)
from studies.study_records import (
    SOLVED_NUMBER,
    Record,
    count_text,
    estimate,
    has_solved,
    markdown,
    provenance,
    signed,
)

SOLVED_AT = "exact_match/solved_at_step"  # Number of a record: the first evaluated step at which the run solved recall.


def cell_outcomes(records: Sequence[Record], cell: str) -> list[bool]:
    """Return for each run of a cell whether it has solved the task."""
    return [has_solved(r) for r in records if cell_of(r) == cell]


def solved_count_text(records: Sequence[Record], task: str, cell: str) -> str:
    """Return the number of a cell's runs that have solved the task, such as "2 of 6"."""
    return count_text(cell_outcomes([r for r in records if r["task"] == task], named_cell(cell)))


FAILED_TUNING, EDGE_GAIN = "†", "‡"  # Marks of counts; the page explains them.
# Column of the page → task, and the end of the cells' names.
DISTRACTOR_COLUMNS = {
    "15 distractors": ("recall", ""),
    "31": ("recall-31", ""),
    "63": ("recall-63", ""),
    "63, twice the steps": ("recall-63", f", {STEPS.rpartition('.')[2]}=5000"),
}


def marked_count(records: Sequence[Record], cell: str) -> str:
    """Return the number of a cell's reported runs that have solved the task, with marks about its tuning.

    The records are those of one task, and contain the runs of the tuning. `FAILED_TUNING` marks a cell of which no such
    run solved the task, and `EDGE_GAIN` one whose gain is the smallest or the largest of those tried.
    """
    runs = [r for r in records if cell_of(r) == cell]
    tuning, reported = ([r for r in runs if (r["seed"] == TUNED_SEED) == is_tuning] for is_tuning in (True, False))
    if not tuning:
        raise AssertionError(f"{cell}: no runs of its tuning")
    gains = {float(r["changes"][GAIN]) for r in tuning if GAIN in r["changes"]}
    chosen = {float(r["changes"][GAIN]) for r in reported if GAIN in r["changes"]}
    marks = FAILED_TUNING * (not any(map(has_solved, tuning)))
    marks += EDGE_GAIN * bool(gains and chosen & {min(gains), max(gains)})
    return f"{count_text([has_solved(r) for r in reported])} {marks}".rstrip()


def distractors_table(records: Sequence[Record]) -> str:
    """Return a table of solved runs: a row for each arm, and a column for each number of distractors and of steps."""
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        row = []
        for task, changes in DISTRACTOR_COLUMNS.values():
            of_task = [r for r in records if r["task"] == task]
            is_run = any(cell_of(r) == arm + changes for r in of_task)
            row.append(marked_count(of_task, arm + changes) if is_run else "not run")
        rows.append([f"`{arm}`", *row])
    return markdown(["model", *DISTRACTOR_COLUMNS], rows)


def fisher_p_value(records: Sequence[Record], contrast: Contrast) -> float:
    """Return the p-value of Fisher's exact test on the solved runs of a contrast's two cells."""
    outcomes = [cell_outcomes(records, cell) for cell in contrast.pair]
    solved_and_unsolved = [[sum(solved), len(solved) - sum(solved)] for solved in outcomes]
    return float(scipy.stats.fisher_exact(solved_and_unsolved).pvalue)


def solved_p_text(records: Sequence[Record], task: str, cell: str, reference: str) -> str:
    """Return the p-value of Fisher's exact test on the solved runs of two cells, without a correction."""
    contrast = versus(named_cell(cell), named_cell(reference), "")
    return p_text(fisher_p_value([r for r in records if r["task"] == task], contrast))


def solved_table(records: Sequence[Record], task: str) -> str:
    """Return a table of a task's cells: rate, gain, solved runs, the step at which each solves it, and accuracy."""
    records = [r for r in records if r["task"] == task]
    rows = []
    for cell in dict.fromkeys(map(cell_of, records)):
        runs = sorted((r for r in records if cell_of(r) == cell), key=lambda r: r["seed"])
        steps = [f"{r['numbers'][SOLVED_AT]:g}" if has_solved(r) else "–" for r in runs]
        accuracies = [r["numbers"][SOLVED_NUMBER] for r in runs]
        rows.append(
            [
                cell,
                f"{runs[0]['learning_rate']:g}",
                runs[0]["changes"].get(GAIN, ""),
                count_text([has_solved(r) for r in runs]),
                ", ".join(steps),
                f"{statistics.median(accuracies):.3f}",
            ]
        )
    header = ["arm", "rate", "gain", "solved", "step of the first solution, by seed", "median accuracy"]
    return markdown(header, rows) + provenance(records)


def solved_family_table(records: Sequence[Record], task: str) -> str:
    """Return a table of `NORM_OR_GAIN_CONTRASTS` by solved runs, with p-values of Fisher's exact test."""
    records = [r for r in records if r["task"] == task]
    corrected = holm([fisher_p_value(records, contrast) for contrast in NORM_OR_GAIN_CONTRASTS])
    rows = []
    for contrast, p in zip(NORM_OR_GAIN_CONTRASTS, corrected, strict=True):
        first, second = (sum(cell_outcomes(records, cell)) for cell in contrast.pair)
        verdict = "open" if p >= SIGNIFICANT else "better" if first > second else "worse"
        counts = [count_text(cell_outcomes(records, cell)) for cell in contrast.pair]
        rows.append([contrast.title, contrast.effect, *counts, p_text(p), verdict])
    header = ["contrast", "effect", "first arm solved", "second arm solved", "p, corrected", "verdict"]
    return markdown(header, rows)


# Title of a column → number of the suite attention.
ATTENTION_COLUMNS = {
    "to the answer": "answer",
    "to other pairs": "others",
    "to distractors": "noise",
    "to the answer, with sign": "answer_signed",
    "to distractors, with sign": "noise_signed",
    "to position 0": "first",
    "Gini": "gini",
}


def attention_table(records: Sequence[Record], task: str) -> str:
    """Return a table of the suite attention: means over the solved runs of each cell that has its numbers."""
    measured = [r for r in records if r["task"] == task and "attention/answer" in r["numbers"] and has_solved(r)]
    rows = []
    for cell in dict.fromkeys(map(cell_of, measured)):
        runs = [r["numbers"] for r in measured if cell_of(r) == cell]
        columns = ([run.get(f"attention/{name}") for run in runs] for name in ATTENTION_COLUMNS.values())
        rows.append([cell, str(len(runs)), *("" if None in column else str(estimate(column)) for column in columns)])
    return markdown(["arm", "solved runs", *ATTENTION_COLUMNS], rows)


def ratio_contrast_text(records: Sequence[Record], cell: str, reference: str, number: str, divisor: str) -> str:
    """Return the difference of two cells in the ratio of two numbers, with its interval."""
    ratios_of_both = []
    for name in (cell, reference):
        numbers, divisors = (cell_numbers_by_seed(records, name, of) for of in (number, divisor))
        ratios_of_both.append({seed: numbers[seed] / divisors[seed] for seed in numbers})
    own, other = ratios_of_both
    if own.keys() != other.keys():
        raise AssertionError(f"{versus(cell, reference, '').title}: the cells have runs of different seeds")
    return signed(estimate([own[seed] - other[seed] for seed in own]))


# ── Question 6: does the second attention map help more among more distractors? ──

FEWEST = next(iter(DISTRACTORS))  # Task with the fewest distractors, 15.
SECOND_MAPS = (versus("diff", "zero-norm", "with the norm"), versus("diff-gain", "zero-gain", "with a gain"))


def accuracy_differences(records: Sequence[Record], contrast: Contrast, task: str) -> list[float]:
    """Return the difference of two arms' accuracies on a task, in the order of the seeds."""
    return contrast_values([r for r in records if r["task"] == task], contrast, SOLVED_NUMBER)


def noise_growth(records: Sequence[Record], contrast: Contrast, task: str) -> list[float]:
    """Return how much larger the difference of two arms' accuracies is on a task than on `FEWEST`.

    The result has a number per seed, in the order of the seeds.
    """
    cell, _ = contrast.pair
    seeds = [{r["seed"] for r in records if (r["task"], cell_of(r)) == (name, cell)} for name in (FEWEST, task)]
    if seeds[0] != seeds[1]:
        raise AssertionError(f"{contrast.title}: the tasks have runs of different seeds")
    few, many = (accuracy_differences(records, contrast, name) for name in (FEWEST, task))
    return [b - a for a, b in zip(few, many, strict=True)]


def helps_against_noise(records: Sequence[Record], contrast: Contrast, task: str) -> bool:
    """Return whether the arm with the second map solves more runs of a task, and its lead in accuracy has grown."""
    on_task = [r for r in records if r["task"] == task]
    with_subtraction, without = (sum(cell_outcomes(on_task, cell)) for cell in contrast.pair)
    growth = estimate(noise_growth(records, contrast, task))
    return with_subtraction > without and growth.half_width is not None and growth.mean > growth.half_width


def noise_table(records: Sequence[Record]) -> str:
    """Return a table of the second map's contrasts by the number of distractors."""
    rows = []
    tasks = [task for task in DISTRACTORS if any(r["task"] == task for r in records)]
    for contrast in SECOND_MAPS:
        for task in tasks:
            counts = (solved_count_text(records, task, cell) for cell in contrast.pair)
            difference = signed(estimate(accuracy_differences(records, contrast, task)))
            row = [contrast.title, str(DISTRACTORS[task]), *counts, difference]
            if task == FEWEST:
                rows.append([*row, "", ""])
                continue
            growth = signed(estimate(noise_growth(records, contrast, task)))
            rows.append([*row, growth, "yes" if helps_against_noise(records, contrast, task) else "not shown"])
    header = [
        "contrast",
        "distractors",
        "first arm solved",
        "second arm solved",
        "difference of accuracies",
        "its growth",
    ]
    return markdown([*header, "helps against noise"], rows)


# ── Question 3: λ without a norm ──


def lambdas_table(records: Sequence[Record]) -> str:
    """Return a table of learning rates: solved runs, and λ of each layer at the last step by seed."""
    rows = []
    for rate in dict.fromkeys(r["learning_rate"] for r in records):
        runs = sorted((r for r in records if r["learning_rate"] == rate), key=lambda r: r["seed"])
        layers = [name for name in runs[0]["numbers"] if name.startswith("lambda/")]
        by_layer = (", ".join(f"{r['numbers'][name]:.2f}" for r in runs) for name in layers)
        rows.append([f"{rate:g}", count_text([has_solved(r) for r in runs]), *by_layer])
    return markdown(["rate", "solved", "λ of layer 1, by seed", "λ of layer 2"], rows) + provenance(records)


# ── Does training align A1 and A2 at distractors? (Claim NC3 of docs/preregistration.md.) ──

FIRST_PREFIX = "first/"  # Numbers of a run's first evaluation have this before their names.
COSINE_NOISE = "attention/cosine_noise"
# Number → keys at which it compares A1 and A2.
ALIGNMENT = {COSINE_NOISE: "distractors", "attention/cosine_answer": "the answer"}


def alignment_growth(records: Sequence[Record], cell: str, number: str = COSINE_NOISE) -> list[float]:
    """Return by how much a cosine of A1 and A2 grows from the first tenth of the training to its end.

    The result has a number per seed, in the order of the seeds.
    """
    first, last = (cell_numbers_by_seed(records, cell, name) for name in (FIRST_PREFIX + number, number))
    return [last[seed] - first[seed] for seed in last]


def alignment_text(records: Sequence[Record], cell: str) -> str:
    """Return the growth of the cosine at distractors with its interval."""
    return signed(estimate(alignment_growth(records, cell)))


def alignment_contrast_text(records: Sequence[Record], cell: str, reference: str) -> str:
    """Return by how much more the cosine at distractors grows in one cell than in another, with its interval."""
    contrast = versus(cell, reference, "")
    first, last = (contrast_values(records, contrast, name) for name in (FIRST_PREFIX + COSINE_NOISE, COSINE_NOISE))
    return signed(estimate([b - a for a, b in zip(first, last, strict=True)]))


def alignment_table(records: Sequence[Record]) -> str:
    """Return a table of cosines of A1 and A2 at the first tenth of the training and at its end."""
    rows = []
    for cell in dict.fromkeys(map(cell_of, records)):
        for number, keys in ALIGNMENT.items():
            numbers = (cell_numbers_by_seed(records, cell, name) for name in (FIRST_PREFIX + number, number))
            first, last = (estimate([*by_seed.values()]) for by_seed in numbers)
            rows.append([cell, keys, str(first), str(last), signed(estimate(alignment_growth(records, cell, number)))])
    return markdown(["arm", "cosine of A1 and A2 at", "first tenth", "end", "growth"], rows) + provenance(records)


PLACEHOLDERS = {
    "attention": attention_table,
    "distractors": distractors_table,
    "solved_table": solved_table,
    "solved_family": solved_family_table,
    "solved_count": solved_count_text,
    "solved_p": solved_p_text,
    "ratio_contrast": ratio_contrast_text,
    "noise": noise_table,
    "lambdas": lambdas_table,
    "alignment": alignment_table,
    "alignment_value": alignment_text,
    "alignment_contrast": alignment_contrast_text,
}
