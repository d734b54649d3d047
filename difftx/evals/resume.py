"""Resumption of long suites: items that an interrupted evaluation has finished are not computed again."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from difftx.files import JsonLines, schema_error
from difftx.parallel.multihost import decide_on_primary, is_primary
from difftx.training.checkpoint.checkpointer import DECISION_SECONDS

if TYPE_CHECKING:
    from difftx.evals.evaluation import Evaluation

DECISION_ITEMS = 64  # Items per message from the primary process to the other processes; answers may be long texts.


class Identified(Protocol):
    """An item whose `id` is unique within its suite, and the same in every process and evaluation."""

    @property
    def id(self) -> str: ...


class ItemJournal:
    """A file of JSON lines: the settings and weights, then one answer per line. Only the primary process uses it."""

    def __init__(self, path: Path, settings: str, weights: str | None):
        self._file, self._head = JsonLines(path), {"settings": settings, "weights": weights}

    def start(self, items: Sequence[Identified]) -> dict[str, Any]:
        """Rewrite the file with only its valid answers, and return those of `items` by item id in every process."""
        stored = self._read() if is_primary() else {}
        answers = {}
        for group in itertools.batched(items, DECISION_ITEMS):
            found = {item.id: stored[item.id] for item in group if item.id in stored}
            answers |= decide_on_primary(lambda found=found: found, DECISION_SECONDS)
        if is_primary():  # Removes incomplete lines, and answers for other settings or weights.
            self._file.rewrite([self._head, *_rows(stored)])
        return answers

    def add(self, answers: dict[str, Any]) -> None:
        """Append answers by item id; they are on disk when the function returns."""
        if is_primary():
            self._file.append(_rows(answers))

    def remove(self) -> None:
        self._file.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        """Return the answers of a file with the same settings and weights."""
        rows = self._file.read()
        if rows[:1] != [self._head]:
            return {}
        shape = {"id": str, "answer": object}
        return {row["id"]: row["answer"] for row in rows if schema_error(row, shape) is None}


def resumable[Item: Identified](
    evaluation: "Evaluation",
    items: Sequence[Item],
    answer_batch: Callable[[Sequence[Item]], Sequence[Any]],
    *,
    what: str,
    batch_items: int | None = None,
) -> Iterator[tuple[Item, Any]]:
    """Yield each item with its answer, in order; answers in the evaluation's journal are not computed again.

    Args:
        evaluation: evaluation of the suite.
        items: the items of the suite; the same settings must always give the same items.
        answer_batch: function that returns the answers of a batch of items, as JSON.
        what: name of the items in the progress display.
        batch_items: number of items per batch; None: the rows of a microbatch.
    """
    journal = evaluation.journal
    answers = {} if journal is None else journal.start(items)
    left = [item for item in items if item.id not in answers]
    batches = itertools.batched(left, batch_items or evaluation.run.microbatch_rows)
    with evaluation.work.task(what, len(left)) as advance:
        for item in items:
            if item.id not in answers:  # The first item of the next batch.
                batch = next(batches)
                found = dict(zip((member.id for member in batch), answer_batch(batch), strict=True))
                answers |= found
                if journal is not None:
                    journal.add(found)
                advance(len(batch))
            yield item, answers[item.id]


def _rows(answers: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return ({"id": name, "answer": answer} for name, answer in answers.items())
