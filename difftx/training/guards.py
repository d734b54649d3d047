"""Detect bad training steps, and stop or rewind the run after too many of them.

A step is bad if its loss is a spike, or if the train step (`state.py`) skipped the update because the loss or gradient
was not finite. Metrics are replicated, so all processes make the same decisions.

After enough bad steps in a row, the run either stops or rewinds. A rewind continues from an earlier checkpoint and
deletes all later ones. It skips the data of the bad steps, and the data of the next `guards.skip_steps` steps.

A resumed run makes the same decisions as an uninterrupted run, for three reasons:

1. No checkpoint is written after a bad step, so a checkpoint never has to store counts of bad steps.
2. A rewind only uses regular checkpoints (`retention.is_regular`), not those that a signal triggered.
3. A rewind takes effect when the earlier checkpoint is committed again, with the data position after the bad steps. A
   run that is killed before this commit reaches the same bad steps and the same rewind again. The row in
   `metrics.jsonl` is only for people.
"""

import collections
import dataclasses
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from difftx.config import Config, GuardsConfig
from difftx.parallel.multihost import decide_on_primary, is_primary, print_on_primary
from difftx.training.checkpoint.checkpointer import Checkpointer

MAD_OF_NORMAL = 1.4826  # Ratio of standard deviation to median absolute deviation (MAD) of a normal distribution.


@dataclasses.dataclass(frozen=True)
class BadSteps:
    """Consecutive bad steps that have reached a limit of the config."""

    first: int
    last: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Rewind:
    """A decision to continue from an earlier checkpoint."""

    step: int  # Step of the checkpoint, or 0 for the start of the run.
    examples: int  # Index of the first example after the rewind, counted from the start of the run.
    cause: dict[str, Any]  # Reason, bad steps and attempt, for the row in metrics.jsonl.

    def apply(self, loader: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the loader and guard state for the checkpoint, after the rewinds `earlier` and this one."""
        guard, first = loader["guard"], loader["examples"]
        if guard["rewinds"] and guard["rewinds"][-1]["step"] == self.step:  # A repeated rewind.
            first = guard["rewinds"][-1]["skipped_examples"][0]
        row = {"step": self.step, **self.cause, "skipped_examples": [first, self.examples]}
        rewinds = [*earlier, row | {"rewinds": len(earlier) + 1}]
        return loader | {"examples": self.examples, "guard": guard | {"rewinds": rewinds}}


class Guard:
    """Count consecutive bad steps, and store recent losses to detect spikes."""

    def __init__(self, config: GuardsConfig):
        self._config = config
        self._losses: collections.deque[float] = collections.deque(maxlen=config.spike_window_steps)
        self._first_bad: int | None = None
        self._skipped = self._spikes = 0  # Skipped updates and spikes since the first bad step.
        self.rewinds: list[dict[str, Any]] = []  # Rows in metrics.jsonl about the run's rewinds so far.
        # First step at which a regular checkpoint was due, even if it was not saved or has been deleted since. For a
        # branch, the step at which the branch begins.
        self.first_regular: int | None = None
        self.tripped: BadSteps | None = None

    @property
    def last_step_is_good(self) -> bool:
        """Whether the last step was good, so that a checkpoint may be written."""
        return self._first_bad is None and self.tripped is None

    def observe(self, step: int, loss: float, *, skipped: bool) -> None:
        """Decide whether a step is bad, and set `tripped` if consecutive bad steps reach a limit."""
        if not skipped and not self._is_spike(loss):
            self._losses.append(loss)
            self._first_bad, self._skipped, self._spikes = None, 0, 0
            return
        if self._first_bad is None:
            self._first_bad = step
        self._skipped += skipped
        self._spikes += not skipped
        reason = None
        if self._skipped >= self._config.max_skipped:
            reason = f"{self._skipped} updates skipped, loss or gradient not finite"
        elif self._spikes >= self._config.spike_patience_steps:
            reason = f"{self._spikes} losses far above the median"
        if reason is not None and self.tripped is None:
            self.tripped = BadSteps(self._first_bad, step, reason)

    def state(self) -> dict[str, Any]:
        """Return the JSON state for `restore`. It has no counts of bad steps, so call this only after a good step."""
        return {"losses": list(self._losses), "rewinds": self.rewinds, "first_regular": self.first_regular}

    def restore(self, state: dict[str, Any]) -> None:
        self._losses.extend(state["losses"])
        self.rewinds, self.first_regular = state["rewinds"], state["first_regular"]

    def _is_spike(self, loss: float) -> bool:
        threshold = self._config.spike_threshold
        if threshold is None or len(self._losses) < self._config.spike_window_steps:
            return False
        median = statistics.median(self._losses)
        deviation = MAD_OF_NORMAL * statistics.median(abs(x - median) for x in self._losses)
        return deviation > 0 and loss - median > threshold * deviation  # If the deviation is 0, there is no threshold.


def decide(
    guard: Guard, config: Config, checkpointer: Checkpointer, examples: int, attempt: int
) -> Rewind | dict[str, Any]:
    """Return the rewind that follows the bad steps, or the row for metrics.jsonl if the run must end.

    All processes must call this after `guard` has tripped and the last save has ended. `examples` is the number of
    examples that the run had consumed after the last bad step.
    """
    bad, target = guard.tripped, None
    assert bad is not None
    if config.guards.on_bad_steps == "stop":
        why = "guards.on_bad_steps is stop"
    elif len(guard.rewinds) >= config.guards.max_rewinds:
        why = f"rewound before: {len(guard.rewinds)} (guards.max_rewinds={config.guards.max_rewinds})"
    else:
        every_steps = config.checkpoint.every_steps
        earliest = min(every_steps, guard.first_regular or every_steps)
        from_zero = config.checkpoint.branch_from is None
        why = f"no regular checkpoint from before step {bad.first - 1} is left (checkpoint.keep)"
        # Only one process decides, because another could list a checkpoint while it is being deleted.
        target = decide_on_primary(
            lambda: rewind_target(checkpointer.regular_steps(), bad.first, earliest, from_zero=from_zero)
        )
    where = f"steps {bad.first} to {bad.last}: {bad.reason}"
    row = {"reason": bad.reason, "bad_steps": [bad.first, bad.last], "attempt": attempt}
    if target is None:
        if is_primary():
            print(f"error: {where}; stopped, {why}", file=sys.stderr, flush=True)
        return row | {"step": bad.last}
    skipped_to = examples + config.guards.skip_steps * config.batch_rows
    print_on_primary(f"{where}; rewinding to step {target}; training continues with example {skipped_to}")
    return Rewind(target, skipped_to, row | {"attempt": attempt + 1})


def rewind_target(newest_first: Iterable[int], first_bad: int, earliest: int, *, from_zero: bool) -> int | None:
    """Return the step to rewind to: that of the newest suitable checkpoint, 0 to start over, or None if there is none.

    `newest_first` has the steps of the regular checkpoints. `earliest` is the first step at which the run may have had
    one. `from_zero` is False for a branch, because it starts from a checkpoint.
    """
    # Skip a checkpoint right before the first bad step, because its parameters may have caused that step.
    for step in newest_first:
        if step + 1 < first_bad:
            return step
    # Start over only if the run never had a checkpoint from before the bad steps. If it had one that is deleted, there
    # is no target.
    return 0 if from_zero and first_bad <= earliest + 1 else None
