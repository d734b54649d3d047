"""Save, find and delete the checkpoints of a run: train state, data loader state and config.

A background thread saves a checkpoint (`protocol.py`). All processes write arrays, but only the primary process
commits, verifies, renames and deletes checkpoints.
"""

import concurrent.futures
import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jax

from difftx.config import CheckpointConfig, Config
from difftx.errors import RunError, UnreadableError, UserError
from difftx.files import UNLOCKED, Owner, resolved
from difftx.parallel.multihost import DECISION_SECONDS, agree, decide_on_primary, is_primary, print_on_primary
from difftx.storage.paths import AnyPath, is_bucket
from difftx.training.checkpoint import protocol, retention
from difftx.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    describe_arrays,
    manifest_text,
    quarantined_in,
    read_manifest,
    steps_in,
    verified,
    why_invalid,
)
from difftx.training.state import TrainState


class Checkpoints:
    """Read-only access to the checkpoints of the run in `workdir`. There is one folder per step."""

    def __init__(self, workdir: AnyPath, run_id: str | None = None):
        """Open the folder of checkpoints. If `run_id` is set, the checkpoints of other runs count as invalid."""
        self.workdir, self.folder, self._run_id = workdir, resolved(workdir) / "checkpoints", run_id
        self._verifies_content = True

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order. The checkpoints may be corrupt."""
        return steps_in(self.folder)

    def newest(self) -> int | None:
        """Return the step of the newest valid checkpoint, or None if the run has no checkpoints at all.

        Raise `UserError` if checkpoints exist but none is valid, and `UnreadableError` if a checkpoint cannot be read.
        """
        return decide_on_primary(self.find_newest)

    def read(self, step: int) -> Manifest:
        """Return the manifest of `step` without verifying the checkpoint's files. All processes must call this."""
        what, read = f"checkpoint {step}", functools.partial(read_manifest, self.folder / str(step))
        return agree(what, read, lambda found: {f"SHA-256 of {what}": found.sha256}, DECISION_SECONDS)

    def read_newest[T](self, read: Callable[[Manifest], T]) -> T | None:
        """Return `read(manifest)` for the newest valid checkpoint, or None if the run has no checkpoints."""
        step = self.newest()
        return None if step is None else read(self.read(step))

    def require_valid(self, step: int) -> None:
        """Raise `UserError` if the checkpoint of `step` does not exist or is corrupt."""

        def check() -> None:
            existing = f"{self.folder} has {', '.join(map(str, self.steps())) or 'none'}"
            if step not in self.steps():
                raise UserError(f"step {step}: no such checkpoint; {existing}")
            if why := self._why_invalid(step):
                raise UserError(f"step {step}: the checkpoint does not verify: {why}; {existing}")

        decide_on_primary(check)

    def find_newest(self) -> int | None:
        """Find the step that `newest` returns, without communicating with other processes."""
        reasons, newest = {}, None
        for step in reversed(self.steps()):
            if (why := self._why_invalid(step)) is None:
                newest = step
                break
            reasons[step] = why
        quarantined = quarantined_in(self.folder) if newest is None else []
        for step, why in reasons.items():
            self._skip(step, why)
        invalid = [f"{step}: {why}" for step, why in reasons.items()]
        invalid += [f"{path.parent.name}/{path.name}" for path in quarantined]
        if newest is None and invalid:
            raise UserError(
                f"{self.folder}: there are checkpoints, but none verifies ({'; '.join(invalid)}); restore one from a "
                f"copy, rename the manifest of a quarantined one to {MANIFEST}, or use a new --workdir"
            )
        return newest

    def _skip(self, step: int, why: str) -> None:
        print_on_primary(f"checkpoint {self.folder / str(step)} does not verify: {why}; {self._set_aside(step)}")

    def _set_aside(self, step: int) -> str:
        """Quarantine an invalid checkpoint if this object may write. Return a word for the message about it."""
        return "skipped"

    def _why_invalid(self, step: int) -> str | None:
        folder, content = self.folder / str(step), self._verifies_content
        try:
            return why_invalid(folder, step=step, run_id=self._run_id, content=content)
        except UnreadableError as error:
            raise UnreadableError(
                f"{error}; nothing was renamed: run the same command again once it can be read, or put the checkpoint "
                f"aside: difftx checkpoint quarantine --workdir={self.workdir} --step={step}"
            ) from error


class Checkpointer(Checkpoints):
    """The checkpoints of a run in training: save them, clean up after interrupted saves, and delete old ones."""

    def __init__(
        self,
        workdir: AnyPath,
        config: CheckpointConfig,
        *,
        save_seconds: int = 1200,
        owner: Owner = UNLOCKED,
        run_id: str | None = None,
        on_saved: Callable[[], None] = lambda: None,
    ):
        """Open the folder of checkpoints.

        A save fails after `save_seconds`, for example because another process has died. `owner` and `run_id` are those
        of the `Run`. The primary process calls `on_saved` after each save.
        """
        super().__init__(workdir, run_id)
        self._config, self._save_seconds, self._owner, self._on_saved = config, save_seconds, owner, on_saved
        self._verifies_content = config.verify == "checksums"
        self._saves = 0
        self._save_began, self._last_save_seconds = time.monotonic(), 0.0
        self._background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, concurrent.futures.Future[None]] | None = None
        self._verified: set[int] = set()  # Steps whose checkpoints this process has verified or saved.
        self._failures = 0  # Number of consecutive failed saves.
        # Each attempt creates its own checkpointer, so this id and a step together identify the parameters.
        self._attempt = decide_on_primary(lambda: uuid.uuid4().hex)

    def newest(self) -> int | None:
        """Clean up the folder, and return the step of the newest valid checkpoint, or None if there is no checkpoint.

        The cleanup deletes the files of interrupted saves and removals, and quarantines corrupt checkpoints.
        """
        self.wait()
        step = super().newest()
        if step is not None:
            self._verified.add(step)
        return step

    def regular_steps(self) -> Iterator[int]:
        """Yield the steps of the valid regular checkpoints (`retention.is_regular`), newest first.

        Corrupt checkpoints are quarantined. Only the primary process may call this method.
        """
        for step in reversed(self.steps()):
            why = None if step in self._verified else self._why_invalid(step)
            if why is not None:
                self._skip(step, why)
            elif retention.is_regular(read_manifest(self.folder / str(step))):
                yield step

    def weights_id(self, step: int) -> str:
        """Return an identifier for the parameters after `step`. No other run or attempt has the same one."""
        return f"{self._attempt}/{step}"

    def find_newest(self) -> int | None:
        """Find the step that `newest` returns, without communicating with other processes."""
        if leftovers := protocol.remove_leftovers(self._owner, self.folder):
            steps = ", ".join(leftovers)
            print_on_primary(f"{self.folder}: deleted what an unfinished save or removal of step {steps} has left")
        return super().find_newest()

    def _set_aside(self, step: int) -> str:
        return f"its manifest is now {protocol.quarantine(self._owner, self.folder / str(step)).name}"

    def save(self, state: TrainState, loader: dict[str, Any], config: Config) -> None:
        """Start a save in the background. On return, the arrays may be donated to the next step.

        Do nothing if this process has already saved or verified the checkpoint of this step.

        This method, `record_finished_save`, `save_and_wait` and `close` raise `RunError` after
        `checkpoint.max_failed_saves` consecutive failures.
        """
        self.wait()
        step = int(jax.device_get(state.step))
        if step in self._verified:
            return
        self._saves += 1
        self._save_began = time.monotonic()
        contents, folder = f"{self._attempt}-{self._saves}", self.folder / str(step)
        describe = functools.partial(
            manifest_text,
            step=step,
            weights=self.weights_id(step),
            run_id=self._run_id,
            arrays=describe_arrays(state.parts()),
            config=config,
            loader=loader,
            contents=contents,
        )
        save = protocol.Save(self._owner, folder, contents, state.parts(), self._save_seconds)
        self._saving = step, self._background.submit(self._finish, step, functools.partial(save.write, describe))
        save.copied.wait()

    def is_due(self) -> bool:
        """Return whether a save must start now, so that a kill loses at most `checkpoint.every_minutes` of training."""
        minutes, seconds = self._config.every_minutes, time.monotonic() - self._save_began
        return minutes is not None and seconds + self._last_save_seconds >= 60 * minutes

    def record_finished_save(self) -> None:
        """Record the result of the background save if it has ended."""
        if self._saving is not None and self._saving[1].done():
            self.wait()

    def save_and_wait(self, state: TrainState, loader: dict[str, Any], config: Config) -> None:
        """Save, retry after a failure, and return when the checkpoint is on disk."""
        self.wait()
        step = int(jax.device_get(state.step))
        while not decide_on_primary(lambda: step in self._verified):
            self.save(state, loader, config)
            self.wait()

    def close(self) -> None:
        """Wait for the save in progress, report whether it failed, and end the background thread.

        A single failed save does not end the training, so a run with bad steps still rewinds or stops as configured.
        """
        self.wait()
        self._background.shutdown()

    def _finish(self, step: int, save: Callable[[], None]) -> None:
        """Save in the background thread, then delete the checkpoints that the config does not keep."""
        save()
        self._last_save_seconds = time.monotonic() - self._save_began
        if not is_primary():
            return
        retain = functools.partial(self._retain, step)
        for what, action in (("the run's manifest is not written", self._on_saved), ("old checkpoints stay", retain)):
            try:
                action()
            except (OSError, UserError, RunError) as error:  # The checkpoint itself is saved.
                print_on_primary(f"{what}: {error}")

    def _retain(self, step: int) -> None:
        """Delete the checkpoints up to `step` that the config does not keep."""
        # Skip incomplete checkpoints: they are not deleted, and do not count towards the number to keep.
        complete = {}
        for other in self.steps():
            if other <= step:
                with contextlib.suppress(UserError):
                    folder = self.folder / str(other)
                    complete[other] = verified(folder, step=other, run_id=self._run_id, content=False)
        files = self._owner.folder if is_bucket(self.workdir) else self.workdir
        kept = retention.steps_to_keep(self._config, complete, files)
        for other in complete:
            if other not in kept:
                protocol.remove(self._owner, self.folder / str(other))

    def wait(self) -> None:
        """Wait for the save in progress and record its result."""
        if self._saving is None:
            return
        (step, job), self._saving = self._saving, None
        if (error := job.exception()) is None:
            self._verified.add(step)
            self._failures = 0
            return
        if is_primary():
            with contextlib.suppress(UnreadableError):  # The bucket may be reachable again at the next save.
                self._owner.check()  # If another process has taken over this run, stop after the first failure.
        self._failures += 1
        limit = self._config.max_failed_saves
        why = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        text = f"checkpoint of step {step} was not saved, failure {self._failures} of {limit} in a row: {why}"
        if self._failures >= limit:
            raise RunError(f"{text}; earlier checkpoints are untouched (checkpoint.max_failed_saves={limit})")
        print(text, flush=True)
