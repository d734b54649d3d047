"""Log-likelihoods of given continuations of given contexts, in batches, for multiple choice and label sets.

Several continuations of one context are branches of one row: the context is prefilled once, and each branch sees the
context and itself.
"""
#   B = rows, T = tokens of a chunk

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import P
from jax.sharding import reshard

from difftx.config import Config
from difftx.errors import UserError
from difftx.inference import decode
from difftx.inference.cache import Cache, capacity_for, extend, write_chunk
from difftx.inference.decode import LanguageModel, Tokens
from difftx.kernels.cached import EMPTY
from difftx.parallel.layout import Layout
from difftx.training.loss import token_scores
from difftx.training.state import graph

BRANCH_TOKENS = 256  # Largest number of tokens, over all branches of a row, per pass; a longer branch gets its own row.


class Item(NamedTuple):
    """Token ids to score: at least one of context and at least one of continuation."""

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
    is_greedy: bool  # At each position, no token was more likely than that of the continuation.


def loglikelihoods(lm: LanguageModel, items: Sequence[Item], *, batch_rows: int) -> list[Score]:
    """Return the score of each continuation after its context, in the order of `items`.

    Args:
        lm: Model to score with.
        items: Items in any order and of any length. Items that share a context share its computation.
        batch_rows: Number of rows per batch.

    Raises:
        UserError: a context or continuation is empty, or both do not fit the model's context.
    """
    for number, item in enumerate(items):
        _check(lm, item, number)
    firsts = _first_equals(items)
    by_context = collections.defaultdict(list)
    for number in dict.fromkeys(first for first, _ in firsts):
        by_context[firsts[number][1]].append(_Numbered(number, items[number]))
    alone: list[_Numbered] = []
    shared: list[list[_Numbered]] = []
    for group in by_context.values():
        short = [entry for entry in group if len(entry.item.branch) <= BRANCH_TOKENS]
        long = [entry for entry in group if len(entry.item.branch) > BRANCH_TOKENS]
        shared += [short] if len(short) > 1 else []
        alone += long if len(short) > 1 else group
    # Batch rows of similar lengths.
    alone.sort(key=lambda entry: len(entry.item.context) + len(entry.item.branch))
    shared.sort(key=lambda group: len(group[0].item.context))
    scores: dict[int, Score] = {}
    with jax.set_mesh(lm.mesh):
        for batch in _batches(alone, batch_rows):
            scores |= _score_rows(lm, batch)
        for groups in _batches(shared, batch_rows):
            scores |= _score_branches(lm, groups)
    return [scores[first] for first, _ in firsts]


class Prompt(NamedTuple):
    """Token ids to choose a continuation for. Prompts that share a context share its computation."""

    context: tuple[int, ...]  # At least one token.
    question: tuple[int, ...]


def most_likely(
    lm: LanguageModel, prompts: Sequence[Prompt], labels: Sequence[tuple[int, ...]], *, batch_rows: int
) -> list[int]:
    """Return, for each prompt, the index of the label that is its most likely continuation, the first of equals.

    This is exact decoding constrained to the labels, unlike a greedy walk down their trie. If one label is a prefix of
    another, the labels need an end marker, such as a newline.
    """
    items = [Item(prompt.context, label, prompt.question) for prompt in prompts for label in labels]
    scores = loglikelihoods(lm, items, batch_rows=batch_rows)
    by_prompt = np.array([score.loglikelihood for score in scores]).reshape(len(prompts), len(labels))
    return np.argmax(by_prompt, axis=1).tolist()


class _Numbered(NamedTuple):
    """An item and its index among all items, which identifies the item without hashing its context."""

    number: int
    item: Item


def _first_equals(items: Sequence[Item]) -> list[tuple[int, int]]:
    """Return, for each item, the index of the first equal item, and the index of its context among all contexts."""
    contexts: dict[tuple[int, ...], int] = {}
    by_identity: dict[int, int] = {}  # Hashes a tuple once that thousands of items may share.
    firsts: dict[Any, int] = {}
    found = []
    for number, (context, *rest) in enumerate(items):
        if id(context) not in by_identity:
            by_identity[id(context)] = contexts.setdefault(context, len(contexts))
        place = by_identity[id(context)]
        found.append((firsts.setdefault((place, *rest), number), place))
    return found


def _check(lm: LanguageModel, item: Item, number: int) -> None:
    if not item.context or not item.continuation:
        raise UserError(f"item {number}: context and continuation need a token at least each")
    tokens = len(item.context) + len(item.branch) - 1  # The last token is only a target.
    if tokens > lm.window:
        raise UserError(
            f"item {number} has {tokens} tokens, more than the model's context data.sequence_length={lm.window}; cut it"
        )


def _batches[T](values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _score_rows(lm: LanguageModel, entries: Sequence[_Numbered]) -> dict[int, Score]:
    """Score items by prefill, with one row per item."""
    inputs = [[*item.context, *item.branch[:-1]] for _, item in entries]
    rows = decode.rows_for(len(inputs), lm.mesh)
    chunk = decode.chunk_for(max(map(len, inputs)), rows, lm.mesh)
    host = Tokens.of(inputs, rows, chunk)
    length = host.tokens_BT.shape[1]
    targets_BT = np.roll(host.tokens_BT, -1, axis=1)
    places = {}
    for row, (number, item) in enumerate(entries):
        targets_BT[row, len(inputs[row]) - 1] = item.continuation[-1]
        places[number] = row, slice(len(item.context) + len(item.between) - 1, len(inputs[row]))
    cache, _ = decode.programs_of(lm.config).empty(lm.weights, rows, capacity_for(length))
    parts = []
    for start in range(0, length, chunk):
        arrays = (host.tokens_BT, host.positions_BT, host.segment_BT, targets_BT)
        put = (decode.put(lm.mesh, x[:, start : start + chunk]) for x in arrays)
        cache, part = _programs(lm.config).chunk(lm.weights, cache, np.int32(start), *put)
        parts.append(part)
    nll_BT, is_best_BT = (np.concatenate([np.asarray(x) for x in both], axis=1) for both in zip(*parts, strict=True))
    return {number: _score(nll_BT[place], is_best_BT[place]) for number, place in places.items()}


def _score_branches(lm: LanguageModel, groups: Sequence[list[_Numbered]]) -> dict[int, Score]:
    """Score groups of items, with one context and one row per group.

    The cache holds the context without its last token, which begins each branch.
    """
    rows = decode.rows_for(len(groups), lm.mesh)
    prefixes = [list(group[0].item.context[:-1]) for group in groups]
    chunk = decode.chunk_for(max(1, *map(len, prefixes)), rows, lm.mesh)
    none_B = np.zeros(rows, np.int32)
    cache = decode.prefill(lm, Tokens.of(prefixes, rows, chunk), chunk=chunk, seed_B=none_B, limit_B=none_B).cache
    scores = {}
    for now in itertools.zip_longest(*map(_passes, groups), fillvalue=[]):
        width = max(sum(len(item.branch) for _, item in branches) for branches in now)
        shape = rows, max(decode.SMALLEST_CHUNK, 2 ** (width - 1).bit_length())
        tokens_BT, positions_BT, targets_BT, branch_BT = (np.zeros(shape, np.int32) for _ in range(4))
        segment_BT = np.full(shape, EMPTY, np.int32)
        places = {}
        for row, branches in enumerate(now):
            at = 0
            for branch, (number, item) in enumerate(branches):
                tokens = len(item.branch)
                place = row, slice(at, at + tokens)
                places[number] = row, slice(at + len(item.between), at + tokens)
                tokens_BT[place] = (item.context[-1], *item.branch[:-1])
                targets_BT[place] = item.branch
                positions_BT[place] = len(item.context) - 1 + np.arange(tokens)
                segment_BT[place], branch_BT[place] = 0, branch
                at += tokens
        host = (tokens_BT, positions_BT, segment_BT, targets_BT, branch_BT)
        arrays = (decode.put(lm.mesh, x) for x in host)
        nll_BT, is_best_BT = map(np.asarray, _programs(lm.config).branches(lm.weights, cache, *arrays))
        scores |= {number: _score(nll_BT[place], is_best_BT[place]) for number, place in places.items()}
    return scores


def _passes(group: Sequence[_Numbered]) -> Iterator[list[_Numbered]]:
    """Split a group into lists whose branches have at most `BRANCH_TOKENS` tokens in all."""
    members: list[_Numbered] = []
    tokens = 0
    for entry in group:
        if tokens + len(entry.item.branch) > BRANCH_TOKENS:
            yield members
            members, tokens = [], 0
        members.append(entry)
        tokens += len(entry.item.branch)
    yield members


def _score(nll_T: np.ndarray, is_best_T: np.ndarray) -> Score:
    return Score(-float(np.sum(nll_T, dtype=np.float64)), bool(np.all(is_best_T)))


class _Programs(NamedTuple):
    chunk: Callable[..., tuple[Cache, tuple[jax.Array, jax.Array]]]
    branches: Callable[..., tuple[jax.Array, jax.Array]]


@functools.cache
def _programs(config: Config) -> _Programs:
    layout = Layout.of(config.mesh.context_method)
    graphdef = graph(config, layout.for_inference())

    def score(params, cache, tokens_BT, positions_BT, segment_BT, targets_BT, branch_BT):
        model = nnx.merge(graphdef, params)
        x_BTD, entries = extend(model, cache, tokens_BT, positions_BT, segment_BT, branch_BT)
        x_BTD, targets_BT = reshard(x_BTD, layout.act_BTD), reshard(targets_BT, layout.act_BT)
        scores = token_scores(x_BTD, model.unembedding(), targets_BT)
        return entries, reshard(scores, P())  # Replicate the scores, because every process reads them.

    @functools.partial(jax.jit, donate_argnums=1)
    def chunk(params, cache, start, tokens_BT, positions_BT, segment_BT, targets_BT):
        entries, scores = score(params, cache, tokens_BT, positions_BT, segment_BT, targets_BT, None)
        return write_chunk(cache, entries, segment_BT, start), scores

    @jax.jit
    def branches(params, cache, *arrays_BT):
        return score(params, cache, *arrays_BT)[1]

    return _Programs(chunk, branches)
