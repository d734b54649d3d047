"""Log-likelihoods and completions for lm-eval's tasks. Equal requests are answered once, even across restarts."""

import dataclasses
from collections.abc import Sequence

from difftx.evals.evaluation import Evaluation
from difftx.inference.generate import Request
from difftx.inference.sampling import Sampling
from difftx.inference.score import Item, Score, loglikelihoods

# Batch size, as a multiple of the rows in a microbatch. In a larger batch, rows of similar length can share a
# microbatch, but a kill loses the whole batch.
ITEMS_PER_ROW = 32

type Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest(Request):
    """A request with its own stop strings and sampling. `generate` only takes one of each per batch."""

    stop: tuple[str, ...]
    sampling: Sampling


def score_all(evaluation: Evaluation, pairs: Sequence[tuple[Tokens, Tokens]], *, what: str) -> list[Score]:
    """Score the continuation of each (context, continuation) pair. Both must have at least one token."""
    # Sort by context, so that each context is computed once. Start with the longest one, so that a lack of memory shows
    # immediately.
    items = [Item(*pair) for pair in sorted(set(pairs), key=lambda pair: (-len(pair[0]), pair))]
    rows = evaluation.run.microbatch_rows

    def answer(batch: Sequence[Item]) -> list[Score]:
        return loglikelihoods(evaluation.lm, batch, batch_rows=rows)

    answers = evaluation.answers(items, answer, what=what, batch_items=rows * ITEMS_PER_ROW)
    found = {(item.context, item.continuation): Score(*score) for item, score in answers}
    return [found[pair] for pair in pairs]


def complete_all(evaluation: Evaluation, requests: Sequence[GenerationRequest], *, what: str) -> list[str]:
    """Return the completion of each prompt, up to the first of its stop strings."""
    texts: dict[GenerationRequest, str] = {}
    groups: dict[tuple[Sampling, tuple[str, ...]], list[GenerationRequest]] = {}
    for item in dict.fromkeys(requests):
        groups.setdefault((item.sampling, item.stop), []).append(item)
    for (sampling, stop), items in groups.items():
        items.sort(key=lambda item: -len(item.prompt))  # Longest first, as in `score_all`.
        done = evaluation.completions(items, lambda item: item, sampling, stop=stop, what=what)
        texts |= {item: answer["text"] for item, answer in done}
    return [texts[item] for item in requests]
