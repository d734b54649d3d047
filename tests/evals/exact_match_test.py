"""The suite exact_match on synthetic tasks."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.stats
from flax import nnx
from helpers.evals_params import params_of
from helpers.evals_results import chance_of

from difftx.data.synthetic import SyntheticRows
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.training.run import Run
from difftx.training.state import graph

SMALL = {"data__synthetic__vocab_size": 64, "data__synthetic__pairs": 4, "data__synthetic__distractors": 5}
SMALL |= {"data__synthetic__valid_examples": 21}


def test_correct_answers_are_counted(config, tmp_path, monkeypatch):
    """Evaluate 21 examples in batches of 8. The filler rows of the last batch do not count."""
    run = Run.open(config(data__path="synthetic:copy", mesh__fsdp=8, **SMALL), tmp_path)
    params = params_of(run)
    rows = run.data.valid["valid"]
    with jax.set_mesh(run.mesh):
        model = nnx.merge(graph(run.config), params)
        forward = jax.jit(lambda tokens: model(tokens)[0])
    make, ranked = type(rows).__getitem__, {}
    for start in (0, 8, 16):
        tokens = np.stack([make(rows, min(i, 20))["tokens"] for i in range(start, start + 8)])
        with jax.set_mesh(run.mesh):
            logits = np.asarray(forward(jax.device_put(tokens, run.batch_sharding)))
        ranked |= dict(enumerate(np.argsort(-logits, axis=-1), start=start))

    def with_the_models_answers(self, index):
        """Return a row whose answers are the model's first choices.

        One answer of example 5 and two of example 7 are its second choices.
        """
        row = make(self, index)
        targets = np.where(row["loss_mask"] > 0, ranked[index][:, 0], row["targets"]).astype(np.int32)
        wrong = {5: [16], 7: [20, 31]}.get(index, [])
        targets[wrong] = ranked[index][wrong, 1]
        return row | {"targets": targets}

    monkeypatch.setattr(type(rows), "__getitem__", with_the_models_answers)
    result = evals.evaluate(run, params, 0, ["exact_match"])["exact_match"]
    assert result.numbers == {"accuracy": (21 * 16 - 3) / (21 * 16), "exact_match": 19 / 21}
    assert chance_of(result) == {"accuracy": pytest.approx(1 / 63), "exact_match": pytest.approx(63.0**-16)}
    assert result.details == {"sets": {"valid": {**result.numbers, "answers": 21 * 16, "examples": 21}}}


def test_tasks_have_a_loss_without_bytes(config, tmp_path):
    run = Run.open(config(data__path="synthetic:retrieval", mesh__fsdp=8, **SMALL), tmp_path)
    result = evals.evaluate(run, params_of(run), 0, ["loss"])["loss"]
    assert set(result.numbers) == {"loss", "perplexity"}
    assert result.details["sets"]["valid"]["tokens"] == 21  # Answers only.
    with pytest.raises(UserError, match="suite 'sample': no validation set is text"):
        evals.evaluate(dataclasses.replace(run), None, 0, ["sample"])


@pytest.mark.parametrize("task", ["mqar", "retrieval", "copy"])
def test_chance_is_the_frequency_of_each_answer(config, task):
    """All possible answers are equally frequent, by a chi-squared test of the answers of 400 examples."""
    data = config(data__path=f"synthetic:{task}", **SMALL | {"data__synthetic__vocab_size": 25}).data
    rows = SyntheticRows(data.path, data, "train")
    drawn = [rows[i] for i in range(400)]
    answers = np.concatenate([row["targets"][row["loss_mask"] > 0] for row in drawn])
    counts = np.unique(answers, return_counts=True)[1]
    assert 1 / len(counts) == pytest.approx(rows.chance)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
