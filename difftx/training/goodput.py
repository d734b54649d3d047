"""Measure the wall time of a run by activity, such as training, evaluation and saving, over all attempts."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from difftx.training.metrics import EVENTS, read_metrics

# Name of each section of the wall time → its label.
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
STEPS = ("train", "data_wait")  # If a later attempt repeats a step, its time in these sections counts as "lost_work".


class Goodput:
    """A stopwatch that is always in exactly one section.

    Goodput is the fraction of the wall time in section "train".
    """

    def __init__(self, began: float, clock: Callable[[], float] = time.perf_counter):
        """Start in section "init". `began` is the value of `clock`, in seconds, at the beginning of this section."""
        self._clock, self._began, self._since, self._section = clock, began, began, "init"
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._earlier_wall = 0.0  # Wall time of earlier attempts in seconds.

    def switch(self, section: str) -> str:
        """Begin a section, and return the name of the previous one."""
        now, before = self._clock(), self._section
        self._seconds[before] += now - self._since
        self._since, self._section = now, section
        return before

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block in section `name`, then return to the previous section."""
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def resume(self, metrics: Path, step: int) -> None:
        """Add the time of earlier attempts. The time of their steps after `step` counts as lost work.

        `metrics` is the path of metrics.jsonl, which must still have the rows after `step`. An attempt that was killed
        has no final goodput row, so its last seconds are estimated from its train rows.
        """
        newest = kept = dict.fromkeys(SECTIONS, 0.0)  # The last goodput row, and the last one up to `step`.
        unaccounted, last_step = 0.0, 0  # Seconds in train rows since the last goodput row.
        for row in read_metrics(metrics):
            if row["split"] == "goodput":
                newest, unaccounted = {name: row.get(f"{name}_seconds", 0.0) for name in SECTIONS}, 0.0
                kept = newest if row["step"] <= step else kept
            elif row["split"] == "train":
                # The row has the duration of one step. Assume that all steps since the previous row took as long.
                unaccounted += row["step_seconds"] * max(row["step"] - last_step, 0)
            if row["split"] not in EVENTS:
                last_step = row["step"]
        lost = unaccounted + sum(newest[name] - kept[name] for name in STEPS)
        earlier = newest | {name: kept[name] for name in STEPS} | {"lost_work": newest["lost_work"] + lost}
        for name, seconds in earlier.items():
            self._seconds[name] += seconds
        self._earlier_wall += sum(newest.values()) + unaccounted

    def row(self) -> dict[str, float]:
        """Return a row for metrics.jsonl: seconds per section, wall time and goodput, over all attempts."""
        self.switch(self._section)
        wall = self._earlier_wall + self._since - self._began
        seconds = {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        return {**seconds, "wall_seconds": wall, "goodput": self._seconds["train"] / wall if wall > 0 else 0.0}


def format_goodput(row: dict[str, float]) -> str:
    """Format the result of `Goodput.row` as a line with the wall time and the share of each section."""
    wall = row["wall_seconds"]
    shares = (f"{text} {row[f'{name}_seconds'] / max(wall, 1e-9):.1%}" for name, text in SECTIONS.items())
    return f"wall time of the run: {wall:,.1f} s: {', '.join(shares)}"
