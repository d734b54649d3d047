"""Suite `exact_match`: accuracy of a synthetic task on its validation examples."""
#   B = batch, T = tokens, D = model width

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from difftx.config import Config
from difftx.data.loader import Batch, ordered_batches, ordered_rows
from difftx.data.synthetic import SyntheticRows
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Result
from difftx.evals.suite import Suite
from difftx.training.loss import is_most_likely
from difftx.training.run import Run
from difftx.training.state import graph


def evaluate(evaluation: Evaluation) -> Result:
    """Compare the most likely token with each answer; the numbers are unweighted means over sets.

    `accuracy` is the share of right answers, as in Zoology. `exact_match` is the share of examples whose answers are
    all right.
    """
    run, params = evaluation.run, evaluation.params
    sets = {name: _score_set(run, params, rows) for name, rows in tasks_of(run).items()}
    return Result(
        numbers={name: float(np.mean([s[name] for s in sets.values()])) for name in ("accuracy", "exact_match")},
        details={"sets": sets},
    )


def tasks_of(run: Run) -> dict[str, SyntheticRows]:
    """Return the validation sets that are synthetic tasks.

    Raises:
        UserError: no validation set is a synthetic task.
    """
    tasks = {name: rows for name, rows in run.data.valid.items() if isinstance(rows, SyntheticRows)}
    if not tasks:
        raise UserError("suite 'exact_match': no data path is a synthetic task, such as data.path='synthetic:mqar'")
    return tasks


def _score_set(run: Run, params: Any, source: SyntheticRows) -> dict[str, float]:
    score = _scorer(run.config)
    batches = ordered_batches(
        source,
        rows=run.microbatch_rows,
        limit_tokens=source.tokens,
        sharding=run.batch_sharding,
        vocab_size=run.config.model.vocab_size,
    )
    counts = sum(np.array(jax.device_get(score(params, batch)), np.int64) for batch in batches)
    right, answers, right_examples = (int(n) for n in np.asarray(counts))
    examples = ordered_rows(source, source.tokens)
    return {
        "accuracy": right / answers,
        "exact_match": right_examples / examples,
        "answers": answers,
        "examples": examples,
    }


@functools.cache
def _scorer(config: Config):
    graphdef = graph(config)

    @jax.jit
    def score(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the number of right answers, the number of answers, and the number of rows with only right answers."""
        model = nnx.merge(graphdef, params)
        x_BTD, _ = model.hidden(batch.tokens_BT, positions_BT=batch.positions_BT, segment_ids_BT=batch.segment_ids_BT)
        counts_BT = batch.loss_mask_BT > 0
        right_BT = is_most_likely(x_BTD, model.unembedding(), batch.targets_BT) & counts_BT
        right_B, answers_B = jnp.sum(right_BT, axis=1), jnp.sum(counts_BT, axis=1)
        return jnp.sum(right_B), jnp.sum(answers_B), jnp.sum((right_B == answers_B) & (answers_B > 0))

    return score


SUITE = Suite(evaluate=evaluate, check=tasks_of)
