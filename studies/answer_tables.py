"""Tables of docs/results.md that show an answer at once: differences of two arms in many settings, and question 2.

This module has no command: `python studies/results.py render` calls the functions in `PLACEHOLDERS`, and
studies/results_figures.py draws question 2 with the labels of its table. Differences are in bits per byte.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from studies.controls_study import LENGTHS, REPORTED_SEEDS, SEEDS_AGAIN, SIZE_SEEDS
from studies.controls_tables import (
    MUON,
    SHORT_WARMUP,
    Contrast,
    cell_of,
    contrast_values,
    family_results,
    marked,
    verdict,
    versus,
)
from studies.differential_study import TASKS
from studies.post_hoc_tables import (
    curve_through,
    log_worth_estimates,
    mean_losses,
    worth_interval,
    worth_of_difference,
    worth_text_of,
)
from studies.size_tables import SECOND_MAP, SMALLEST, size_verdict
from studies.study_records import REFERENCE, TEST_LOSS, VALIDATION_LOSS, Estimate, Record, estimate, markdown, signed

NOT_PLANNED = "not planned"  # In the place of a verdict, if no plan has a test of this contrast.


# ── Differences of two arms in many settings ──


class Setting(NamedTuple):
    """Runs with the same text, recipe, size, number of tokens and seeds."""

    recipe: str  # Text and changes of the recipe, as the page shows them.
    family: str | None  # Family of the tests, or None for question 4, whose families studies/size_tables.py has.
    seeds: Sequence[int]
    changes: str = ""  # End of the cells' names.
    task: str = SMALLEST
    number: str = TEST_LOSS
    has_worth: bool = False  # Whether the Transformer's loss curve is that of this recipe.

    def records(self, records: Sequence[Record]) -> list[Record]:
        """Return the setting's records. Runs on source code, which has no test text, share the seeds of others."""
        has_test_text = self.number == TEST_LOSS
        of_task = [r for r in records if r["task"] == self.task and r["seed"] in self.seeds]
        return [r for r in of_task if (TEST_LOSS in r["numbers"]) == has_test_text]


def _length(task: str, tokens: int) -> Setting:
    return Setting("novels", None, SIZE_SEEDS, f", steps={LENGTHS[task][tokens]}", task, has_worth=True)


LENGTH_SETTINGS = [_length(task, tokens) for task, lengths in LENGTHS.items() for tokens in lengths]
FEWEST_TOKENS, *OTHER_LENGTHS = LENGTH_SETTINGS
AGAIN = Setting("novels", "again", SEEDS_AGAIN, has_worth=True)
FIRST = Setting("novels", "norm-or-gain", REPORTED_SEEDS, has_worth=True)
CONVERTED = Setting("novels, converted", "differential", TASKS["novels"].reported_seeds)
WIDE = Setting("novels, heads of width 32", "main", REPORTED_SEEDS, task="novels-wide")
SOURCE_CODE = Setting("source code", "main", REPORTED_SEEDS, number=VALIDATION_LOSS)
# Arm → settings in the order of the rows.
DIFFERENCES: Mapping[str, Sequence[Setting]] = {
    "diff": (
        FEWEST_TOKENS,
        AGAIN,
        FIRST,
        *OTHER_LENGTHS,
        WIDE,
        SOURCE_CODE,
        Setting("novels, warm-up of 1 %", "warmup", REPORTED_SEEDS, f", {SHORT_WARMUP}"),
        Setting("novels, Muon", "warmup", REPORTED_SEEDS, f", {MUON}"),
        Setting("novels, Muon, warm-up of 1 %", "warmup", REPORTED_SEEDS, f", {MUON}, {SHORT_WARMUP}"),
    ),
    "diff-gain": (AGAIN, FIRST),
    "diff_v2": LENGTH_SETTINGS,
    "gdla": LENGTH_SETTINGS,
    "zero-branch": (CONVERTED,),
    "dex": (CONVERTED,),
    "split": (CONVERTED,),
}
SMALLEST_LENGTHS = [setting for setting in LENGTH_SETTINGS if setting.task == SMALLEST]
# The same for the table without converted models, other optimizers and warm-ups, larger models and second seed sets.
MAIN_DIFFERENCES: Mapping[str, Sequence[Setting]] = {
    "diff": (SMALLEST_LENGTHS[0], AGAIN, *SMALLEST_LENGTHS[1:], WIDE, SOURCE_CODE),
    "diff-gain": (AGAIN,),
    "diff_v2": SMALLEST_LENGTHS,
    "gdla": SMALLEST_LENGTHS,
}
# Settings that have runs of both arms of `SECOND_MAP`.
SECOND_MAP_SETTINGS = (
    FEWEST_TOKENS,
    AGAIN,
    FIRST,
    *OTHER_LENGTHS,
    WIDE,
    SOURCE_CODE,
    Setting("novels, Muon", "muon-subtraction", REPORTED_SEEDS, f", {MUON}"),
    Setting("novels, Muon, warm-up of 1 %", "muon-subtraction", REPORTED_SEEDS, f", {MUON}, {SHORT_WARMUP}"),
)
SETTING_COLUMNS = ("text and recipe", "parameters", "tokens per parameter", "seeds", "difference in bits per byte")


def differences_table(records: Sequence[Record]) -> str:
    """Return a table of all differences of a differential arm from the Transformer, with a row for each setting."""
    return _differences_table(records, DIFFERENCES)


def main_differences_table(records: Sequence[Record]) -> str:
    """Return the rows of `differences_table` on the smallest models with the default recipe, one per setting."""
    return _differences_table(records, MAIN_DIFFERENCES)


def _differences_table(records: Sequence[Record], settings_of_arms: Mapping[str, Sequence[Setting]]) -> str:
    rows = []
    for arm, settings in settings_of_arms.items():
        for setting in settings:
            difference = _difference(records, (arm, REFERENCE), setting)
            worth = _worth(records, setting, arm, difference)
            rows.append([f"`{arm}`", *difference.cells, worth, difference.verdict])
    return markdown(["model", *SETTING_COLUMNS, "worth in tokens", "verdict"], rows)


def second_map_table(records: Sequence[Record]) -> str:
    """Return a table of what a learned λ adds to λ = 0, with a row for each setting."""
    differences = (_difference(records, SECOND_MAP, setting) for setting in SECOND_MAP_SETTINGS)
    rows = [[*difference.cells, difference.verdict] for difference in differences]
    return markdown([*SETTING_COLUMNS, "verdict"], rows)


class Difference(NamedTuple):
    """The difference of two arms in a setting."""

    cells: Sequence[str]  # Cells of a row, one for each of `SETTING_COLUMNS`.
    value: Estimate
    reference: Record  # A run of the arm with sign minus.
    verdict: str


def _difference(records: Sequence[Record], arms: tuple[str, str], setting: Setting) -> Difference:
    """Return the difference of two arms, of which the second one has sign minus."""
    own = setting.records(records)
    arm, reference_arm = arms
    contrast = versus(arm + setting.changes, reference_arm + setting.changes, "")
    run, reference = (next(r for r in own if cell_of(r) == cell) for cell in contrast.pair)
    values = contrast_values(own, contrast, setting.number)
    cells = [
        setting.recipe,
        f"{float(f'{run["parameters"]:.2g}'):,.0f}",
        str(_tokens_per_parameter(reference)),
        str(len(values)),
        signed(estimate(values)),
    ]
    verdict = _verdict(records, setting, arms, contrast, _tokens_per_parameter(reference))
    return Difference(cells, estimate(values), reference, verdict)


def _of_lengths(records: Sequence[Record]) -> list[Record]:
    """Return the records of question 4, of both sizes and all lengths."""
    return [r for r in records if r["seed"] in SIZE_SEEDS]


def _tokens_per_parameter(record: Record) -> int:
    return round(record["tokens"] / record["parameters"])


def _worth(records: Sequence[Record], setting: Setting, arm: str, difference: Difference) -> str:
    """Return the worth of an arm's tokens with its interval, if the Transformer's loss curve has this recipe."""
    if not setting.has_worth:
        return "–"
    lengths, reference = _of_lengths(records), difference.reference
    if setting.family is None:
        i = [*LENGTHS[setting.task]].index(_tokens_per_parameter(reference))
        return worth_text_of(*worth_interval(log_worth_estimates(lengths, setting.task, arm)[i]))
    curve = curve_through(mean_losses(lengths, SMALLEST)[REFERENCE])
    return worth_text_of(*worth_of_difference(curve, reference["tokens"] / 1e6, difference.value))


def _verdict(
    records: Sequence[Record], setting: Setting, arms: tuple[str, str], contrast: Contrast, tokens: int
) -> str:
    """Return the verdict of the planned test of a contrast, if there is one."""
    if setting.family is None:
        return size_verdict(_of_lengths(records), setting.task, *arms, str(tokens)) or NOT_PLANNED
    return planned_verdict(setting.records(records), setting.family, contrast, setting.number)


def planned_verdict(records: Sequence[Record], family: str, contrast: Contrast, number: str = TEST_LOSS) -> str:
    """Return a family's verdict on a contrast with these cells, or `NOT_PLANNED` if the family does not have it."""
    for found, (value, p) in family_results(records, family, number).items():
        if (found.plus, found.minus) == (contrast.plus, contrast.minus):
            return marked(verdict(value.mean, p, found), p)
    return NOT_PLANNED


# ── Question 2: each optimizer with the long and the short warm-up ──


# Optimizer → part of the names of its cells, and the families that may have its tests.
OPTIMIZERS = {"AdamW": ("", ("warmup", "norm-or-gain")), "Muon": (f", {MUON}", ("warmup", "muon-subtraction"))}
LONG, SHORT = "", f", {SHORT_WARMUP}"
# Label of a row in the table and the figure → its cells with sign plus and minus: arm and warm-up.
WARMUP_ROWS = {
    "diff − transformer, warm-up of 50 %": ([("diff", LONG)], [("transformer", LONG)]),
    "diff − transformer, warm-up of 1 %": ([("diff", SHORT)], [("transformer", SHORT)]),
    "diff − transformer, change from 50 % to 1 %": (
        [("diff", SHORT), ("transformer", LONG)],
        [("diff", LONG), ("transformer", SHORT)],
    ),
    "loss of transformer, change from 50 % to 1 %": ([("transformer", SHORT)], [("transformer", LONG)]),
    "loss of diff, change from 50 % to 1 %": ([("diff", SHORT)], [("diff", LONG)]),
    "diff − zero-norm, warm-up of 50 %": ([("diff", LONG)], [("zero-norm", LONG)]),
    "diff − zero-norm, warm-up of 1 %": ([("diff", SHORT)], [("zero-norm", SHORT)]),
}


class WarmupContrast(NamedTuple):
    """A contrast of question 2: the difference for each seed, and the verdict of its planned test, if there is one."""

    values: Sequence[float]
    verdict: str


def warmup_contrasts(records: Sequence[Record], label: str) -> dict[str, WarmupContrast]:
    """Return optimizer → contrast, for a label of `WARMUP_ROWS`. An optimizer without these runs is left out."""
    trained = set(map(cell_of, records))
    found = {}
    for optimizer, (changes, families) in OPTIMIZERS.items():
        plus, minus = (tuple(f"{arm}{changes}{warmup}" for arm, warmup in cells) for cells in WARMUP_ROWS[label])
        if trained.issuperset((*plus, *minus)):
            contrast = Contrast(label, plus, minus)
            verdicts = [planned_verdict(records, family, contrast) for family in families]
            planned = next((verdict for verdict in verdicts if verdict != NOT_PLANNED), NOT_PLANNED)
            found[optimizer] = WarmupContrast(contrast_values(records, contrast, TEST_LOSS), planned)
    return found


def warmup_table(records: Sequence[Record]) -> str:
    """Return the table of question 2: a row for each label, and a difference and a verdict for each optimizer."""
    rows = []
    for label in WARMUP_ROWS:
        found = warmup_contrasts(records, label)
        cells = (
            (signed(estimate(of.values)), of.verdict) if (of := found.get(name)) else ("not run", "")
            for name in OPTIMIZERS
        )
        rows.append([label, *itertools.chain(*cells)])
    header = (f"{name}, {column}" for name in OPTIMIZERS for column in ("bits per byte", "verdict"))
    return markdown(["what is compared", *header], rows)


PLACEHOLDERS = {
    "differences": differences_table,
    "main_differences": main_differences_table,
    "second_map": second_map_table,
    "warmup_table": warmup_table,
}
