"""Runs of the study of warm-up and optimizers in docs/exploratory.md: models of 0.1M parameters on books.

    python studies/optimizer_study.py --out=runs/study/optimizers [--jobs=2]

A cell of the study is an arm, an optimizer and a length of the warm-up. Each cell gets its own learning rate, tuned on
one seed. Three other seeds then train at the best rate, and only these are reported. Each job takes one core; all cells
take two hours of one core. An interrupted study resumes where it stopped. The script prints the best rate of each cell.

    python studies/results.py collect --study=optimizers runs/study/optimizers/*/reported
    python studies/results.py collect --study=optimizers-rates runs/study/optimizers/*/rate-*
"""

import concurrent.futures
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.errors import run_command
from studies.tuning import (
    EXPLORATORY_SEEDS,
    EXPLORATORY_TUNED_SEED,
    best_rate,
    seed_axis,
    study_parser,
    sweep,
)

ARMS = ("transformer", "diff", "diff_v2")
# Optimizer → fields of the config that select it.
OPTIMIZERS: Mapping[str, Mapping[str, str]] = {
    "adamw": {},
    "muon": {"optimizer.name": "muon"},
    "muon-groups": {"optimizer.name": "muon", "optimizer.muon.split": "groups"},
}
# Optimizer → learning rates with which `best_rate` begins.
FIRST_RATES: Mapping[str, Sequence[float]] = {
    "adamw": (4e-3, 8e-3),
    "muon": (1.6e-2, 3.2e-2),
    "muon-groups": (1.6e-2, 3.2e-2),
}
WARMUPS = (0.01, 0.05, 0.2, 0.5)  # Shares of the steps.


class Cell(NamedTuple):
    """A cell of the study."""

    arm: str
    optimizer: str
    warmup: float  # Share of the steps.

    @property
    def folder(self) -> str:
        """Name of the folder of the cell's runs."""
        return f"{self.arm}-{self.optimizer}-{self.warmup:g}"


def cells() -> list[Cell]:
    """Return all cells. "muon-groups" only trains `diff`, because only its projections have an axis of groups."""
    every = itertools.starmap(Cell, itertools.product(ARMS, OPTIMIZERS, WARMUPS))
    return [cell for cell in every if cell.optimizer != "muon-groups" or cell.arm == "diff"]


def main(arguments: Sequence[str]) -> int:
    """Train all cells; return the exit code."""
    args = study_parser(__doc__).parse_args(arguments)
    todo = cells()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        trained = [pool.submit(train_cell, cell, args.out / cell.folder) for cell in todo]
        for number, (cell, future) in enumerate(zip(todo, trained, strict=True), 1):
            print(f"[{number}/{len(todo)}] {cell.folder}: rate {future.result():g}", flush=True)
    return 0


def train_cell(cell: Cell, folder: Path) -> float:
    """Tune a cell's learning rate, train the reported seeds, and return the rate."""

    def train(rate: float, seeds: Sequence[int], out: Path) -> float:
        fields = {"optimizer.warmup_steps": f"{cell.warmup:g}", "optimizer.learning_rate": f"{rate:g}"}
        grid = ["task=books", f"arm={cell.arm}", seed_axis(seeds)]
        grid += [f"{name}={value}" for name, value in fields.items()]
        flags = [f"--config.{name}={value}" for name, value in OPTIMIZERS[cell.optimizer].items()]
        return sweep(out, "configs/toy.py", grid, [*flags, "--config.eval.suites=loss"])

    best = best_rate(
        FIRST_RATES[cell.optimizer], lambda rate: train(rate, (EXPLORATORY_TUNED_SEED,), folder / f"rate-{rate:g}")
    )
    train(best, EXPLORATORY_SEEDS, folder / "reported")
    return best


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
