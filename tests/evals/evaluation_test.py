import contextlib
import copy
import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.evals_params import params_of

from difftx import evals
from difftx.errors import UserError
from difftx.inference.generate import Completion
from difftx.parallel.mesh import make_mesh
from difftx.training.run import Run

SUITES = ["loss", "recall", "position"]


def flat(value):
    if isinstance(value, dict):
        return [x for item in value.values() for x in flat(item)]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in flat(item)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.long
@pytest.mark.parametrize(
    ("packing", "rows", "axes"),
    [
        ("concat", 8, {"fsdp": 4, "tensor": 2}),
        ("best_fit", 4, {"data": 2, "fsdp": 2, "context": 2}),
        ("best_fit", 1, {"context": 8, "context_method": "zigzag"}),  # More devices than heads.
    ],
)
def test_results_depend_neither_on_mesh_nor_on_batch(config, text_file, tmp_path, monkeypatch, packing, rows, axes):
    def results(devices, rows, **axes):
        changes = {f"mesh__{axis}": size for axis, size in axes.items()}
        packed = {"data__packing": packing, "data__document_mask": packing == "best_fit"}
        made = config(
            data__path=text_file,
            data__cache_path=tmp_path / "cache",
            eval__loss_tokens=21 * 32,
            eval__position_documents=5,
            train__global_batch_tokens=rows * 32,
            **packed,
            **changes,
        )
        monkeypatch.setattr("difftx.training.run.make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:devices]))
        run = Run.open(made, tmp_path / f"{devices}-{rows}")
        found = evals.evaluate(run, params_of(run), 0, SUITES)
        return flat({name: dataclasses.asdict(result) for name, result in found.items()})

    expected = results(1, 3)
    assert len(expected) > 60
    np.testing.assert_allclose(results(8, rows, **axes), expected, rtol=1e-6)


class Watched:
    """A group of the config that notes which of its fields are read."""

    def __init__(self, group, read):
        self._group, self._read = group, read

    def __getattr__(self, name):
        self._read.add(name)
        return getattr(self._group, name)


def test_every_field_that_a_suite_reads_is_one_of_its_settings(config, text_file, tmp_path, monkeypatch):
    """With no model behind the suites, which read the same fields all the same."""
    monkeypatch.setattr(evals.Evaluation, "nll", lambda self, source, limit, what: np.ones((len(source), 32)))
    monkeypatch.setattr("difftx.evals.throughput._compiled", lambda *_: lambda: None)
    monkeypatch.setattr("difftx.evals.throughput.init_state", lambda _: types.SimpleNamespace(params=jnp.zeros(())))
    completion = Completion(tokens=[], text="", ended_by="limit")
    monkeypatch.setattr("difftx.evals.sample.generate", lambda lm, requests, *_: [completion] * len(requests))
    monkeypatch.setattr("difftx.evals.outliers.suite._add_batch", lambda *arguments: arguments[-1])
    monkeypatch.setattr("difftx.evals.gradients.init_state", lambda _: types.SimpleNamespace(params=jnp.zeros(())))
    monkeypatch.setattr("difftx.evals.gradients._sum_and_gradient", lambda *_: jnp.zeros(()))
    monkeypatch.setattr("difftx.evals.gradients._measure", lambda *_: (1.0, 1.0, {}, {}))
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # Not installed, so that it does not ask the network for tasks.
    monkeypatch.setitem(sys.modules, "math_verify", types.ModuleType("math_verify"))  # Installed.
    run = Run.open(config(data__path=text_file, mesh__fsdp=8), tmp_path)
    for suite in evals.SUITES.keys() - {"exact_match"}:  # Which needs a task.
        read = set()
        watched = dataclasses.replace(run, config=copy.copy(run.config))
        object.__setattr__(watched.config, "eval", Watched(run.config.eval, read))
        # Some refuse so short a context, no files, no tasks, and no values, once they have read what they read.
        refuses = suite in ("needle", "icl", "hallucination", "harness", "math", "attention", "outliers")
        refused = pytest.raises(UserError) if refuses else contextlib.nullcontext()
        with jax.set_mesh(run.mesh), refused:
            evals.SUITES[suite].evaluate(evals.Evaluation(watched, None, evals.Work(enabled=False)))
        assert read - {"__class__"} == set(evals.fields_of(run.config, suite))


def test_what_a_suite_needs_is_asked_before_it_runs(config, text_file, tmp_path):
    text = Run.open(config("transformer", data__path=text_file, mesh__fsdp=8, model__num_heads=1), tmp_path)
    small = {"data__synthetic__vocab_size": 64, "data__synthetic__pairs": 4, "mesh__fsdp": 8}
    task = Run.open(config(data__path="synthetic:mqar", **small), tmp_path)
    evals.check_run(text, ["loss", "recall", "position", "sample"])
    evals.check_run(task, ["loss", "exact_match", "throughput"])
    reasons = (
        r"no data path is a synthetic|num_heads=1|no validation set is text|eval.needle.lengths|"
        r"eval.icl.tasks is empty|eval.hallucination.sets is empty|eval.attention.length"
    )
    unfit = (
        (text, ["exact_match", "throughput", "needle", "icl", "hallucination", "attention"]),
        (task, ["recall", "position", "sample", "needle"]),
    )
    for run, suites in unfit:
        for suite in suites:
            with pytest.raises(UserError, match=reasons):
                evals.check_run(run, ["loss", suite])
            with pytest.raises(UserError):
                evals.evaluate(run, None, 0, [suite])
