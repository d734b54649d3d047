"""Tables and values of docs/results.md on question 4: arms by size and number of tokens, and times of training steps.

This module has no command: `python studies/results.py render` calls the functions in `PLACEHOLDERS`. A length is a
number of tokens per parameter; `LENGTHS` in studies/controls_study.py has the steps of each. Losses and their
differences are in bits per byte of the test text.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from difftx.errors import UserError
from studies.controls_study import ARCHITECTURES, LENGTHS, STEPS
from studies.controls_tables import SIGNIFICANT, cell_numbers_by_seed, marked, p_text, tested, versus
from studies.study_records import (
    REFERENCE,
    STEP_TIME,
    TEST_LOSS,
    Estimate,
    Record,
    estimate,
    markdown,
    numbers_by_seed,
    provenance,
    signed,
)

FAMILY_TOKENS = 20  # Tokens per parameter at which the first family of a size compares arms.
SECOND_MAP = ("diff", "zero-norm")  # The pair of arms that differ only in whether λ is learned or 0.
PAIRS = (*((arm, REFERENCE) for arm in ARCHITECTURES if arm != REFERENCE), SECOND_MAP)
RESIZED_PAIRS = (("diff", REFERENCE), SECOND_MAP)  # Pairs whose change with the size is in the family.
SMALLEST, *_ = LENGTHS  # Task of the smallest models.
# These arms' longest runs, and their runs of larger models, were preregistered later. They have families of their own.
LATER_ARMS = ("diff_v2", "gdla", "gated")

type Differences = Mapping[int, Mapping[int, float]]  # Tokens per parameter → seed → difference of two arms.


def differences_by_length(records: Sequence[Record], task: str, arm: str, reference: str = REFERENCE) -> Differences:
    """Return an arm's test loss minus the reference's, for the lengths at which the arm has runs.

    The reference may have runs of further seeds.
    """
    found = {}
    for tokens, steps in LENGTHS[task].items():
        own, other = (cell_numbers_by_seed(records, f"{name}, steps={steps}", TEST_LOSS) for name in (arm, reference))
        if missing := own.keys() - other.keys():
            raise AssertionError(f"{reference}, steps={steps}: no runs of the seeds {sorted(missing)} of {arm}")
        if own:
            found[tokens] = {seed: loss - other[seed] for seed, loss in own.items()}
    return found


def slopes(differences: Differences) -> list[float]:
    """Return each seed's least-squares slope of its differences over log2 of the tokens: bits per byte per doubling."""
    seeds, *others = (sorted(by_seed) for by_seed in differences.values())
    if any(other != seeds for other in others):
        raise AssertionError("the lengths have runs of different seeds")
    y_LS = np.array([[by_seed[seed] for seed in seeds] for by_seed in differences.values()])  # [lengths, seeds]
    slopes_S, _ = np.polyfit(np.log2([*differences]), y_LS, 1)
    return slopes_S.tolist()


def sizes_table(records: Sequence[Record], task: str) -> str:
    """Return a table with a row for each length: the Transformer's loss, and differences of pairs of arms."""
    records = [r for r in records if r["task"] == task]
    differences = {pair: found for pair in PAIRS if (found := differences_by_length(records, task, *pair))}
    rows = []
    for tokens, steps in LENGTHS[task].items():
        if losses := cell_numbers_by_seed(records, f"{REFERENCE}, steps={steps}", TEST_LOSS):
            trained_on = next(r["tokens"] for r in records if r["changes"][STEPS] == str(steps))
            cells = (
                signed(estimate([*by_length[tokens].values()])) if tokens in by_length else ""
                for by_length in differences.values()
            )
            rows.append([str(tokens), f"{trained_on:,}", str(estimate([*losses.values()])), *cells])
    pairs = (versus(*pair, "").title for pair in differences)
    return markdown(["tokens per parameter", "tokens", f"`{REFERENCE}`", *pairs], rows) + provenance(records)


def size_rates_table(records: Sequence[Record], task: str) -> str:
    """Return a table of the learning rates of a size: a row for each length, and a column for each arm."""
    return _lengths_table(records, task, lambda runs: f"{runs[-1]['learning_rate']:g}")


def size_seconds_table(records: Sequence[Record], task: str) -> str:
    """Return a table of the median seconds of a run of a size: a row for each length, and a column for each arm."""
    return _lengths_table(records, task, lambda runs: f"{statistics.median(r['wall_seconds'] for r in runs):.0f}")


def step_times_table(records: Sequence[Record]) -> str:
    """Return a table of the times of a training step, with a row for each arm; see studies/step_times.py."""
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        ratios, parameters = _step_ratios(records, arm), next(r["parameters"] for r in records if r["arm"] == arm)
        step = statistics.median(r["numbers"][STEP_TIME] for r in records if r["arm"] == arm)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([arm, f"{parameters:,}", f"{step:.1f}", f"{statistics.median(ratios):.2f}", spread])
    header = ["arm", "parameters", "milliseconds", f"times `{REFERENCE}`", "of single rounds"]
    first = records[0]
    rounds = len({r["seed"] for r in records})
    source = f"Medians of {rounds} rounds of {first['tokens']:,} tokens; {first['hardware']}; jax {first['jax']}."
    return f"{markdown(header, rows)}\n\n    {first['sweep']}\n\n{source}"


def step_time_text(records: Sequence[Record], arm: str) -> str:
    """Return how many times as long a training step of an arm takes as one of the Transformer."""
    return f"{step_ratio(records, arm):.1f}"


def step_ratio(records: Sequence[Record], arm: str) -> float:
    """Return the time of an arm's training step over that of the Transformer: the median over rounds."""
    return statistics.median(_step_ratios(records, arm))


def _step_ratios(records: Sequence[Record], arm: str) -> list[float]:
    """Return for each round the time of an arm's training step over that of the Transformer."""
    own, reference = (numbers_by_seed(records, SMALLEST, name, STEP_TIME) for name in (arm, REFERENCE))
    return [own[number] / reference[number] for number in own]


def _lengths_table(records: Sequence[Record], task: str, cell_text: Callable[[Sequence[Record]], str]) -> str:
    """Return a table with a row for each length and a column for each arm: `cell_text` of the arm's runs, if any."""
    rows = []
    for tokens, steps in LENGTHS[task].items():
        trained = [r for r in records if (r["task"], r["changes"][STEPS]) == (task, str(steps))]
        by_arm = ([r for r in trained if r["arm"] == arm] for arm in ARCHITECTURES)
        if trained:
            rows.append([str(tokens), *(cell_text(runs) if runs else "" for runs in by_arm)])
    return markdown(["tokens per parameter", *(f"`{arm}`" for arm in ARCHITECTURES)], rows)


class SizeContrast(NamedTuple):
    """A contrast of question 4."""

    title: str  # The pair of arms, in Markdown.
    measured: str  # The difference at a length, its slope, or its change with the size.
    values: list[float]  # One for each seed, in bits per byte.
    if_positive: str  # Verdict on a mean above zero.
    if_negative: str  # Verdict on a mean below zero.


def size_family(records: Sequence[Record], task: str) -> list[SizeContrast]:
    """Return a size's first family: differences at 20 tokens per parameter, slopes, and changes with the size.

    The changes are those from the smallest models, which need runs among the records.
    """
    differences = {}
    for pair in PAIRS:
        by_length = differences_by_length(records, task, *pair)
        arm, _ = pair
        if arm in LATER_ARMS:  # All their runs of larger models, and the longest runs of the smallest ones, came later.
            is_earlier = task == SMALLEST
            by_length = {t: by_length[t] for t in by_length if t <= FAMILY_TOKENS} if is_earlier else {}
        if by_length:
            differences[pair] = by_length
    family = _differences_and_slopes(differences, FAMILY_TOKENS)
    if task != SMALLEST:
        for pair in RESIZED_PAIRS:
            smaller = differences_by_length(records, SMALLEST, *pair)[FAMILY_TOKENS]
            change = [loss - smaller[seed] for seed, loss in differences[pair][FAMILY_TOKENS].items()]
            measured = f"{FAMILY_TOKENS} tokens per parameter, change with the size"
            family.append(SizeContrast(versus(*pair, "").title, measured, change, "rises", "falls"))
    return family


def later_family(records: Sequence[Record], task: str) -> list[SizeContrast]:
    """Return a size's second family: differences of the later arms in the longest runs, and their slopes."""
    differences = {(arm, REFERENCE): differences_by_length(records, task, arm) for arm in LATER_ARMS}
    return _differences_and_slopes(differences, max(LENGTHS[task]))


def _differences_and_slopes(differences: Mapping[tuple[str, str], Differences], tokens: int) -> list[SizeContrast]:
    """Return the differences of pairs of arms at a number of tokens per parameter, and then their slopes."""
    at_tokens, over_lengths = [], []
    for pair, by_length in differences.items():
        title = versus(*pair, "").title
        length = f"{tokens} tokens per parameter"
        at_tokens.append(SizeContrast(title, length, [*by_length[tokens].values()], "worse", "better"))
        slope = f"slope per doubling of the tokens, {min(by_length)} to {max(by_length)}"
        over_lengths.append(SizeContrast(title, slope, slopes(by_length), "rises", "falls"))
    return at_tokens + over_lengths


def _size_contrasts_table(family: Sequence[SizeContrast]) -> str:
    rows = []
    for contrast, (value, p) in zip(family, tested([contrast.values for contrast in family]), strict=True):
        verdict = marked(_verdict(contrast, value, p), p)
        rows.append([contrast.title, contrast.measured, signed(value), p_text(p), verdict])
    return markdown(["contrast", "at", "bits per byte", "p, corrected", "verdict"], rows)


def size_verdict_text(records: Sequence[Record], task: str, arm: str, reference: str, at: str, seeds: int = 0) -> str:
    """Return the verdict on a contrast of a size, in the family that has it.

    Args:
        records: Records of question 4.
        task: Task of the models.
        arm: Arm with sign plus.
        reference: Arm with sign minus.
        at: A number of tokens per parameter, "slope-" and the largest such number, or "size" for the change with it.
        seeds: Number of seeds to use, or 0 for all.
    """
    if found := size_verdict(records, task, arm, reference, at, seeds):
        return found
    raise UserError(f"{task}, {arm} − {reference}: no family has this contrast at {at}")


def size_verdict(records: Sequence[Record], task: str, arm: str, reference: str, at: str, seeds: int = 0) -> str | None:
    """Return the verdict as `size_verdict_text`, or None if no family has the contrast."""
    kind, _, last = at.partition("-")
    measured = {"slope": f", 5 to {last}", "size": ", change with the size"}.get(kind, f"{at} tokens per parameter")
    for family_of in (size_family, later_family):
        family = family_of(records, task)
        results = tested([contrast.values[: seeds or None] for contrast in family])
        for contrast, (value, p) in zip(family, results, strict=True):
            if contrast.title == versus(arm, reference, "").title and contrast.measured.endswith(measured):
                return marked(_verdict(contrast, value, p), p)
    return None


def _verdict(contrast: SizeContrast, value: Estimate, p: float) -> str:
    if p >= SIGNIFICANT:
        return "open"
    return contrast.if_positive if value.mean > 0 else contrast.if_negative


def sizes_family_table(records: Sequence[Record], task: str) -> str:
    """Return a table of a size's first family of contrasts."""
    return _size_contrasts_table(size_family(records, task))


def sizes_later_table(records: Sequence[Record], task: str) -> str:
    """Return a table of a size's second family of contrasts."""
    return _size_contrasts_table(later_family(records, task))


PLACEHOLDERS = {
    "sizes": sizes_table,
    "size_seconds": size_seconds_table,
    "step_times": step_times_table,
    "step_time": step_time_text,
    "size_rates": size_rates_table,
    "sizes_family": sizes_family_table,
    "sizes_later": sizes_later_table,
    "size_verdict": size_verdict_text,
    "size_verdict_of_5": functools.partial(size_verdict_text, seeds=5),
}
