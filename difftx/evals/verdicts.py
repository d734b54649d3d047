"""Replies of a judge that were paid for: a file that only grows, so that nothing is asked twice."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from difftx.evals.judge import Verdict
from difftx.files import misfit


class VerdictFile:
    """JSON lines with `key`, what was asked, and what came back; `accurate` is null where that was no verdict."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()

    def read(self) -> dict[str, Verdict]:
        """Return the verdicts that are there, by key; lines that are none, such as half a line, are passed over."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return {}
        entries = filter(None, map(_parsed, lines))
        return {entry["key"]: Verdict(entry["accurate"], entry["why"]) for entry in entries}

    def add(self, entry: dict[str, Any]) -> None:
        """Append a line, from any thread; after this it survives a kill of the machine."""
        line = json.dumps(entry).encode() + b"\n"
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Opened anew for each line: another process may append too. A half line of a kill stays alone.
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
    fits = misfit(entry, {"key": str, "why": str}) is None and isinstance(entry.get("accurate"), bool)
    return entry if fits else None
