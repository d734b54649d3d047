"""Suite `exact_match`: accuracy of a synthetic task on its validation examples (docs/suites.md)."""
# Axes of arrays: B = rows of a batch, T = tokens of a row, D = model width

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from difftx.data.loader import Batch
from difftx.data.synthetic import SyntheticRows
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Result
from difftx.evals.suite import Suite
from difftx.training.loss import token_scores
from difftx.training.run import Run
from difftx.training.state import graph


def evaluate(evaluation: Evaluation) -> Result:
    """Compare the most likely token with each answer. The numbers are unweighted means over validation sets."""
    sets = {name: _score_set(evaluation, name, rows) for name, rows in synthetic_sets(evaluation.run).items()}
    numbers = {name: float(np.mean([s[name] for s in sets.values()])) for name in ("accuracy", "exact_match")}
    return Result(numbers=numbers, details={"sets": sets})


def synthetic_sets(run: Run) -> dict[str, SyntheticRows]:
    """Return name → rows for the validation sets of synthetic tasks. Raise `UserError` if the run has no such set."""
    tasks = {name: rows for name, rows in run.data.valid.items() if isinstance(rows, SyntheticRows)}
    if not tasks:
        raise UserError("suite 'exact_match': no data path is a synthetic task, such as data.path='synthetic:mqar'")
    return tasks


def _score_set(evaluation: Evaluation, name: str, source: SyntheticRows) -> dict[str, float]:
    graphdef, counts = graph(evaluation.run.config), np.zeros(3, np.int64)
    for batch in evaluation.batches(source, source.tokens, f"examples of {name}"):
        counts += np.array(jax.device_get(_count(graphdef, evaluation.params, batch)))
    right, answers, right_examples = counts.tolist()
    return {
        "accuracy": right / answers,
        "exact_match": right_examples / len(source),
        "answers": answers,
        "examples": len(source),
    }


@functools.partial(jax.jit, static_argnums=0)
def _count(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the number of right answers, the number of all answers, and the number of rows with only right answers."""
    model = nnx.merge(graphdef, params)
    x_BTD, _ = model.hidden(batch.tokens_BT, positions_BT=batch.positions_BT, segment_ids_BT=batch.segment_ids_BT)
    counts_BT = batch.loss_mask_BT > 0
    cap = model.config.logit_soft_cap
    _, is_most_likely_BT = token_scores(x_BTD, model.unembedding(), batch.targets_BT, logit_soft_cap=cap)
    right_BT = is_most_likely_BT & counts_BT
    right_B, answers_B = jnp.sum(right_BT, axis=1), jnp.sum(counts_BT, axis=1)
    return jnp.sum(right_B), jnp.sum(answers_B), jnp.sum((right_B == answers_B) & (answers_B > 0))


SUITE = Suite(evaluate=evaluate, check=synthetic_sets)
