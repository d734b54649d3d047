"""An append-only file of a judge's replies, so that no reply is paid for twice."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from difftx.evals.hallucination.judge import Verdict
from difftx.files import schema_error


class VerdictFile:
    """A file of JSON lines, one reply each: the key of the request, the verdict and the reply.

    `accurate` is null if the reply is not a verdict.
    """

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()

    def read(self) -> dict[str, Verdict]:
        """Return the stored verdicts by key; lines without a verdict, such as incomplete lines, are skipped."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return {}
        entries = filter(None, map(_parsed, lines))
        return {entry["key"]: Verdict(entry["accurate"], entry["why"]) for entry in entries}

    def add(self, entry: dict[str, Any]) -> None:
        """Append a line, from any thread; the line is on disk when the function returns."""
        line = json.dumps(entry).encode() + b"\n"
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Open the file for each line, since another process may append too. If a kill left an incomplete line, the
            # new line starts after a line break.
            with self._path.open("a+b") as file:
                if size := file.seek(0, os.SEEK_END):
                    file.seek(size - 1)
                    line = line if file.read(1) == b"\n" else b"\n" + line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fits = schema_error(entry, {"key": str, "why": str}) is None and isinstance(entry.get("accurate"), bool)
    return entry if fits else None
