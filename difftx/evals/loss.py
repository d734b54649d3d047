"""Suite `loss`: validation loss in nats per token, perplexity, and bits per byte (docs/suites.md)."""

import hashlib
import math
from typing import Any

import numpy as np

from difftx.data.loader import ordered_rows
from difftx.data.synthetic import SyntheticRows
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation, perplexity
from difftx.evals.result import Number, Result
from difftx.evals.suite import Suite
from difftx.training.run import Run

MAX_BLOCKS = 100  # Maximum number of blocks of rows per validation set. More would hardly narrow a confidence interval.


def evaluate(evaluation: Evaluation) -> Result:
    """Score each validation set. The numbers are unweighted means over sets."""
    sets = {name: _score_set(evaluation, name) for name in evaluation.run.data.valid}
    loss = float(np.mean([s["loss"] for s in sets.values()]))
    vocabulary = evaluation.run.config.model.embeddings
    numbers = {
        "loss": Number(loss, "nats per token", "lower", chance=math.log(vocabulary)),
        "perplexity": Number(perplexity(loss), better="lower", chance=vocabulary),
    }
    bits = [s["bits_per_byte"] for s in sets.values() if "bits_per_byte" in s]
    if bits:
        numbers["bits_per_byte"] = Number(np.mean(bits), "bits per byte", "lower")
    return Result(numbers=numbers, details={"sets": sets})


def check(run: Run) -> None:
    """Raise `UserError` if the rows to score in a validation set have no target that counts in the loss."""
    limit_tokens = run.config.eval.loss_tokens
    for source in run.data.valid.values():
        rows = ordered_rows(source, limit_tokens)
        # A prompt can fill a whole row. Usually the first row already has a target, so no more rows are read.
        if not any(source[index]["loss_mask"].any() for index in range(rows)):
            raise UserError(
                f"suite 'loss': the first {rows} rows of {source.name} (eval.loss_tokens={limit_tokens}) have no "
                "target that counts in the loss, for example because they are parts of prompts; use "
                "data.packing=best_fit, longer rows (data.sequence_length), a larger eval.loss_tokens or more "
                "validation text"
            )


def _score_set(evaluation: Evaluation, name: str) -> dict[str, Any]:
    """Return a set's loss, bits per byte and size. End-of-text tokens contribute to the loss, but have no bytes.

    `blocks` has sums over consecutive rows, to compare two models on the same targets.
    """
    run = evaluation.run
    byte_counts = np.array([len(value or b"") for value in run.tokenizer.token_bytes])
    is_text = not isinstance(run.data.valid[name], SyntheticRows)
    nats, tokens, text_bytes = 0.0, 0, 0
    rows, targets = [], hashlib.sha256()
    for row, nll_T in evaluation.valid_rows(name):
        counts_T = row["loss_mask"] > 0
        rows.append((float(nll_T[counts_T].sum(dtype=np.float64)), int(counts_T.sum())))
        targets.update(row["targets"][counts_T].astype("<i4").tobytes())
        nats += rows[-1][0]
        tokens += rows[-1][1]
        if is_text:
            text_bytes += int(byte_counts[row["targets"][counts_T]].sum())
    sums = [block.sum(axis=0) for block in np.array_split(np.array(rows), min(len(rows), MAX_BLOCKS))]
    blocks = {"nats": [float(n) for n, _ in sums], "tokens": [int(t) for _, t in sums]}
    scores = {"loss": nats / tokens, "tokens": tokens, "blocks": {**blocks, "targets_sha256": targets.hexdigest()}}
    if not text_bytes:  # This is a synthetic task, or only end-of-text tokens count.
        return scores
    return {**scores, "bits_per_byte": nats / math.log(2) / text_bytes, "bytes": text_bytes}


SUITE = Suite(
    evaluate=evaluate,
    check=check,
    title="Validation loss",
    explanation="How well the model predicts the next token of text that it was not trained on.",
)
