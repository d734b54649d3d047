"""Table and values of docs/exploratory.md on warm-up and optimizers (benchmarks/optimizer_study.py)."""

from collections.abc import Sequence

from benchmarks.optimizer_study import OPTIMIZERS, WARMUPS, Cell, cells
from benchmarks.results_tables import Record, estimate, markdown, provenance, signed

NUMBER = "loss/bits_per_byte"
TITLES = {"adamw": "AdamW", "muon": "Muon, both maps together", "muon-groups": "Muon, each map by itself"}


def runs_of(records: Sequence[Record], cell: Cell) -> list[Record]:
    """Return the runs of a cell, in the order of their seeds."""
    fields = dict(OPTIMIZERS[cell.optimizer]) | {"optimizer.warmup_fraction": f"{cell.warmup:g}"}
    rate = "optimizer.learning_rate"
    found = [r for r in records if r["arm"] == cell.arm and r["changes"] == fields | {rate: r["changes"][rate]}]
    return sorted(found, key=lambda r: r["seed"])


def difference(records: Sequence[Record], one: Cell, other: Cell) -> list[float]:
    """Return by how many bits per byte each run of a cell is above that of another cell with the same seed."""
    pairs = zip(runs_of(records, one), runs_of(records, other), strict=True)
    return [a["numbers"][NUMBER] - b["numbers"][NUMBER] for a, b in pairs]


def sensitivity(records: Sequence[Record], arm: str, optimizer: str) -> list[float]:
    """Return by how much the loss of each seed is higher with the shortest warm-up than with the longest."""
    return difference(records, *(Cell(arm, optimizer, warmup) for warmup in (min(WARMUPS), max(WARMUPS))))


def table(records: Sequence[Record]) -> str:
    """Return a table with a row for each arm and optimizer: mean, interval and learning rate by length of warm-up."""
    rows = []
    pairs = dict.fromkeys((cell.arm, cell.optimizer) for cell in cells())
    for arm, optimizer in sorted(pairs, key=lambda pair: list(OPTIMIZERS).index(pair[1])):
        shown = [TITLES[optimizer], arm]
        for warmup in WARMUPS:
            runs = runs_of(records, Cell(arm, optimizer, warmup))
            shown.append(f"{estimate([r['numbers'][NUMBER] for r in runs])} ({runs[0]['learning_rate']:g})")
        rows.append([*shown, signed(estimate(sensitivity(records, arm, optimizer)))])
    header = ["optimizer", "arm", *(f"{warmup:.0%}" for warmup in WARMUPS), f"{min(WARMUPS):.0%} − {max(WARMUPS):.0%}"]
    return markdown(header, rows) + provenance(records)


def arms_difference(records: Sequence[Record], optimizer: str, warmup: str, arm: str, reference: str) -> str:
    """Return the difference between two arms with the same optimizer and warm-up, with its interval."""
    ones = (Cell(name, optimizer, float(warmup)) for name in (arm, reference))
    return signed(estimate(difference(records, *ones)))


def optimizers_difference(records: Sequence[Record], arm: str, warmup: str, optimizer: str, reference: str) -> str:
    """Return the difference between two optimizers of an arm with the same warm-up, with its interval."""
    ones = (Cell(arm, name, float(warmup)) for name in (optimizer, reference))
    return signed(estimate(difference(records, *ones)))


def sensitivity_text(records: Sequence[Record], optimizer: str, arm: str) -> str:
    """Return `sensitivity` as text, with its interval."""
    return signed(estimate(sensitivity(records, arm, optimizer)))


def sensitivity_difference(records: Sequence[Record], arm: str, optimizer: str, reference: str) -> str:
    """Return by how much an arm's `sensitivity` is higher with one optimizer than with another, with its interval."""
    pairs = zip(*(sensitivity(records, arm, name) for name in (optimizer, reference)), strict=True)
    return signed(estimate([one - other for one, other in pairs]))


PLACEHOLDERS = {
    "optimizers": table,
    "arms_difference": arms_difference,
    "optimizers_difference": optimizers_difference,
    "warmup_gain": sensitivity_text,
    "sensitivity_difference": sensitivity_difference,
}
