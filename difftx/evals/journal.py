"""Journal of a long suite's finished items, to resume after a kill: `<workdir>/evals/<suite>/<step>.items.jsonl`."""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from difftx.files import read_file, schema_error, write_atomically
from difftx.parallel.multihost import decide_on_primary, is_primary
from difftx.training.checkpoint.checkpointer import DECISION_SECONDS

DECISION_ITEMS = 64  # Items per message from process 0 to the other processes; answers may be long texts.


class Identified(Protocol):
    """An item with a name that is unique within its suite."""

    @property
    def id(self) -> str:
        """The item's name, the same in every process and evaluation."""
        ...


class Journal:
    """A file of JSON lines: the settings and weights, then one answer per line. Only process 0 reads and writes it."""

    def __init__(self, path: Path, settings: str, weights: str | None):
        """Set the path, and the identities of the suite's settings and of the parameters, on which answers depend."""
        self.path, self._head = path, {"settings": settings, "weights": weights}

    def start(self, items: Sequence[Identified]) -> dict[str, Any]:
        """Return the stored answers by item id in every process, and rewrite the file with only valid lines."""
        there = self._read() if is_primary() else {}
        answers = {}
        for group in itertools.batched(items, DECISION_ITEMS):
            found = {item.id: there[item.id] for item in group if item.id in there}
            answers |= decide_on_primary(lambda found=found: found, DECISION_SECONDS)
        if is_primary():  # Drops a line that a kill interrupted, and answers for other settings or weights.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, "".join(map(_line, [self._head, *_entries(there)])))
        return answers

    def add(self, answers: dict[str, Any]) -> None:
        """Append answers by item id; they are on disk when the function returns."""
        if not is_primary():
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(map(_line, _entries(answers)))
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file, if it exists, since the suite has finished."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        """Return the answers of a file with the same first line; invalid lines are skipped."""
        first, *rest = (read_file(self.path) or b"").splitlines() or [b""]
        if _parsed(first) != self._head:
            return {}
        entries = filter(None, map(_parsed, rest))
        return {
            entry["id"]: entry["answer"]
            for entry in entries
            if schema_error(entry, {"id": str}) is None and "answer" in entry
        }


def _entries(answers: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return ({"id": name, "answer": answer} for name, answer in answers.items())


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
