"""The wall time of a run over all its attempts, by section: rows of split "goodput" in metrics.jsonl, and a table."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rich.table

from difftx.training.metrics import read_metrics

# Productive work first, then overhead, then work that a later attempt repeated.
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
STEPS = ("train", "data_wait")  # Sections that become lost work when a later attempt repeats their steps.


class Goodput:
    """A clock that runs in one section at a time, so that the sections add up to the wall time."""

    def __init__(self, began: float, clock: Callable[[], float] = time.perf_counter):
        """Start in section "init"; `began` is the value of `clock` at its beginning."""
        self._clock, self._began, self._since, self._section = clock, began, began, "init"
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._earlier_wall = 0.0

    def switch(self, section: str) -> str:
        """Switch to a section and return the previous one."""
        now, before = self._clock(), self._section
        self._seconds[before] += now - self._since
        self._since, self._section = now, section
        return before

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time of the block as section `name`, then return to the previous section."""
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def resume(self, metrics: Path, step: int) -> None:
        """Add the time of earlier attempts. Their steps after `step`, where this attempt continues, count as lost work.

        For an attempt that was killed, the train rows after its last goodput row give the remaining time.

        Args:
            metrics: Path of metrics.jsonl, before the rows after `step` are dropped. The file may be absent.
            step: 0 or the restored step.
        """
        newest = kept = dict.fromkeys(SECTIONS, 0.0)
        unaccounted, last_step = 0.0, 0
        for row in read_metrics(metrics)[0]:
            if row["split"] == "goodput":
                numbers: dict[str, Any] = {name: row.get(f"{name}_seconds") for name in SECTIONS}
                if not all(isinstance(number, int | float) for number in numbers.values()):
                    continue  # The line is corrupt.
                newest, unaccounted = numbers, 0.0
                kept = newest if row["step"] <= step else kept
            elif row["split"] == "train":
                # `step_seconds` measures one step, and rows may be several steps apart.
                unaccounted += row["step_seconds"] * max(row["step"] - last_step, 0)
            last_step = row["step"]
        lost = unaccounted + sum(newest[name] - kept[name] for name in STEPS)
        earlier = newest | {name: kept[name] for name in STEPS} | {"lost_work": newest["lost_work"] + lost}
        for name, seconds in earlier.items():
            self._seconds[name] += seconds
        self._earlier_wall += sum(newest.values()) + unaccounted

    def row(self) -> dict[str, float]:
        """Return the seconds of each section, the total seconds, and the share of training steps (0 to 1)."""
        self.switch(self._section)
        wall = self._earlier_wall + self._since - self._began
        seconds = {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        return {**seconds, "wall_seconds": wall, "goodput": self._seconds["train"] / wall if wall > 0 else 0.0}


def format_goodput(row: dict[str, float]) -> rich.table.Table:
    """Format a row of `Goodput.row` as a table for a terminal."""
    wall = row["wall_seconds"]
    table = rich.table.Table(title="wall time of the run")
    table.add_column("")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, text in [*SECTIONS.items(), ("wall", "all")]:
        seconds = row[f"{name}_seconds"]
        table.add_row(text, f"{seconds:,.1f}", f"{seconds / wall:.1%}" if wall > 0 else "-")
    return table
