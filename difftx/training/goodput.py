"""Where a run's wall time goes, over all its attempts: rows of split "goodput" in metrics.jsonl, and a table."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rich.table

from difftx.training.metrics import read_metrics

# Work that counts, then what a run needs besides, then work that a later attempt did again.
SECTIONS = {
    "train": "training steps",
    "data_wait": "waiting for data",
    "init": "start, parameters",
    "compile": "compiling the step",
    "restore": "restoring",
    "eval": "evaluation",
    "save": "saving",
    "lost_work": "steps done again",
}
STEPS = ("train", "data_wait")  # What becomes lost work when a later attempt starts before it.


class Goodput:
    """A clock that runs in one section at a time, so that the sections add up to the wall time."""

    def __init__(self, began: float, clock: Callable[[], float] = time.perf_counter):
        """Start in section "init", at `began` of the clock."""
        self._clock, self._began, self._since, self._section = clock, began, began, "init"
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._earlier_wall = 0.0

    def switch(self, section: str) -> str:
        """Go to a section; return the one before."""
        now, before = self._clock(), self._section
        self._seconds[before] += now - self._since
        self._since, self._section = now, section
        return before

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the block's time as `name`, then go on in the section before."""
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def resume(self, metrics: Path, step: int) -> None:
        """Add the time of earlier attempts, of which this one continues at `step`; steps after it were lost.

        Args:
            metrics: a metrics.jsonl, if there is one, not yet cut back to `step`. What an attempt that was killed did
                after its last goodput row is known by its training rows.
            step: 0 or the restored step.
        """
        newest = kept = dict.fromkeys(SECTIONS, 0.0)
        unaccounted, last_step = 0.0, 0
        for row in read_metrics(metrics)[0]:
            if row["split"] == "goodput":
                numbers: dict[str, Any] = {name: row.get(f"{name}_seconds") for name in SECTIONS}
                if not all(isinstance(number, int | float) for number in numbers.values()):
                    continue  # A damaged line.
                newest, unaccounted = numbers, 0.0
                kept = newest if row["step"] <= step else kept
            elif row["split"] == "train":
                # Of several steps one is measured.
                unaccounted += row["step_seconds"] * max(row["step"] - last_step, 0)
            last_step = row["step"]
        lost = unaccounted + sum(newest[name] - kept[name] for name in STEPS)
        earlier = newest | {name: kept[name] for name in STEPS} | {"lost_work": newest["lost_work"] + lost}
        for name, seconds in earlier.items():
            self._seconds[name] += seconds
        self._earlier_wall += sum(newest.values()) + unaccounted

    def row(self) -> dict[str, float]:
        """Return the seconds of each section and in all, and the share of training steps."""
        self.switch(self._section)
        wall = self._earlier_wall + self._since - self._began
        seconds = {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        return {**seconds, "wall_seconds": wall, "goodput": self._seconds["train"] / wall if wall > 0 else 0.0}


def format_goodput(row: dict[str, float]) -> rich.table.Table:
    """Return a row of `Goodput.row` as a table for a terminal."""
    wall = row["wall_seconds"]
    table = rich.table.Table(title="wall time of the run")
    table.add_column("")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, text in [*SECTIONS.items(), ("wall", "all")]:
        seconds = row[f"{name}_seconds"]
        table.add_row(text, f"{seconds:,.1f}", f"{seconds / wall:.1%}" if wall > 0 else "-")
    return table
