"""What becomes of steps that go wrong.

The train step itself skips an update whose loss or gradient is not finite (`state.py`). On the host a `Guard` judges
each step's numbers, one step late as all metrics. They are replicated, so every process comes to the same verdict.

A step is bad if its update was skipped, or if its loss is a spike. After enough bad steps in a row the run stops, or is
rewound: to the last regular checkpoint whose next step was good, past the data of the bad steps and some more. Whatever
was dispatched after the bad steps goes with them, and so do later checkpoints.

A continued run decides as an uninterrupted one would, because

1. no checkpoint is written between bad steps, so that the guard's state in one is the losses of its window alone;
2. only regular checkpoints, at multiples of `checkpoint.every_steps`, are gone back to, not one that a signal left;
3. a rewind first deletes the checkpoints after its target and is then noted in the journal, which a restart reads:
   killed before the note, the run comes to the same bad steps and the same rewind again.
"""

import collections
import dataclasses
import json
import statistics
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from difftx.config import Config, GuardsConfig
from difftx.data.loader import Loader
from difftx.errors import EXIT_FAILED, UserError
from difftx.files import json_sha256, read_file, write_atomically
from difftx.parallel.multihost import barrier, is_lead, say
from difftx.training.checkpoint import Checkpointer
from difftx.training.retention import remove

MAD_OF_NORMAL = 1.4826  # Standard deviation of a normal distribution over its median absolute deviation.


@dataclasses.dataclass(frozen=True)
class BadSteps:
    """Bad steps in a row, more than the config bears."""

    first: int
    last: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Rewind:
    """A decision to go on from an earlier checkpoint."""

    bad: BadSteps
    target: int  # Step of the checkpoint; 0: the start.
    examples: int  # Where the data go on: examples since the run's first.
    number: int  # In the run, from 1.


class Guard:
    """Counts bad steps and keeps the losses that spikes are measured by."""

    def __init__(self, config: GuardsConfig):
        self._config = config
        self._losses: collections.deque[float] = collections.deque(maxlen=config.spike_window_steps)
        self._first_bad: int | None = None
        self._skipped = self._spikes = 0  # Since the first bad step.
        self.rewinds = 0  # On the way to this step.
        self.tripped: BadSteps | None = None

    @property
    def calm(self) -> bool:
        """Whether the last step was good, and a checkpoint may be written."""
        return self._first_bad is None and self.tripped is None

    def observe(self, step: int, loss: float, *, skipped: bool) -> None:
        """Judge the next step; sets `tripped` when it is one bad step too many."""
        if not skipped and not self._is_spike(loss):
            self._losses.append(loss)
            self._first_bad, self._skipped, self._spikes = None, 0, 0
            return
        if self._first_bad is None:
            self._first_bad = step
        self._skipped += skipped
        self._spikes += not skipped
        reasons = {
            f"{self._skipped} updates skipped, loss or gradient not finite": self._skipped >= self._config.max_skipped,
            f"{self._spikes} losses far above the median": self._spikes >= self._config.spike_patience_steps,
        }
        for reason, applies in reasons.items():
            if applies and self.tripped is None:
                self.tripped = BadSteps(self._first_bad, step, reason)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON; only between good steps is it all there is."""
        return {"losses": list(self._losses), "rewinds": self.rewinds}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self._losses.extend(state["losses"])
        self.rewinds = state["rewinds"]

    def _is_spike(self, loss: float) -> bool:
        """Whether the loss is far above the window's median, by its spread; a window that is not full has no say."""
        threshold = self._config.spike_threshold
        if threshold is None or len(self._losses) < self._config.spike_window_steps:
            return False
        median = statistics.median(self._losses)
        deviation = MAD_OF_NORMAL * statistics.median(abs(x - median) for x in self._losses)
        return deviation > 0 and loss - median > threshold * deviation  # No spread, such as all zero: no spikes.


class Journal:
    """`<workdir>/journal.jsonl`: an entry for each rewind and stop. Every process keeps it, process 0 writes it."""

    def __init__(self, workdir: Path):
        self.path = workdir / "journal.jsonl"
        self.entries: list[dict[str, Any]] = []
        for number, line in enumerate((read_file(self.path) or b"").splitlines(), 1):
            try:
                self.entries.append(_check_entry(json.loads(line)))
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
                raise UserError(f"{self.path}: line {number} is no entry of a journal; delete that line") from error

    def add(self, event: str, step: int, bad: BadSteps, attempt: int, **details: Any) -> None:
        """Append an entry; it is on disk when this returns."""
        steps = [bad.first, bad.last]
        self.entries.append(
            {"event": event, "step": step, "reason": bad.reason, "bad_steps": steps, "attempt": attempt, **details}
        )
        if is_lead():
            lines = [json.dumps(entry | {"sha256": json_sha256(entry)}) for entry in self.entries]
            write_atomically(self.path, "".join(line + "\n" for line in lines))

    def add_rewind(self, rewind: Rewind, step: int, examples: int, attempt: int) -> None:
        """Note a rewind to the checkpoint of `step`, which was written when `examples` were consumed."""
        window = [examples, rewind.examples]
        self.add("rewind", step, rewind.bad, attempt, skipped_examples=window, rewinds=rewind.number)

    def resume(self, step: int, guard: Guard, loader: Loader) -> None:
        """Take guard and loader, restored from the checkpoint of `step`, past what the last rewind to it skipped."""
        rewinds = [entry for entry in self.entries if entry["event"] == "rewind" and entry["step"] == step]
        # A checkpoint that was written after a rewind to its own step knows of it.
        if rewinds and rewinds[-1]["rewinds"] > guard.rewinds:
            guard.rewinds = rewinds[-1]["rewinds"]
            loader.restore(loader.state() | {"examples": rewinds[-1]["skipped_examples"][1]})


def act_on_bad_steps(
    guard: Guard, config: Config, journal: Journal, checkpointer: Checkpointer, examples: int, attempt: int
) -> Rewind | int:
    """Prepare a rewind, or note that the run stops, in every process; return the rewind, or the exit code.

    Args:
        guard: which has tripped.
        config: the run's.
        journal: the run's.
        checkpointer: closed.
        examples: consumed after the last bad step.
        attempt: number of this attempt.
    """
    bad, steps = guard.tripped, checkpointer.steps()
    assert bad is not None
    target = rewind_target(steps, bad.first, config.checkpoint.every_steps)
    why = None
    if config.guards.on_bad_steps == "stop":
        why = "guards.on_bad_steps is stop"
    elif guard.rewinds >= config.guards.max_rewinds:
        why = f"rewound before: {guard.rewinds} (guards.max_rewinds={config.guards.max_rewinds})"
    elif target is None:
        why = f"no regular checkpoint from before step {bad.first - 1} is left (checkpoint.keep)"
    where = f"steps {bad.first} to {bad.last}: {bad.reason}"
    if why is not None or target is None:
        journal.add("stop", bad.last, bad, attempt)
        if is_lead():
            print(f"error: {where}; stopped, {why}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    rewind = Rewind(bad, target, examples + config.guards.skip_steps * config.batch_rows, guard.rewinds + 1)
    if is_lead():
        later = sorted((step for step in steps if step > target), reverse=True)  # Killed here, the newest are gone.
        remove(checkpointer.folder / str(step) for step in later)
    barrier(f"rewind {rewind.number}", config.multihost.barrier_timeout_seconds)
    say(f"{where}; back to step {target}, on with example {rewind.examples}")
    return rewind


def rewind_target(steps: Collection[int], first_bad: int, every_steps: int) -> int | None:
    """Return the last regular checkpoint that a good step followed, 0 if there never was one, None if it is gone.

    That of the step before the first bad one may hold what made it bad.
    """
    if first_bad <= every_steps + 1:
        return 0
    return max((step for step in steps if step % every_steps == 0 and step + 1 < first_bad), default=None)


def _check_entry(entry: Any) -> dict[str, Any]:
    """Return the entry without its checksum.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is damaged, or `Journal.resume` could not read it.
    """
    if entry.pop("sha256") != json_sha256(entry):
        raise ValueError("SHA-256")
    if entry["event"] == "rewind":
        for number in (entry["step"], entry["rewinds"], *entry["skipped_examples"]):
            if type(number) is not int or number < 0:
                raise ValueError(number)
        _, _ = entry["skipped_examples"]
    return entry
