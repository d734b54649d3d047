"""Log-likelihoods and completions for lm-eval's tasks. Equal requests are answered once, even after a kill."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from difftx.evals.evaluation import Evaluation
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import Sampling
from difftx.inference.score import Item, Score, loglikelihoods
from difftx.json_files import json_sha256

CONTINUATIONS = 64  # Most continuations per item. A context such as <|endoftext|> can have thousands.
# Number of items in a batch per row of a microbatch. In a larger batch, rows of similar length share a microbatch, but
# a kill loses the whole batch.
ITEMS_PER_ROW = 8

type Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Choices:
    """A context and the continuations to score after it."""

    context: Tokens
    continuations: tuple[Tokens, ...]

    @functools.cached_property
    def id(self) -> str:
        return json_sha256([self.context, self.continuations])


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest(Request):
    """A request with its own stop strings and sampling, which `generate` takes once per batch."""

    stop: tuple[str, ...]
    sampling: Sampling

    @functools.cached_property
    def id(self) -> str:
        return json_sha256(dataclasses.asdict(self))


def score_all(evaluation: Evaluation, pairs: Sequence[tuple[Tokens, Tokens]], *, what: str) -> list[Score]:
    """Score the continuation of each (context, continuation) pair. Both have at least one token."""
    by_context: dict[Tokens, dict[Tokens, None]] = {}
    for context, continuation in pairs:
        by_context.setdefault(context, {})[continuation] = None
    items = [
        _Choices(context, part)
        for context, continuations in by_context.items()
        for part in itertools.batched(continuations, CONTINUATIONS)
    ]
    # The longest come first, so that a lack of memory shows immediately.
    items.sort(key=lambda item: -len(item.context) - max(map(len, item.continuations)))
    rows = evaluation.run.microbatch_rows

    def answer(batch: Sequence[_Choices]) -> list[list[Score]]:
        pairs = [Item(item.context, continuation) for item in batch for continuation in item.continuations]
        scores = iter(loglikelihoods(evaluation.lm, pairs, batch_rows=rows))
        return [list(itertools.islice(scores, len(item.continuations))) for item in batch]

    found = {}
    for item, scores in evaluation.answers(items, answer, what=what, batch_items=rows * ITEMS_PER_ROW):
        for continuation, score in zip(item.continuations, scores, strict=True):
            found[item.context, continuation] = Score(*score)
    return [found[pair] for pair in pairs]


def complete_all(evaluation: Evaluation, requests: Sequence[GenerationRequest], *, what: str) -> list[str]:
    """Return the completion of each prompt, up to the first of its stop strings."""
    texts: dict[GenerationRequest, str] = {}
    groups: dict[tuple[Sampling, tuple[str, ...]], list[GenerationRequest]] = {}
    for item in dict.fromkeys(requests):
        groups.setdefault((item.sampling, item.stop), []).append(item)
    for (sampling, stop), items in groups.items():

        def answer(batch: Sequence[GenerationRequest], sampling=sampling, stop=stop) -> list[str]:
            return [completion.text for completion in generate(evaluation.lm, batch, sampling, stop=stop)]

        items.sort(key=lambda item: -len(item.prompt))  # Longest first, as in `score_all`.
        texts |= evaluation.answers(items, answer, what=what)
    return [texts[item] for item in requests]
