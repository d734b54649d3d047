"""Suite `recall`: validation loss on Zoology's token sets AR-Hit and Others (arXiv 2312.04927; docs/suites.md)."""
# Axes of arrays: T = tokens of a row

import functools
from pathlib import Path

import numpy as np

from difftx.data.bigrams import BigramCounts, as_bigrams, count_bigrams, read_bigrams
from difftx.data.packing import PackedRows, Row
from difftx.data.sources import ONLY_SOURCE
from difftx.data.store import is_store
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation, perplexity, text_sets
from difftx.evals.result import Number, Result
from difftx.evals.suite import Suite
from difftx.training.run import Run

SLICES = {"ar_hit": "AR-Hit", "others": "others"}  # Name of a token set in the numbers → in labels.
# Cached, because a training run is evaluated many times, and counting the bigrams of its text takes long.
_count_once = functools.lru_cache(maxsize=1)(count_bigrams)


def evaluate(evaluation: Evaluation) -> Result:
    """Average the loss over each token set. The numbers are unweighted means over validation sets."""
    run = evaluation.run
    counts, limit = training_counts(run), run.config.eval.recall_max_bigram_count
    sets = {name: _score_set(evaluation, name, counts, limit) for name in text_sets(run, "recall")}
    numbers = {}
    for part, label in SLICES.items():
        losses = [scores[f"{part}_loss"] for scores in sets.values() if f"{part}_loss" in scores]
        if losses:
            loss = float(np.mean(losses))
            numbers[f"{part}_loss"] = Number(loss, "nats per token", "lower", f"{label} loss")
            numbers[f"{part}_perplexity"] = Number(perplexity(loss), "", "lower", f"{label} perplexity")
        tokens = sum(scores[f"{part}_tokens"] for scores in sets.values())
        numbers[f"{part}_tokens"] = Number(tokens, "tokens", label=f"{label} tokens")
    used = {"max_count": limit, "min_count": counts.min_count, "distinct": len(counts.bigrams), **counts.description}
    return Result(numbers=numbers, details={"sets": sets, "bigrams": used})


def is_hit(row: Row, counts: BigramCounts, limit: int, end_of_text: int) -> np.ndarray:
    """Return which targets end a bigram that occurs earlier in the row, and at most `limit` times in training."""
    # Exclude bigrams that cross documents, and targets outside the loss mask, which may not be the next token.
    counted = np.flatnonzero((row["loss_mask"] > 0) & (row["tokens"] != end_of_text))
    bigrams = as_bigrams(row["tokens"][counted], row["targets"][counted])
    documents = row.get("segment_ids", np.zeros(len(row["tokens"]), np.int32))[counted]
    order = np.lexsort((bigrams, documents))  # The sort is stable, so equal bigrams keep their order.
    same = (np.diff(bigrams[order]) == 0) & (np.diff(documents[order]) == 0)
    repeated = order[1:][same]
    hits = repeated[counts.of(bigrams[repeated]) <= limit]
    hit_T = np.zeros(len(row["tokens"]), bool)
    hit_T[counted[hits]] = True
    return hit_T


def _score_set(evaluation: Evaluation, name: str, counts: BigramCounts, limit: int) -> dict[str, float]:
    nats, tokens, end = dict.fromkeys(SLICES, 0.0), dict.fromkeys(SLICES, 0), evaluation.run.tokenizer.eot_token
    for row, nll_T in evaluation.valid_rows(name):
        hit_T, counts_T = is_hit(row, counts, limit, end), row["loss_mask"] > 0
        for part, in_part_T in zip(SLICES, (hit_T, counts_T & ~hit_T), strict=True):
            nats[part] += float(nll_T[in_part_T].sum(dtype=np.float64))
            tokens[part] += int(in_part_T.sum())
    losses = {f"{part}_loss": nats[part] / tokens[part] for part in SLICES if tokens[part]}
    return losses | {f"{part}_tokens": tokens[part] for part in SLICES}


def training_counts(run: Run) -> BigramCounts:
    """Return the bigram counts of the training data. Raise `UserError` if the config does not provide them."""
    text_sets(run, "recall")
    settings, data = run.config.eval, run.config.data
    # Name → path of the sources with a nonzero weight, at the start or in a later stage of the training.
    names = {
        source.name: source.path
        for i, source in enumerate(data.sources)
        if source.weight or any(stage.weights[i] for stage in data.stages)
    } or {ONLY_SOURCE: data.path}
    stores = {name: rows.store for name in names if isinstance(rows := run.data.train[name], PackedRows)}
    if settings.bigrams_path is None:
        on_disk = [name for name in names.values() if name is not None and is_store(name)]
        if on_disk:
            raise UserError(
                "suite 'recall': eval.bigrams_path is not set; count the bigrams of the training data with "
                f"`difftx data bigrams {' '.join(on_disk)} --out=FILE` and set it to FILE"
            )
        return _count_once(tuple(stores.values()))
    counts = read_bigrams(Path(settings.bigrams_path), run.tokenizer.fingerprint, field="eval.bigrams_path")
    counted = {store.get("sha256") for store in counts.description["stores"]}
    for store in stores.values():
        if store.unsampled.fingerprint not in counted:
            raise UserError(
                f"suite 'recall': eval.bigrams_path={settings.bigrams_path!r} does not count the training data "
                f"{store.name}; count all stores of the training data with `difftx data bigrams`, or set None if the "
                "training data is not a store"
            )
    if settings.recall_max_bigram_count < counts.min_count - 1:
        raise UserError(
            f"eval.recall_max_bigram_count={settings.recall_max_bigram_count}: eval.bigrams_path="
            f"{settings.bigrams_path!r} has only bigrams that occur at least {counts.min_count} times; use at least "
            f"{counts.min_count - 1}, or count again with a lower --min_count"
        )
    return counts


SUITE = Suite(
    evaluate=evaluate,
    reads=("loss_tokens", "bigrams_path"),
    check=training_counts,
    title="Recall of earlier tokens",
    explanation="AR-Hit tokens repeat a pair of tokens from earlier in the row, so that attention can look them up. "
    "Others are all remaining tokens.",
)
