"""Resumption of long suites: items that a killed evaluation has finished are not computed again."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from difftx.evals.evaluation import Evaluation
from difftx.evals.journal import Identified


def resumable[Item: Identified](
    evaluation: Evaluation,
    items: Sequence[Item],
    answer_batch: Callable[[Sequence[Item]], Sequence[Any]],
    *,
    what: str,
    batch_items: int,
) -> Iterator[tuple[Item, Any]]:
    """Yield each item with its answer, in order; answers that are in the journal are not computed again.

    Args:
        evaluation: evaluation whose journal, if any, is read and written.
        items: the items of the suite; the same settings must always give the same items.
        answer_batch: function that returns the answers of a batch of items, as JSON.
        what: name of the items in the progress display.
        batch_items: number of items per batch.
    """
    journal = evaluation.journal
    answers = {} if journal is None else journal.start(items)
    left = [item for item in items if item.id not in answers]
    batches = itertools.batched(left, batch_items)
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
