"""Trackers: copies of a run's metrics in TensorBoard, Weights & Biases, Trackio and MLflow.

An error in a tracker never reaches the training. docs/extend.md shows how to add a tracker.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import RecordWriter

from difftx.errors import RunError, UserError, printable, require_extra
from difftx.files import Owner, read_file
from difftx.registry import Registry
from difftx.training.tracker_process import FINISH_SECONDS

PACKAGES = ("wandb", "trackio", "mlflow")  # Trackers whose packages run in a separate process.
PROCESS = [sys.executable, "-P", str(Path(__file__).with_name("tracker_process.py"))]
DEFAULT_PROJECT = "difftx"
FILE_BYTES = 2**20  # TensorBoard starts a new event file at this size.

type Row = tuple[int, Mapping[str, float]]  # Step, and numbers by "split/name".


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """Facts about an attempt of a run, for a tracker that starts."""

    folder: Path  # Folder with the run's small files.
    address: str  # Absolute path of the run, which may be in a bucket.
    run_id: str | None  # Unique identifier of the run, the same in all attempts.
    number: int  # 1 for the first attempt.
    start_step: int
    config: Mapping[str, Any] | None
    is_continuous: bool  # Whether no row of earlier attempts was deleted.
    history: Callable[[], Iterable[Row]]  # Rows of earlier attempts up to `start_step`.
    owner: Owner

    @functools.cached_property
    def series(self) -> int:
        """Number of the first attempt in this series, recorded in `trackers.json`.

        Attempts of one series continue the same curve. A new series begins when rows were deleted, because trackers
        refuse a step that they already have, or draw it twice.
        """
        path, found = self.folder / "trackers.json", None
        if self.is_continuous:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                found = json.loads(read_file(path) or b"")["series"]
        if not isinstance(found, int):
            found = self.number
            self.owner.write(path, json.dumps({"series": found}) + "\n")
        return found


class Trackers:
    """The trackers of an attempt. If one raises an error, close it and print one line; the training continues.

    A tracker has the methods `log(step, scalars)` and `close()`, which must return within seconds.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Any]]):
        """Start the trackers. `makers` maps the name of each to the function that starts it."""
        self._running: dict[str, Any] = {}
        for name, make in makers.items():
            with self._isolated(name):
                self._running[name] = make()

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of all trackers that are still running."""
        for name, tracker in list(self._running.items()):
            with self._isolated(name):
                getattr(tracker, method)(*arguments)

    @contextlib.contextmanager
    def _isolated(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # No error of a tracker may end a training.
            with contextlib.suppress(Exception):
                self._running.pop(name).close()
            why = " ".join(str(error).split()) or type(error).__name__
            print(printable(f"{name}: {why}; it gets no further numbers of this attempt, which metrics.jsonl has"))


class TensorBoard:
    """Write TensorBoard event files of about `FILE_BYTES` each.

    For a run in a bucket, each change uploads the whole file, so files are small. TensorBoard reads the files in the
    order of their names. These begin with the attempt's number, because clocks may go backwards. Unlike with
    tensorboardX's SummaryWriter, events are on disk when `log` returns, so a kill loses none.
    """

    def __init__(self, attempt: Attempt, _: str):
        self._folder, self._attempt, self._number = attempt.folder / "tensorboard", attempt.number, itertools.count()
        self._open()
        # This event hides the points from this step on in earlier files, because the resumed run writes them again.
        self._write(step=attempt.start_step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._path.stat().st_size > FILE_BYTES:
            self._file.close()
            self._open()
        shown = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(step=step, summary=summary_pb2.Summary(value=shown))

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._attempt:06d}.{next(self._number):06d}.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._path = self._folder / name
        self._file = RecordWriter(str(self._path))
        self._write(file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        self._file.write(event_pb2.Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()


class PackageTracker:
    """A run in a tracker's service or files, written by the tracker's package in another process.

    A separate process is used because packages change how their process exits, and may wait for a network. All attempts
    of a series share one run.
    """

    def __init__(self, attempt: Attempt, project: str, *, package: str):
        """Start the process and send it the rows of earlier attempts. It skips those that the tracker already has."""
        is_bucket = "://" in attempt.address
        name = "-".join(PurePosixPath(attempt.address).parts[-2:])[-100:]
        options = {
            **_options(package, project, check=False),
            "id": f"{attempt.run_id}-{attempt.series}",
            "name": name if attempt.series == 1 else f"{name}-{attempt.series}",
            "group": name,
            "config": attempt.config,
            # If the run is in a bucket, its local folder is deleted at the end.
            "dir": tempfile.gettempdir() if is_bucket else str(attempt.folder),
            "pid": os.getpid(),
        }
        self._process = subprocess.Popen(PROCESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._rows: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hint = f"; `wandb sync` sends those in {options['dir']}/wandb" if package == "wandb" else ""
        parts: list[Iterable[Any]] = [[options], attempt.history(), iter(self._rows.get, None), [None]]
        threading.Thread(target=self._send, args=[itertools.chain.from_iterable(parts)], daemon=True).start()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._require_success(self._process.poll() or 0)
        self._rows.put((step, scalars))

    def close(self) -> None:
        self._rows.put(None)
        try:
            self._require_success(self._process.wait(FINISH_SECONDS))
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise RunError(f"not all numbers were sent within {FINISH_SECONDS} s{self._hint}") from None

    def _send(self, lines: Iterable[Any]) -> None:
        assert self._process.stdin is not None
        # After an error, closing the pipe tells the process that its input has ended.
        with contextlib.suppress(Exception), self._process.stdin as pipe:
            for line in lines:
                pipe.write(json.dumps(line) + "\n")
                pipe.flush()

    def _require_success(self, code: int) -> None:
        if code:
            assert self._process.stdout is not None
            ended = f"its process was killed by {signal.Signals(-code).name}" if code < 0 else "its process ended"
            raise RunError(self._process.stdout.read().strip() or ended)


# Each entry takes the attempt and the text after ":" in `logging.trackers`. It returns an object for `Trackers`.
TRACKERS: Registry[Callable[[Attempt, str], Any]] = Registry(
    "tracker",
    {"tensorboard": TensorBoard, **{name: functools.partial(PackageTracker, package=name) for name in PACKAGES}},
)


def start_trackers(trackers: Iterable[str], attempt: Attempt) -> Trackers:
    """Start the trackers in `logging.trackers`."""
    split = {tracker: tracker.partition(":") for tracker in trackers}
    makers = {tracker: (TRACKERS[name], argument) for tracker, (name, _, argument) in split.items()}
    return Trackers({tracker: lambda m=make, a=argument: m(attempt, a) for tracker, (make, argument) in makers.items()})


def check_trackers(trackers: Iterable[str], *, installed_only: bool = False) -> None:
    """Raise `UserError` if a tracker is unknown, lacks its package or settings, or has invalid settings.

    W&B needs a key and a valid project name. With `installed_only`, do not start the packages.
    """
    for tracker in trackers:
        name, _, argument = tracker.partition(":")
        try:
            TRACKERS.check([name])
            if name == "tensorboard" and argument:
                raise UserError("TensorBoard has no projects; write tensorboard")
            if name in PACKAGES:
                require_extra(name, name)
            if name == "wandb" and not installed_only:
                _check_wandb(argument)
        except UserError as error:
            reason = str(error).removesuffix(".")
            raise UserError(f"logging.trackers={tracker!r}: {reason}; or remove this tracker") from error


def _check_wandb(project: str) -> None:
    options = json.dumps(_options("wandb", project, check=True)) + "\n"
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(PROCESS, input=options, timeout=60, capture_output=True, text=True)
        if done.returncode:
            raise UserError(done.stdout.strip().rstrip("."))


def _options(package: str, project: str, *, check: bool) -> dict[str, Any]:
    return {"package": package, "project": project or DEFAULT_PROJECT, "check": check}
