"""Log-likelihoods of continuations of contexts, such as the answer choices of a question.

If several continuations share a context, they are branches of one row. The context is prefilled once. Each branch
attends to the context and to itself, but not to other branches.
"""
# Axes in names and shapes: B = rows, T = tokens of a chunk

import collections
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import P
from jax.sharding import reshard

from difftx.data.loader import Batch
from difftx.inference import decode
from difftx.inference.cache import capacity_for, extend, extend_chunk, write_chunk
from difftx.inference.decode import LanguageModel
from difftx.kernels.backend import pad_to
from difftx.kernels.cached import EMPTY
from difftx.parallel.layout import Layout
from difftx.training.loss import token_scores

BRANCH_TOKENS = 256  # Limit for the tokens of all branches in one pass. Longer continuations get their own row.


class Item(NamedTuple):
    """A continuation to score and the tokens before it. Context and continuation must not be empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    between: tuple[int, ...] = ()  # Tokens between context and continuation that are not scored, such as a question.

    @property
    def branch(self) -> tuple[int, ...]:
        """All tokens after the context."""
        return self.between + self.continuation


class Score(NamedTuple):
    """The likelihood of a continuation."""

    loglikelihood: float  # log p(continuation | context) in nats, over the whole vocabulary.
    is_greedy: bool  # Whether every token of the continuation is the most likely one at its position.


def loglikelihoods(lm: LanguageModel, items: Sequence[Item], *, batch_rows: int) -> list[Score]:
    """Return the scores of the items, in order. If items share a context, it is computed once."""
    alone: list[Item] = []
    short: dict[tuple[int, ...], list[Item]] = collections.defaultdict(list)
    for item in dict.fromkeys(items):  # Score equal items once.
        group = short[item.context] if len(item.branch) <= BRANCH_TOKENS else alone
        group.append(item)
    shared = [group for group in short.values() if len(group) > 1]
    alone += [group[0] for group in short.values() if len(group) == 1]
    # Sort by length, so that the rows of a batch have similar lengths.
    alone.sort(key=lambda item: len(item.context) + len(item.branch))
    shared.sort(key=lambda group: len(group[0].context))
    scores: dict[Item, Score] = {}
    with jax.set_mesh(lm.mesh):
        for batch in itertools.batched(alone, batch_rows):
            scores |= _score_rows(lm, batch)
        for groups in itertools.batched(shared, batch_rows):
            scores |= _score_branches(lm, groups)
    return [scores[item] for item in items]


class Prompt(NamedTuple):
    """A context and a question, as token ids. If prompts share a context, it is computed once."""

    context: tuple[int, ...]  # At least one token.
    question: tuple[int, ...]


def most_likely(
    lm: LanguageModel, prompts: Sequence[Prompt], labels: Sequence[tuple[int, ...]], *, batch_rows: int
) -> list[int]:
    """Return the index of the most likely label after each prompt. No label may be a prefix of another label."""
    items = [Item(prompt.context, label, prompt.question) for prompt in prompts for label in labels]
    scores = loglikelihoods(lm, items, batch_rows=batch_rows)
    by_prompt = np.array([score.loglikelihood for score in scores]).reshape(len(prompts), len(labels))
    return np.argmax(by_prompt, axis=1).tolist()


def _score_rows(lm: LanguageModel, items: Sequence[Item]) -> dict[Item, Score]:
    """Score items that do not share their contexts, with one row per item."""
    inputs = [[*item.context, *item.branch[:-1]] for item in items]
    targets = [[*item.context[1:], *item.branch] for item in items]
    spans = {
        item: (row, slice(len(item.context) + len(item.between) - 1, len(inputs[row])))
        for row, item in enumerate(items)
    }
    return _scores(*row_scores(lm, inputs, targets), spans)


def row_scores(
    lm: LanguageModel, inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return -log p of each target token and whether it is the most likely token, both `[B, T]`.

    `targets[b][t]` is predicted from `inputs[b][: t + 1]`. Rows may differ in length; ignore the results in padding. If
    the config compresses the cache, tokens pass through it in chunks, which changes the results. Call this function
    under the mesh.
    """
    compression = lm.config.model.cache
    tokens_BT, length_B, chunk = decode.padded(inputs, lm.mesh, compression)
    rows, length = tokens_BT.shape
    targets_BT = np.zeros_like(tokens_BT)
    for row, of_row in enumerate(targets):
        targets_BT[row, : len(of_row)] = of_row
    cache, chunks = None, []
    if compression.compresses:
        cache = decode.new_cache(lm.weights, config=lm.config, rows=rows, capacity=capacity_for(length, compression))
    for start in range(0, length, chunk):
        columns = slice(start, start + chunk)
        host = (decode.put(lm.mesh, x) for x in (tokens_BT[:, columns], length_B, targets_BT[:, columns]))
        cache, chunk_scores = _score_chunk(lm.weights, cache, np.int32(start), *host, config=lm.config)
        chunks.append(chunk_scores)
    nll_BT, is_best_BT = (np.concatenate([np.asarray(x) for x in xs], axis=1) for xs in zip(*chunks, strict=True))
    return nll_BT, is_best_BT


@functools.partial(jax.jit, static_argnums=0)
def batch_scores(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Compute the results of `row_scores` for a `Batch`, without a cache. Call this function under the mesh."""
    model = nnx.merge(graphdef, params)
    x_BTD, _ = model.hidden(batch.tokens_BT, positions_BT=batch.positions_BT, segment_ids_BT=batch.segment_ids_BT)
    scores = token_scores(x_BTD, model.unembedding(), batch.targets_BT, logit_soft_cap=model.config.logit_soft_cap)
    return reshard(scores, P())  # Replicate the scores, so that each host can read them all.


def _score_branches(lm: LanguageModel, groups: Sequence[list[Item]]) -> dict[Item, Score]:
    """Score groups of items that share a context, with one row per group."""
    # Each branch begins with the context's last token, because the output there predicts the branch's first token.
    prefixes = [group[0].context[:-1] for group in groups]
    none = [0] * len(groups)
    prefilled = decode.prefill(lm, prefixes, seeds=none, limits=none)
    scores = {}
    for branches_by_row in itertools.zip_longest(*map(_passes, groups), fillvalue=[]):
        width = max(sum(len(item.branch) for item in branches) for branches in branches_by_row)
        shape = len(prefilled.length_B), max(decode.MIN_CHUNK_TOKENS, 2 ** (width - 1).bit_length())
        tokens_BT, positions_BT, targets_BT, branch_BT = (np.zeros(shape, np.int32) for _ in range(4))
        segment_BT = np.full(shape, EMPTY, np.int32)
        spans = {}
        for row, branches in enumerate(branches_by_row):
            start = 0
            for branch, item in enumerate(branches):
                end = start + len(item.branch)
                span = row, slice(start, end)
                spans[item] = row, slice(start + len(item.between), end)
                tokens_BT[span] = (item.context[-1], *item.branch[:-1])
                targets_BT[span] = item.branch
                positions_BT[span] = len(item.context) - 1 + np.arange(len(item.branch))
                segment_BT[span], branch_BT[span] = 0, branch
                start = end
        host = (decode.put(lm.mesh, x) for x in (tokens_BT, positions_BT, segment_BT, branch_BT, targets_BT))
        scores_BT = _score_pass(lm.weights, prefilled.cache, prefilled.length_B, *host, config=lm.config)
        nll_BT, is_best_BT = map(np.asarray, scores_BT)
        scores |= _scores(nll_BT, is_best_BT, spans)
    return scores


def _passes(group: Sequence[Item]) -> Iterator[list[Item]]:
    """Split a group of items into lists with at most `BRANCH_TOKENS` tokens in all branches of a list."""
    branches: list[Item] = []
    tokens = 0
    for item in group:
        if tokens + len(item.branch) > BRANCH_TOKENS:
            yield branches
            branches, tokens = [], 0
        branches.append(item)
        tokens += len(item.branch)
    yield branches


def _scores(nll_BT: np.ndarray, is_best_BT: np.ndarray, spans: Mapping[Item, tuple[int, slice]]) -> dict[Item, Score]:
    return {
        item: Score(-float(np.sum(nll_BT[span], dtype=np.float64)), bool(np.all(is_best_BT[span])))
        for item, span in spans.items()
    }


def _token_scores(params, x_BTD, targets_BT, config) -> tuple[jax.Array, jax.Array]:
    """Call `token_scores` for the output of `extend`, `x_BTD`. The result is replicated on all devices."""
    model, layout = decode.model_of(config, params), Layout.of(config.mesh.context_method)
    # The loss shards tokens over `context`, so pad them to a multiple of its size.
    length, devices = targets_BT.shape[1], jax.sharding.get_abstract_mesh().shape["context"]
    x_BTD, targets_BT = (pad_to(x, -(-length // devices) * devices, axis=1) for x in (x_BTD, targets_BT))
    x_BTD, targets_BT = reshard(x_BTD, layout.act_BTD), reshard(targets_BT, layout.act_BT)
    cap = config.model.logit_soft_cap
    scores_BT = reshard(token_scores(x_BTD, model.unembedding(), targets_BT, logit_soft_cap=cap), P())
    return jax.tree.map(lambda x_BT: x_BT[:, :length], scores_BT)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _score_chunk(params, cache, start, tokens_BT, length_B, targets_BT, *, config):
    x_BTD, entries = extend_chunk(decode.model_of(config, params), cache, start, tokens_BT, length_B)
    if cache is not None:
        cache = write_chunk(cache, entries, start, config.model.cache)
    return cache, _token_scores(params, x_BTD, targets_BT, config)


@functools.partial(jax.jit, static_argnames="config")
def _score_pass(params, cache, used_B, tokens_BT, positions_BT, segment_BT, branch_BT, targets_BT, *, config):
    model = decode.model_of(config, params)
    x_BTD, _ = extend(model, cache, used_B, tokens_BT, positions_BT, segment_BT, branch_BT)
    return _token_scores(params, x_BTD, targets_BT, config)
