"""Write the metrics of a run to metrics.jsonl and to trackers, and read metrics.jsonl."""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from difftx.config import LoggingConfig
from difftx.errors import RunError
from difftx.files import UNLOCKED, Owner
from difftx.json_files import JsonLines, parse_json_lines
from difftx.training.lambda_range import LAMBDA_SPLIT
from difftx.training.trackers import Attempt, start_trackers

NEWEST_BYTES = 65_536
ROW_FIELDS = {"split": str, "step": int, "attempt": int}  # Every row has these fields, with these types.
# Split → types of the fields that its rows have in addition to `ROW_FIELDS`.
SPLIT_FIELDS = {
    "train": {"loss": int | float | None, "tokens": int, "tokens_per_second": int | float, "step_seconds": int | float},
    "valid": {"suite": str},
    "goodput": {"wall_seconds": int | float},
    LAMBDA_SPLIT: {"layer": int, "value": int | float | None},
    "rewind": {"reason": str, "bad_steps": list, "skipped_examples": list, "rewinds": int},
    "stop": {"reason": str, "bad_steps": list},
}
EVENTS = ("rewind", "stop")  # Splits of rows for people. These rows stay when the run returns to an earlier step.


class MetricsWriter:
    """Write metrics to metrics.jsonl and to the trackers in `logging.trackers`.

    First delete the rows of earlier attempts for steps after `start_step`, except `EVENTS`. Do nothing at all unless
    `enabled`.
    """

    def __init__(
        self,
        folder: Path,
        config: LoggingConfig,
        start_step: int,
        *,
        enabled: bool = True,
        owner: Owner = UNLOCKED,
        run_id: str | None = None,
        address: str | None = None,
        run_config: Mapping[str, Any] | None = None,
    ):
        """Open the file and drop the rows after `start_step`. `owner` is that of the `Run`.

        `folder` has the run's small files. The trackers get `run_id`, the unique identifier of the run, `address`, the
        run's absolute path (by default `folder`), and `run_config`, the fields of its config.
        """
        self.path = folder / "metrics.jsonl"
        self.attempt = 0
        self.events: list[dict[str, Any]] = []  # Rows of `EVENTS` that were in the file at the start.
        self._is_cut = False
        self._file: BinaryIO | None = None
        if not enabled:
            return
        log = JsonLines(self.path, owner)
        log.rewrite(self._kept(log, start_step))
        self._file = self.path.open("ab", buffering=0)
        attempt = Attempt(
            folder=folder,
            address=address or str(folder.resolve()),
            run_id=run_id,
            number=self.attempt,
            start_step=start_step,
            config=run_config,
            is_continuous=not self._is_cut,
            history=lambda: (
                (row["step"], _scalars(row))
                for row in read_metrics(self.path)
                if row["attempt"] < self.attempt and row["step"] <= start_step
            ),
            owner=owner,
        )
        self._trackers = start_trackers(config.trackers, attempt)

    def write(self, split: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one row without buffering. Values are numbers, lists of numbers, or texts."""
        if self._file is None:
            return
        numbers = {name: _plain(value) for name, value in values.items()}
        row = {"split": split, "step": step, "attempt": self.attempt, **numbers}
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            if self._file.write(line) != len(line):  # On a full disk, a write may be short without an error.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RunError(
                f"{self.path.parent}: the numbers of step {step} could not be written: {error.strerror}; make room, "
                "then run the same command again"
            ) from error
        self._trackers.call("log", step, _scalars(row))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._trackers.call("close")

    def _kept(self, log: JsonLines, start_step: int) -> Iterator[dict[str, Any]]:
        """Yield the rows to keep: events, and rows up to `start_step`. Set `events` and the number of this attempt."""
        for row in _parse_rows(log.content()):
            self.attempt = max(self.attempt, row["attempt"])
            if row["split"] in EVENTS:
                self.events.append(row)
            if row["step"] <= start_step or row["split"] in EVENTS:
                yield row
            else:
                self._is_cut = True
        self.attempt += 1


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid rows of a metrics.jsonl. A long run has millions. A missing file has no rows."""
    return _parse_rows(JsonLines(path).content())


def read_newest_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows in the last 64 KiB of a metrics.jsonl, or none if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - NEWEST_BYTES))
            content = file.read()
    except OSError:
        return []
    return list(_parse_rows(content))


def _parse_rows(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the row in each valid line."""
    for row in parse_json_lines(content, ROW_FIELDS):
        if all(isinstance(row.get(name), kind) for name, kind in SPLIT_FIELDS.get(row["split"], {}).items()):
            yield row


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. A non-finite number becomes null."""
    value = np.asarray(value).tolist()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by "split/name". Items of a list get "split/name/01", "split/name/02", …."""
    flat: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, list):
            for i, item in enumerate(value, 1):
                add(f"{name}/{i:02d}", item)
        elif isinstance(value, (int, float)):
            flat[name] = value

    for name in row:
        if name not in ("step", "attempt"):
            add(f"{row['split']}/{name}", row[name])
    return flat
