"""Long suites, item by item: what an evaluation that was killed has finished is not done again."""

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
    """Yield each item with its answer, in their order; an earlier evaluation's answers are not sought again.

    Args:
        evaluation: whose journal is read and written, if it has one.
        items: the same for the same settings, since batches are cut from those that are left.
        answer_batch: returns the answers, as JSON, of some items.
        what: the items are, for the display.
        batch_items: how many go together.
    """
    journal = evaluation.journal
    answers = {} if journal is None else journal.start(items)
    left = [item for item in items if item.id not in answers]
    batches = itertools.batched(left, batch_items)
    with evaluation.work.task(what, len(left)) as advance:
        for item in items:
            if item.id not in answers:  # The first of those that are left.
                batch = next(batches)
                found = dict(zip((member.id for member in batch), answer_batch(batch), strict=True))
                answers |= found
                if journal is not None:
                    journal.add(found)
                advance(len(batch))
            yield item, answers[item.id]
