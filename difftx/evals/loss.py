"""Suite `loss`: validation loss in nats per token, perplexity, and bits per byte (docs/suites.md)."""

import math

import numpy as np

from difftx.data.synthetic import SyntheticRows
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Result
from difftx.evals.suite import Suite


def evaluate(evaluation: Evaluation) -> Result:
    """Score each validation set. The numbers are unweighted means over sets."""
    sets = {name: _score_set(evaluation, name) for name in evaluation.run.data.valid}
    loss = float(np.mean([s["loss"] for s in sets.values()]))
    numbers = {"loss": loss, "perplexity": math.exp(loss)}
    bits = [s["bits_per_byte"] for s in sets.values() if "bits_per_byte" in s]
    if bits:
        numbers["bits_per_byte"] = float(np.mean(bits))
    return Result(numbers=numbers, details={"sets": sets})


def _score_set(evaluation: Evaluation, name: str) -> dict[str, float]:
    """Return a set's loss, bits per byte and size. End-of-document tokens contribute to the loss, but have no bytes."""
    run = evaluation.run
    byte_counts = np.array([len(value or b"") for value in run.tokenizer.token_bytes])
    is_text = not isinstance(run.data.valid[name], SyntheticRows)
    nats, tokens, text_bytes = 0.0, 0, 0
    for row, nll_T in evaluation.valid_rows(name):
        counts_T = row["loss_mask"] > 0
        nats += float(nll_T[counts_T].sum(dtype=np.float64))
        tokens += int(counts_T.sum())
        if is_text:
            text_bytes += int(byte_counts[row["targets"][counts_T]].sum())
    scores = {"loss": nats / tokens, "tokens": tokens}
    return {**scores, "bits_per_byte": nats / math.log(2) / text_bytes, "bytes": text_bytes} if is_text else scores


SUITE = Suite(evaluate=evaluate, reads=("loss_tokens",))
