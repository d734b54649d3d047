"""Detection of bad steps in training, and the stop or rewind that follows them.

A step is bad if its loss is a spike, or if the train step (`state.py`) skipped the update because the loss or the
gradient was not finite. All processes make the same decisions, because the metrics of a step are replicated.

After enough bad steps in a row, the run either stops or rewinds. A rewind continues from an earlier checkpoint, deletes
all later ones, and skips the data of the bad steps and of `guards.skip_steps` more.

A resumed run makes the same decisions as an uninterrupted run, for three reasons:

1. No checkpoint is written after a bad step, so a checkpoint never has to store counts of bad steps.
2. A rewind uses only regular checkpoints (`retention.is_regular`), not one that a signal triggered.
3. A rewind first deletes the later checkpoints, and then adds an entry to the journal, which a restart reads. A run
   that is killed before the entry is written reaches the same bad steps and the same rewind again.
"""

import collections
import dataclasses
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from difftx.config import Config, GuardsConfig
from difftx.data.loader import Loader
from difftx.errors import EXIT_FAILED, UserError, shown
from difftx.files import UNLOCKED, Owner
from difftx.json_files import JsonLines, parse_json_lines, schema_error, with_sha256, without_sha256
from difftx.parallel.multihost import barrier, decide_on_primary, is_primary, print_on_primary
from difftx.storage.paths import AnyPath, is_bucket
from difftx.training.checkpoint.checkpointer import DECISION_SECONDS, Checkpointer

MAD_OF_NORMAL = 1.4826  # Ratio of standard deviation to median absolute deviation (MAD) of a normal distribution.


@dataclasses.dataclass(frozen=True)
class BadSteps:
    """A series of consecutive bad steps that has reached a limit of the config."""

    first: int
    last: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Rewind:
    """A decision to continue from an earlier checkpoint."""

    bad: BadSteps
    examples: int  # Number of the example, counted from the start of the run, with which training continues.
    number: int  # Number of this rewind in the run, starting with 1.


class Guard:
    """A counter of consecutive bad steps. It also stores recent losses, to detect spikes."""

    def __init__(self, config: GuardsConfig):
        self._config = config
        self._losses: collections.deque[float] = collections.deque(maxlen=config.spike_window_steps)
        self._first_bad: int | None = None
        self._skipped = self._spikes = 0  # Numbers of skipped updates and of spikes since the first bad step.
        self.rewinds = 0  # Number of rewinds of the run so far.
        # First step after which a regular checkpoint was due, even if it was not saved or has been deleted. In a
        # branch, the step at which the branch begins.
        self.first_regular: int | None = None
        self.tripped: BadSteps | None = None

    @property
    def last_step_is_good(self) -> bool:
        """Whether the last step was good, so that a checkpoint may be written."""
        return self._first_bad is None and self.tripped is None

    def observe(self, step: int, loss: float, *, skipped: bool) -> None:
        """Decide whether a step is bad. If consecutive bad steps reach a limit, set `tripped`."""
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

    def note_regular_step(self, step: int) -> None:
        """Record that a regular checkpoint is to be saved after this step."""
        if self.first_regular is None:
            self.first_regular = step

    def state(self) -> dict[str, Any]:
        """Return the JSON state for `restore`, which has no counts of bad steps. Call this only after a good step."""
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
        return deviation > 0 and loss - median > threshold * deviation  # A deviation of 0 gives no scale.


class GuardJournal:
    """The file `<workdir>/journal.jsonl`, with an entry per rewind or stop. Only the primary process writes it."""

    def __init__(self, workdir: AnyPath, owner: Owner = UNLOCKED):
        """Read the file. `owner` is that of the `Run`."""
        self._file = JsonLines(workdir / "journal.jsonl", owner)
        self.entries: list[dict[str, Any]] = []
        lines = parse_json_lines(self._file.content())
        for number, entry in enumerate(map(without_sha256, lines), start=1):
            if entry is None or not _is_valid(entry):
                raise UserError(f"{self._file.path}: line {number} is not a valid entry; delete that line")
            self.entries.append(entry)
        if is_bucket(workdir) and is_primary():
            self._write()  # From now on, a previous owner of the run can no longer replace the file.

    def add(self, event: str, step: int, bad: BadSteps, attempt: int, **details: Any) -> None:
        steps = [bad.first, bad.last]
        self.entries.append(
            {"event": event, "step": step, "reason": bad.reason, "bad_steps": steps, "attempt": attempt, **details}
        )
        if is_primary():
            self._write()

    def _write(self) -> None:
        self._file.rewrite(map(with_sha256, self.entries))

    def add_rewind(self, rewind: Rewind, step: int, examples: int, attempt: int, pinned: dict[str, Any]) -> None:
        """Record a rewind to the checkpoint of `step`, which was saved after `examples` training examples.

        `pinned` has the values that must not change when the run starts again (`pinned_values`). The journal stores
        them as "kept".
        """
        skipped = [examples, rewind.examples]
        self.add("rewind", step, rewind.bad, attempt, skipped_examples=skipped, rewinds=rewind.number, kept=pinned)

    def check_earlier(self, step: int, guard: Guard, pinned: dict[str, Any]) -> None:
        """Print a line if `resume` will apply a rewind of an earlier attempt.

        Raise `UserError` if the run starts from step 0 and a value in `pinned` differs from that in the rewind's entry.
        At a later step, `starting_state` has compared the values with those of the checkpoint.
        """
        if (entry := self._last_rewind(step, guard)) is None:
            return
        pairs = {name: (entry["kept"].get(name), value) for name, value in pinned.items()}
        changes = [f"{name}: {shown(old)} → {shown(new)}" for name, (old, new) in pairs.items() if old != new]
        if step == 0 and changes:
            raise UserError(
                f"{self._file.path}: its rewind {entry['rewinds']} to step 0 is that of another config or other data: "
                f"{', '.join(changes)}; use a new --workdir, or delete {self._file.path} to start without its rewinds"
            )
        print_on_primary(
            f"rewind {entry['rewinds']} of an earlier attempt applies: training continues with example "
            f"{entry['skipped_examples'][1]}"
        )

    def resume(self, step: int, guard: Guard, loader: Loader) -> None:
        """Apply the last rewind to `step`, if any, to a guard and a loader that were restored from that checkpoint."""
        if (entry := self._last_rewind(step, guard)) is not None:
            guard.rewinds = entry["rewinds"]
            loader.restore(loader.state() | {"examples": entry["skipped_examples"][1]})

    def _last_rewind(self, step: int, guard: Guard) -> dict[str, Any] | None:
        """Return the last rewind to `step`, unless the checkpoint from which `guard` was restored includes it."""
        rewinds = [entry for entry in self.entries if entry["event"] == "rewind" and entry["step"] == step]
        return rewinds[-1] if rewinds and rewinds[-1]["rewinds"] > guard.rewinds else None


def act_on_bad_steps(
    guard: Guard, *, config: Config, journal: GuardJournal, checkpointer: Checkpointer, examples: int, attempt: int
) -> Rewind | int:
    """Prepare a rewind and return it, or record that the run stops and return the exit code.

    All processes must call this after `guard` has tripped and `checkpointer` was closed. `examples` is the number of
    examples that the run had consumed after the last bad step.
    """
    bad, why, target = guard.tripped, None, None
    assert bad is not None
    if config.guards.on_bad_steps == "stop":
        why = "guards.on_bad_steps is stop"
    elif guard.rewinds >= config.guards.max_rewinds:
        why = f"rewound before: {guard.rewinds} (guards.max_rewinds={config.guards.max_rewinds})"
    else:
        every_steps = config.checkpoint.every_steps
        earliest = min(every_steps, guard.first_regular or every_steps)
        from_zero = config.checkpoint.branch_from is None
        target = decide_on_primary(  # Other processes may list checkpoints that the primary process deletes meanwhile.
            lambda: rewind_target(checkpointer.regular_steps(), bad.first, earliest, from_zero=from_zero),
            DECISION_SECONDS,
        )
    if why is None and target is None:
        why = f"no regular checkpoint from before step {bad.first - 1} is left (checkpoint.keep)"
    where = f"steps {bad.first} to {bad.last}: {bad.reason}"
    if why is not None or target is None:
        journal.add("stop", bad.last, bad, attempt)
        if is_primary():
            print(f"error: {where}; stopped, {why}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    rewind = Rewind(bad, examples + config.guards.skip_steps * config.batch_rows, guard.rewinds + 1)
    if is_primary():
        if target == 0:
            checkpointer.record_saved(0)
        checkpointer.remove_after(target)
    barrier(f"rewind {rewind.number}", config.multihost.barrier_timeout_seconds)
    print_on_primary(f"{where}; rewinding to step {target}; training continues with example {rewind.examples}")
    return rewind


def rewind_target(newest_first: Iterable[int], first_bad: int, earliest: int, *, from_zero: bool = True) -> int | None:
    """Return the step of the newest checkpoint to rewind to, 0 for the start of the run, or None if none is left.

    `newest_first` has the steps of the regular checkpoints, and `earliest` is the earliest step at which the run may
    have had one. `from_zero` is False for a branch, which starts with a checkpoint.
    """
    # A checkpoint right before the first bad step does not qualify, because its parameters may have caused that step.
    for step in newest_first:
        if step + 1 < first_bad:
            return step
    # The start of the run is the target only if no checkpoint from before the bad steps can have been deleted.
    return 0 if from_zero and first_bad <= earliest + 1 else None


def _is_valid(entry: dict[str, Any]) -> bool:
    if entry.get("event") == "rewind":
        shape = {"step": int, "rewinds": int, "skipped_examples": [int], "kept": dict}
        return schema_error(entry, shape) is None and len(entry["skipped_examples"]) == 2
    return "event" in entry
