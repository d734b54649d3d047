"""What a long suite has finished, so that it goes on after a kill: `<workdir>/evals/<suite>/<step>.items.jsonl`."""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from difftx.files import misfit, read_file, write_atomically
from difftx.parallel.multihost import decided_by_lead, is_lead
from difftx.training.checkpoint import DECISION_SECONDS

DECISION_ITEMS = 64  # Whose answers process 0 tells the others at a time; their text may be long.


class Identified(Protocol):
    """What has a name of its own among the items of a suite."""

    @property
    def id(self) -> str:
        """Its name, the same in every process and evaluation."""
        ...


class Journal:
    """A file of a line of settings and weights, then a line an item; process 0 reads and writes it."""

    def __init__(self, path: Path, settings: str, weights: str | None):
        """Name the file and what the answers in it depend on: the suite's settings and the parameters' identity."""
        self.path, self._head = path, {"settings": settings, "weights": weights}

    def start(self, items: Sequence[Identified]) -> dict[str, Any]:
        """Return the answers that are there, by the items' ids, the same in every process."""
        there = self._read() if is_lead() else {}
        answers = {}
        for group in itertools.batched(items, DECISION_ITEMS):
            found = {item.id: there[item.id] for item in group if item.id in there}
            answers |= decided_by_lead(lambda found=found: found, DECISION_SECONDS)
        if is_lead():  # Without the half line of a kill, or answers of other settings or weights.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, "".join(map(_line, [self._head, *_entries(there)])))
        return answers

    def add(self, answers: dict[str, Any]) -> None:
        """Append answers, by the items' ids; after this they survive a kill of the machine."""
        if not is_lead():
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(map(_line, _entries(answers)))
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file, if there is one: the suite has its result."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        """Return the answers of a journal with the same head; a line that is none ends nothing but itself."""
        first, *rest = (read_file(self.path) or b"").splitlines() or [b""]
        if _parsed(first) != self._head:
            return {}
        entries = filter(None, map(_parsed, rest))
        return {
            entry["id"]: entry["answer"]
            for entry in entries
            if misfit(entry, {"id": str}) is None and "answer" in entry
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
