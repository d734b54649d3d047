"""Wall time of a run by activity, such as training, evaluation and saving, over all attempts."""

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
STEPS = ("train", "data_wait")  # Their time counts as "lost_work" if a later attempt repeats the steps.


class Goodput:
    """A stopwatch that is always in exactly one section. Goodput is the share of the wall time in section "train"."""

    def __init__(self, began: float, clock: Callable[[], float] = time.perf_counter):
        """Start in section "init", which began when `clock` returned `began`, in seconds."""
        self._clock, self._began, self._since, self._section = clock, began, began, "init"
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._earlier_wall = 0.0  # Wall time of earlier attempts, in seconds.

    def switch(self, section: str) -> str:
        """Begin a section, and return the name of the section that ends."""
        now, before = self._clock(), self._section
        self._seconds[before] += now - self._since
        self._since, self._section = now, section
        return before

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time of the block in section `name`, and then return to the previous section."""
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def resume(self, metrics: Path, step: int) -> None:
        """Add the time of the earlier attempts. The time of their steps after `step` counts as lost work.

        `metrics` is the path of metrics.jsonl, which must still have the rows after `step`. The time after its last
        goodput row is estimated from the train rows that follow.
        """
        newest = kept = dict.fromkeys(SECTIONS, 0.0)  # The last goodput row, and the last one that is not after `step`.
        unaccounted, last_step = 0.0, 0  # Seconds of train rows since the last goodput row.
        for row in read_metrics(metrics):
            if row["split"] == "goodput":
                newest, unaccounted = {name: row.get(f"{name}_seconds", 0.0) for name in SECTIONS}, 0.0
                kept = newest if row["step"] <= step else kept
            elif row["split"] == "train":
                # The row has the seconds of one step, which stands for all steps since the previous row.
                unaccounted += row["step_seconds"] * max(row["step"] - last_step, 0)
            if row["split"] not in EVENTS:
                last_step = row["step"]
        lost = unaccounted + sum(newest[name] - kept[name] for name in STEPS)
        earlier = newest | {name: kept[name] for name in STEPS} | {"lost_work": newest["lost_work"] + lost}
        for name, seconds in earlier.items():
            self._seconds[name] += seconds
        self._earlier_wall += sum(newest.values()) + unaccounted

    def row(self) -> dict[str, float]:
        """Return the seconds of each section, the wall time and the goodput of all attempts, for metrics.jsonl."""
        self.switch(self._section)
        wall = self._earlier_wall + self._since - self._began
        seconds = {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        return {**seconds, "wall_seconds": wall, "goodput": self._seconds["train"] / wall if wall > 0 else 0.0}


def format_goodput(row: dict[str, float]) -> str:
    """Return a line with a result of `Goodput.row`: the wall time and the share of each section."""
    wall = row["wall_seconds"]
    shares = (f"{text} {row[f'{name}_seconds'] / max(wall, 1e-9):.1%}" for name, text in SECTIONS.items())
    return f"wall time of the run: {wall:,.1f} s: {', '.join(shares)}"
