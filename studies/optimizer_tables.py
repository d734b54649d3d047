"""Table and values of docs/exploratory.md on warm-up and optimizers (studies/optimizer_study.py).

This module has no command: `python studies/results.py render` calls the functions in `PLACEHOLDERS`. Losses and
their differences are in bits per byte of the validation text.
"""

from collections.abc import Sequence

from studies.optimizer_study import OPTIMIZERS, WARMUPS, Cell, cells
from studies.study_records import VALIDATION_LOSS, Record, estimate, markdown, provenance, signed

TITLES = {"adamw": "AdamW", "muon": "Muon, both maps together", "muon-groups": "Muon, each map by itself"}


def runs_of(records: Sequence[Record], cell: Cell) -> list[Record]:
    """Return the runs of a cell, in the order of their seeds."""
    fields = dict(OPTIMIZERS[cell.optimizer]) | {"optimizer.warmup_steps": f"{cell.warmup:g}"}
    rate = "optimizer.learning_rate"
    found = [r for r in records if r["arm"] == cell.arm and r["changes"] == fields | {rate: r["changes"][rate]}]
    return sorted(found, key=lambda r: r["seed"])


def differences(records: Sequence[Record], cell: Cell, reference: Cell) -> list[float]:
    """Return by how much each run of a cell is above the run of the reference cell with the same seed."""
    pairs = zip(runs_of(records, cell), runs_of(records, reference), strict=True)
    return [own["numbers"][VALIDATION_LOSS] - other["numbers"][VALIDATION_LOSS] for own, other in pairs]


def warmup_sensitivity(records: Sequence[Record], arm: str, optimizer: str) -> list[float]:
    """Return by how much the loss of each seed is higher with the shortest warm-up than with the longest."""
    return differences(records, *(Cell(arm, optimizer, warmup) for warmup in (min(WARMUPS), max(WARMUPS))))


def optimizers_table(records: Sequence[Record]) -> str:
    """Return a table with a row for each arm and optimizer: mean, interval and learning rate by length of warm-up.

    The last column has the mean of `warmup_sensitivity`.
    """
    rows = []
    pairs = dict.fromkeys((cell.arm, cell.optimizer) for cell in cells())
    for arm, optimizer in sorted(pairs, key=lambda pair: list(OPTIMIZERS).index(pair[1])):
        shown = [TITLES[optimizer], arm]
        for warmup in WARMUPS:
            runs = runs_of(records, Cell(arm, optimizer, warmup))
            shown.append(f"{estimate([r['numbers'][VALIDATION_LOSS] for r in runs])} ({runs[0]['learning_rate']:g})")
        rows.append([*shown, signed(estimate(warmup_sensitivity(records, arm, optimizer)))])
    header = ["optimizer", "arm", *(f"{warmup:.0%}" for warmup in WARMUPS), f"{min(WARMUPS):.0%} − {max(WARMUPS):.0%}"]
    return markdown(header, rows) + provenance(records)


def arms_difference_text(records: Sequence[Record], optimizer: str, warmup: str, arm: str, reference: str) -> str:
    """Return the difference between two arms with the same optimizer and warm-up, with its interval."""
    cell, reference_cell = (Cell(name, optimizer, float(warmup)) for name in (arm, reference))
    return signed(estimate(differences(records, cell, reference_cell)))


def optimizers_difference_text(records: Sequence[Record], arm: str, warmup: str, optimizer: str, reference: str) -> str:
    """Return the difference between two optimizers of an arm with the same warm-up, with its interval."""
    cell, reference_cell = (Cell(arm, name, float(warmup)) for name in (optimizer, reference))
    return signed(estimate(differences(records, cell, reference_cell)))


def sensitivity_text(records: Sequence[Record], optimizer: str, arm: str) -> str:
    """Return the mean of `warmup_sensitivity` with its interval."""
    return signed(estimate(warmup_sensitivity(records, arm, optimizer)))


def sensitivity_difference_text(records: Sequence[Record], arm: str, optimizer: str, reference: str) -> str:
    """Return how much higher `warmup_sensitivity` is with one optimizer than with another, with its interval."""
    pairs = zip(*(warmup_sensitivity(records, arm, name) for name in (optimizer, reference)), strict=True)
    return signed(estimate([own - other for own, other in pairs]))


PLACEHOLDERS = {
    "optimizers": optimizers_table,
    "arms_difference": arms_difference_text,
    "optimizers_difference": optimizers_difference_text,
    "warmup_gain": sensitivity_text,
    "sensitivity_difference": sensitivity_difference_text,
}
