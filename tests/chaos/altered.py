"""Run train.py with bad data, or with a mistake in difftx that the driver must find.

python altered.py [--nan=BATCH,BATCH,…] [--mistake=NAME] train.py ARGUMENT…
"""

import argparse
import dataclasses
import runpy
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from difftx import errors
from difftx.data import loader
from difftx.training import metrics, run, trackers
from difftx.training.checkpoint import checkpointer as checkpoint


def poison(batches: set[int]) -> None:
    """Make the loss of some batches NaN."""
    original = loader.HostBatches.__getitem__

    def poisoned(self: loader.HostBatches, index: int) -> loader.Rows:
        rows = original(self, index)
        if index in batches:
            rows["loss_mask"] *= float("nan")
        return rows

    mock.patch.object(loader.HostBatches, "__getitem__", poisoned).start()


# ── Mistakes ──


def restores_invalid_checkpoints() -> None:
    mock.patch.object(checkpoint, "why_invalid", return_value=None).start()


def restarts_from_step_0_if_no_checkpoint_is_valid() -> None:
    find = checkpoint.Checkpointer.find_newest

    def careless(self: checkpoint.Checkpointer) -> int | None:
        try:
            return find(self)
        except checkpoint.UserError:
            return None

    mock.patch.object(checkpoint.Checkpointer, "find_newest", careless).start()
    mock.patch.object(run.Run, "require_none_saved").start()


def quarantines_unreadable_checkpoints() -> None:
    why_invalid = checkpoint.why_invalid

    def rash(*args: object, **kwargs: object) -> str | None:
        try:
            return why_invalid(*args, **kwargs)
        except errors.UnreadableError as error:
            return str(error)

    mock.patch.object(checkpoint, "why_invalid", rash).start()


def resumes_one_batch_too_late() -> None:
    restore = loader.Loader.restore

    def later(self: loader.Loader, state: dict) -> None:
        restore(self, state | {"examples": state["examples"] + self._batch_rows})

    mock.patch.object(loader.Loader, "restore", later).start()


def keeps_rows_of_lost_steps() -> None:
    kept = metrics.MetricsWriter._kept
    mock.patch.object(metrics.MetricsWriter, "_kept", lambda self, log, _: kept(self, log, 10**9)).start()


def draws_lost_steps() -> None:
    start = trackers.TensorBoard.__init__

    def later(self: trackers.TensorBoard, attempt: trackers.Attempt, argument: str) -> None:
        start(self, dataclasses.replace(attempt, start_step=10**9), argument)

    mock.patch.object(trackers.TensorBoard, "__init__", later).start()


def deletes_the_newest() -> None:
    keep = checkpoint.retention.steps_to_keep
    mock.patch.object(checkpoint.retention, "steps_to_keep", lambda *args: keep(*args) - {max(keep(*args))}).start()


def deletes_all_but_one() -> None:
    mock.patch.object(checkpoint.retention, "steps_to_keep", lambda config, steps, *_: {max(steps)}).start()


def exits_with_0_after_preemption() -> None:
    from difftx.training import loop

    mock.patch.object(loop, "EXIT_PREEMPTED", 0).start()


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (
        restores_invalid_checkpoints,
        restarts_from_step_0_if_no_checkpoint_is_valid,
        quarantines_unreadable_checkpoints,
        resumes_one_batch_too_late,
        keeps_rows_of_lost_steps,
        draws_lost_steps,
        deletes_the_newest,
        deletes_all_but_one,
        exits_with_0_after_preemption,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nan", type=lambda text: {int(batch) for batch in text.split(",") if batch}, default=set())
    parser.add_argument("--mistake", choices=MISTAKES)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    poison(arguments.nan)
    if arguments.mistake:
        MISTAKES[arguments.mistake]()
    sys.argv = arguments.command
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
