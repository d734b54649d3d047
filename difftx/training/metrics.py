"""Metrics of a run in metrics.jsonl, TensorBoard and Weights & Biases."""

import collections
import concurrent.futures
import contextlib
import errno
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from difftx.config import LoggingConfig
from difftx.errors import RunError, UnreadableError, import_extra
from difftx.files import resolved, upload
from difftx.json_files import JsonLines, parse_json_lines
from difftx.storage.paths import AnyPath, is_bucket
from difftx.training.event_files import EventsWriter, directory_check, event_pb2, summary_pb2
from difftx.training.lambda_range import LAMBDA_SPLIT

if TYPE_CHECKING:
    from etils import epath

NEWEST_BYTES = 65_536
ROW_FIELDS = {"split": str, "step": int, "attempt": int}  # Types of the fields of every row.
# Split → types of the fields that its rows have in addition to `ROW_FIELDS`.
SPLIT_FIELDS = {
    "train": {"loss": int | float | None, "tokens": int, "tokens_per_second": int | float, "step_seconds": int | float},
    "valid": {"suite": str},
    "goodput": {"wall_seconds": int | float},
    LAMBDA_SPLIT: {"layer": int, "value": int | float | None},
}


class MetricsWriter:
    """A writer of metrics to metrics.jsonl and, if configured, to TensorBoard and Weights & Biases.

    It first deletes the rows of earlier attempts for steps after `start_step`. It does nothing unless `enabled`.

    In a bucket, a thread appends the rows, so that training does not wait for the store. TensorBoard's events are
    collected in local files, which `flush` uploads.
    """

    def __init__(
        self,
        workdir: AnyPath,
        config: LoggingConfig,
        start_step: int,
        *,
        enabled: bool = True,
        require_lock: Callable[[], None] = lambda: None,
    ):
        """Rewind the file. `require_lock` raises an error if this process has lost the lock of the run."""
        self.path = workdir / "metrics.jsonl"
        self.attempt = 0
        self._file: BinaryIO | _Appender | None = None
        self._tensorboard = self._wandb = self._uploads = None
        if not enabled:
            return
        require_lock()
        log = JsonLines(self.path)
        kept, self.attempt = self._rewind(log, start_step)
        self._file = _Appender(log, require_lock) if is_bucket(self.path) else self.path.open("ab", buffering=0)
        if config.tensorboard:
            folder = workdir / "tensorboard"
            if is_bucket(folder):
                self._uploads = _Uploads(folder)
                folder = self._uploads.local
            self._tensorboard = _start_tensorboard(folder, start_step, self.attempt)
        if config.wandb_project:
            self._wandb = _start_wandb(config.wandb_project, workdir, self.attempt)
            for row in kept:
                self._wandb.log(_scalars(row), step=row["step"])

    def write(self, split: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one row without buffering. The values are numbers or lists of numbers."""
        if self._file is None:
            return
        numbers = {name: _plain(value) for name, value in values.items()}
        row = {"split": split, "step": step, "attempt": self.attempt, **numbers}
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        scalars = _scalars(row)
        try:
            if self._file.write(line) != len(line):  # A full disk may shorten a write without an error.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._tensorboard:
                shown = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
                summary = summary_pb2.Summary(value=shown)
                self._tensorboard.write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
                self._tensorboard.flush()
        except OSError as error:
            self._abandon()
            raise RunError(
                f"{self.path.parent}: the numbers of step {step} could not be written: {error.strerror}; make room, "
                "then run the same command again"
            ) from error
        if self._wandb:
            self._wandb.log(scalars, step=step)

    def flush(self) -> None:
        """Return when all rows and events are on disk, or in the bucket."""
        if isinstance(self._file, _Appender):
            self._file.flush()
        if self._uploads and self._tensorboard:
            self._tensorboard.close()
            self._uploads.upload()
            self._tensorboard = self._uploads.next_file(self.attempt)

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._uploads:
            self._uploads.upload()
        if self._wandb:
            self._wandb.finish()

    def _abandon(self) -> None:
        """Close the files without their unwritten data, so that nothing retries the failed write at exit."""
        for file in filter(None, (self._file, self._tensorboard and self._tensorboard._py_recordio_writer)):
            with contextlib.suppress(OSError):
                file.close()
        self._file = self._tensorboard = None

    def _rewind(self, log: JsonLines, start_step: int) -> tuple[list[dict[str, Any]], int]:
        """Delete the rows after `start_step`. Return the other rows, and this attempt's number, from 1."""
        rows, _ = _parse_rows(log.content())
        kept = [row for row in rows if row["step"] <= start_step]
        log.rewrite(kept)
        return kept, 1 + max((row["attempt"] for row in rows), default=0)


class _Appender:
    """A file in a bucket, to which a thread appends. Lines that arrive during an append become one append."""

    def __init__(self, log: JsonLines, require_lock: Callable[[], None]):
        self._log, self._require_lock = log, require_lock
        self._lines: collections.deque[bytes] = collections.deque()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "metrics")
        self._job: concurrent.futures.Future[None] | None = None
        self._error: Exception | None = None

    def write(self, line: bytes) -> int:
        """Append a line later. Raise the error of an earlier append, if there was one."""
        if self._error is not None:
            raise self._error
        self._lines.append(line)
        self._job = self._thread.submit(self._append)
        return len(line)

    def flush(self) -> None:
        """Wait until all lines are in the bucket."""
        if self._job is not None:
            self._job.result()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for all lines, and end the thread."""
        self.flush()
        self._thread.shutdown()

    def _append(self) -> None:
        content = b"".join(self._lines.popleft() for _ in range(len(self._lines)))
        if not content or self._error is not None:
            return
        try:
            self._require_lock()
            self._log.append_lines(content)
        except Exception as error:  # The main thread raises it.
            self._error = error


class _Uploads:
    """Event files of TensorBoard in a local folder, each of which is uploaded once to a bucket."""

    def __init__(self, folder: "epath.Path"):
        self._folder, self._temporary, self._number = folder, tempfile.TemporaryDirectory(prefix="difftx-"), 0
        self.local = Path(self._temporary.name)

    def upload(self) -> None:
        """Move all files to the bucket."""
        for file in sorted(self.local.iterdir()):
            upload(self._folder / file.name, file)
            file.unlink()

    def next_file(self, attempt: int) -> EventsWriter:
        """Return a writer of a new file. TensorBoard reads the files in the order of their names."""
        self._number += 1
        return EventsWriter(str(self.local / "events"), f".{attempt}.{self._number:06d}")


def read_metrics(path: AnyPath) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a metrics.jsonl and the number of invalid lines. An absent file has no rows."""
    return _parse_rows(JsonLines(path).content())


def read_newest_metrics(path: AnyPath) -> list[dict[str, Any]]:
    """Return the rows in the last 64 KiB of a metrics.jsonl, or none if the file cannot be read."""
    if is_bucket(path):
        try:
            return _parse_rows(JsonLines(path).content()[-NEWEST_BYTES:])[0]
        except UnreadableError:
            return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - NEWEST_BYTES))
            return _parse_rows(file.read())[0]
    except OSError:
        return []


def _parse_rows(content: bytes) -> tuple[list[dict[str, Any]], int]:
    found = parse_json_lines(content, ROW_FIELDS)
    rows = [row for row in found if row is not None and _is_valid_row(row)]
    return rows, len(found) - len(rows)


def _is_valid_row(row: dict[str, Any]) -> bool:
    """Return whether a row has the fields in `SPLIT_FIELDS` and only finite or null numbers."""
    required = SPLIT_FIELDS.get(row["split"], {})
    if not all(name in row and isinstance(row[name], kind) for name, kind in required.items()):
        return False
    for name, value in row.items():
        numbers = value if isinstance(value, list) and not name.endswith("_seconds") else [value]
        if name not in ("split", "suite") and not all(map(_is_finite_or_null, numbers)):
            return False
    return True


def _is_finite_or_null(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. A non-finite number becomes null."""
    value = np.asarray(value).tolist()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the row's numbers with keys "split/name", and "split/name/01", "split/name/02", … for items of a list."""
    flat = {}
    for name, value in row.items():
        if isinstance(value, list):
            flat |= {f"{row['split']}/{name}/{i:02d}": v for i, v in enumerate(value, 1) if v is not None}
        elif isinstance(value, (int, float)) and name not in ("step", "attempt"):
            flat[f"{row['split']}/{name}"] = value
    return flat


def _start_tensorboard(folder: Path, start_step: int, attempt: int) -> EventsWriter:
    # tensorboardX's SummaryWriter writes from a thread, and its `flush` does not wait for that thread. A kill would
    # lose steps that metrics.jsonl has, and a full disk would end only the thread.
    directory_check(str(folder))
    # The name of an event file has the time in seconds. The attempt distinguishes two files of the same second.
    writer = EventsWriter(str(folder / "events"), f".{attempt}")
    # This event hides the points of earlier files from this step on, because the resumed run writes them again.
    restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    writer.write_event(event_pb2.Event(wall_time=time.time(), step=start_step + 1, session_log=restart))
    writer.flush()
    return writer


def _start_wandb(project: str, workdir: AnyPath, attempt: int) -> Any:
    wandb = import_extra("wandb", "wandb")
    # W&B accepts each step only once, so each attempt is a new W&B run that begins with the rows of earlier attempts.
    name = "-".join(resolved(workdir).parts[-2:])
    run = f"{name}-{attempt}"
    folder = tempfile.gettempdir() if is_bucket(workdir) else str(workdir)
    return wandb.init(project=project, id=run, name=run, group=name, dir=folder, resume="allow")
