"""Log-likelihoods of continuations after contexts, such as the choices of a question or a set of labels.

Continuations of the same context are branches of one row. The context is prefilled once, and each branch attends to the
context and to itself, but not to other branches.
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

BRANCH_TOKENS = 256  # Most tokens in all branches of a row that are scored at a time. A longer branch gets its own row.


class Item(NamedTuple):
    """A continuation to score, and what precedes it, as token ids. Context and continuation must not be empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    between: tuple[int, ...] = ()  # Tokens after the context that are not scored, such as a question.

    @property
    def branch(self) -> tuple[int, ...]:
        """All tokens after the context."""
        return self.between + self.continuation


class Score(NamedTuple):
    """The likelihood of a continuation."""

    loglikelihood: float  # log p(continuation | context) in nats, over the whole vocabulary.
    is_greedy: bool  # Whether the token of the continuation is the most likely one at each position.


def loglikelihoods(lm: LanguageModel, items: Sequence[Item], *, batch_rows: int) -> list[Score]:
    """Return the score of each item, in order. A context that several items share is computed once."""
    alone: list[Item] = []
    short: dict[tuple[int, ...], list[Item]] = collections.defaultdict(list)
    for item in dict.fromkeys(items):  # Equal items are scored once.
        group = short[item.context] if len(item.branch) <= BRANCH_TOKENS else alone
        group.append(item)
    shared = [group for group in short.values() if len(group) > 1]
    alone += [group[0] for group in short.values() if len(group) == 1]
    # Batch rows of similar lengths.
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
    """A question after a context, as token ids. A context that several prompts share is computed once."""

    context: tuple[int, ...]  # At least one token.
    question: tuple[int, ...]


def most_likely(
    lm: LanguageModel, prompts: Sequence[Prompt], labels: Sequence[tuple[int, ...]], *, batch_rows: int
) -> list[int]:
    """Return the index of the (first) most likely label after each prompt. No label may be a prefix of another."""
    items = [Item(prompt.context, label, prompt.question) for prompt in prompts for label in labels]
    scores = loglikelihoods(lm, items, batch_rows=batch_rows)
    by_prompt = np.array([score.loglikelihood for score in scores]).reshape(len(prompts), len(labels))
    return np.argmax(by_prompt, axis=1).tolist()


def _score_rows(lm: LanguageModel, items: Sequence[Item]) -> dict[Item, Score]:
    """Score items whose contexts are not shared, with one row per item."""
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
    """Return -log p of each target, given the tokens up to its input, and whether no token is more likely, `[B, T]`.

    Rows may differ in length. The results beyond the end of a row, and beyond the last row, have no meaning. The tokens
    pass through a compressed cache in chunks, which changes the result. Call this function under the mesh.
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
        cache, of_chunk = _score_chunk(lm.weights, cache, np.int32(start), *host, config=lm.config)
        chunks.append(of_chunk)
    nll_BT, is_best_BT = (np.concatenate([np.asarray(x) for x in xs], axis=1) for xs in zip(*chunks, strict=True))
    return nll_BT, is_best_BT


@functools.partial(jax.jit, static_argnums=0)
def batch_scores(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return what `row_scores` returns for the targets of a batch, without a cache. Call this under the mesh."""
    model = nnx.merge(graphdef, params)
    x_BTD, _ = model.hidden(batch.tokens_BT, positions_BT=batch.positions_BT, segment_ids_BT=batch.segment_ids_BT)
    scores = token_scores(x_BTD, model.unembedding(), batch.targets_BT, logit_soft_cap=model.config.logit_soft_cap)
    return reshard(scores, P())  # Replicate them, so that each host can read all of them.


def _score_branches(lm: LanguageModel, groups: Sequence[list[Item]]) -> dict[Item, Score]:
    """Score groups of items that share a context, with one row per group."""
    # Each branch begins with the context's last token, because the output there predicts the token after the context.
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
    """Split a group of items into lists whose branches together have at most `BRANCH_TOKENS` tokens."""
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
    """Return `token_scores` of the targets, replicated on all devices. `x_BTD` is the output of `extend`."""
    model, layout = decode.model_of(config, params), Layout.of(config.mesh.context_method)
    # The loss shards tokens over `context`, which need not divide a chunk.
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
