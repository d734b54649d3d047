"""Copies of a run's metrics in TensorBoard and Weights & Biases. An error of a copy never reaches the training."""

import contextlib
import importlib.util
import itertools
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from difftx.errors import RunError, UserError, printable
from difftx.training.wandb_process import FINISH_SECONDS

# tensorboardX imports these clients if they are installed, which takes two seconds. difftx uploads the files itself.
_modules: dict[str, Any] = sys.modules
_CLIENTS = {"boto3", "google.cloud.storage"} - _modules.keys()
_modules.update(dict.fromkeys(_CLIENTS))  # Importing a module raises ImportError if its entry is None.
try:
    from tensorboardX.proto import event_pb2, summary_pb2
    from tensorboardX.record_writer import RecordWriter
finally:
    for _name in _CLIENTS:
        del _modules[_name]

WANDB_PROCESS = [sys.executable, "-P", str(Path(__file__).with_name("wandb_process.py"))]
FILE_BYTES = 2**20  # Size from which TensorBoard continues in a new event file.
MAX_WAITING = 100_000  # Largest number of rows in memory that W&B's process has not read.


class Trackers:
    """The trackers of an attempt. One that raises an error is closed, with one line, and the training continues.

    A tracker has the methods `log(step, scalars)` and `close()`, which must return within seconds.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Any]]):
        """Start the trackers. `makers` has the function that starts each, by its name for users."""
        self._running: dict[str, Any] = {}
        for name, make in makers.items():
            with self._isolated(name):
                self._running[name] = make()

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of all trackers that still run."""
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
    """Event files of TensorBoard, of about `FILE_BYTES` each, because only changed files are pushed to a bucket.

    TensorBoard reads the files in the order of their names, which begin with the number of the attempt: clocks may step
    back. Events are on disk when `log` returns, unlike with tensorboardX's SummaryWriter, so that a kill loses none.
    """

    def __init__(self, folder: Path, start_step: int, attempt: int):
        self._folder, self._attempt, self._number = folder, attempt, itertools.count()
        self._open()
        # This event hides the points of earlier files from this step on, because the resumed run writes them again.
        self._write(step=start_step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

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


class WeightsAndBiases:
    """A run at Weights & Biases. Its package runs in another process, because it changes how a process ends.

    W&B accepts each step only once, so each attempt is a new run that begins with the rows of earlier attempts.
    """

    def __init__(self, options: Mapping[str, Any], history: Iterable[tuple[int, Mapping[str, float]]]):
        """Start the process. `options` are those of `wandb.init`, and `history` has the rows of earlier attempts."""
        self._process = subprocess.Popen(WANDB_PROCESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._rows: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._folder = options["dir"]
        parts: list[Iterable[Any]] = [[{"check": False, **options}], history, iter(self._rows.get, None), [None]]
        threading.Thread(target=self._send, args=[itertools.chain.from_iterable(parts)], daemon=True).start()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._require_success(self._process.poll() or 0)
        if self._rows.qsize() > MAX_WAITING:
            raise RunError(f"{MAX_WAITING:,} rows wait for its process")
        self._rows.put((step, scalars))

    def close(self) -> None:
        self._rows.put(None)
        try:
            self._require_success(self._process.wait(FINISH_SECONDS))
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise RunError(
                f"not all numbers were sent within {FINISH_SECONDS} s; `wandb sync` sends those in {self._folder}/wandb"
            ) from None

    def _send(self, lines: Iterable[Any]) -> None:
        assert self._process.stdin is not None
        # After an error, the process sees the end of its input.
        with contextlib.suppress(Exception), self._process.stdin as pipe:
            for line in lines:
                pipe.write(json.dumps(line) + "\n")
                pipe.flush()

    def _require_success(self, code: int) -> None:
        if code:
            assert self._process.stdout is not None
            ended = f"its process was killed by {signal.Signals(-code).name}" if code < 0 else "its process ended"
            raise RunError(self._process.stdout.read().strip() or ended)


def check_wandb(project: str | None) -> None:
    """Raise `UserError` if Weights & Biases has no key on this machine, or if `project` is invalid."""
    if project is None or importlib.util.find_spec("wandb") is None:  # `check_extras` reports the missing package.
        return
    options = json.dumps({"check": True, "project": project}) + "\n"
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(WANDB_PROCESS, input=options, timeout=60, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"logging.wandb_project={project!r}: {done.stdout.strip().rstrip('.')}; or set it to none")
