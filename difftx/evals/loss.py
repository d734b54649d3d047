"""Suite `loss`: validation loss in nats a token, perplexity, bits per byte."""

import functools
import math
from typing import Any

import jax
import numpy as np
from flax import nnx

from difftx.config import Config
from difftx.data.loader import Batch, ordered_batches, ordered_rows
from difftx.data.packing import RowSource
from difftx.data.synthetic import SyntheticRows
from difftx.data.tokenizer import token_bytes
from difftx.evals.result import Result
from difftx.training.loss import batch_nll
from difftx.training.run import Run
from difftx.training.state import graph


def evaluate(run: Run, params: Any) -> Result:
    """Score each validation set; several are averaged without weights, as in the macro average.

    Bits per byte = nll / (ln 2 × bytes of the targets): the end of a document costs nats and has no bytes. Only sets of
    text have it.
    """
    sets = {name: _score_set(run, params, source) for name, source in run.data.valid.items()}
    loss = float(np.mean([s["loss"] for s in sets.values()]))
    numbers = {"loss": loss, "perplexity": math.exp(loss)}
    bits = [s["bits_per_byte"] for s in sets.values() if "bits_per_byte" in s]
    if bits:
        numbers["bits_per_byte"] = float(np.mean(bits))
    return Result(numbers=numbers, details={"sets": sets})


def _score_set(run: Run, params: Any, source: RowSource) -> dict[str, float]:
    limit = run.config.eval.loss_tokens
    score = _scorer(run.config)
    batches = ordered_batches(source, rows=run.microbatch_rows, limit_tokens=limit, sharding=run.batch_sharding)
    nll = sum(float(score(params, batch)) for batch in batches)
    # Counted from the source: a process sees only its own rows of a batch.
    rows = (source[i] for i in range(ordered_rows(source, limit)))
    targets = np.concatenate([row["targets"][row["loss_mask"] > 0] for row in rows])
    scores = {"loss": nll / len(targets), "tokens": len(targets)}
    if isinstance(source, SyntheticRows):
        return scores
    byte_counts = np.array([len(value or b"") for value in token_bytes(run.tokenizer)])
    text_bytes = int(byte_counts[targets].sum())
    return {**scores, "bits_per_byte": nll / math.log(2) / text_bytes, "bytes": text_bytes}


@functools.cache
def _scorer(config: Config):
    """Return the jitted score of a batch, compiled once a run rather than at each evaluation."""
    graphdef = graph(config)

    @jax.jit
    def score(params: Any, batch: Batch) -> jax.Array:
        return batch_nll(nnx.merge(graphdef, params), batch)[0]

    return score
