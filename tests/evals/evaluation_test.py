import dataclasses

import jax
import numpy as np
import pytest

from difftx import evals
from difftx.parallel.mesh import make_mesh
from difftx.training.run import Run
from evals.loss_test import params_of

SUITES = ["loss", "recall", "position"]


def flat(value):
    if isinstance(value, dict):
        return [x for item in value.values() for x in flat(item)]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in flat(item)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize(
    ("packing", "rows", "axes"),
    [("concat", 8, {"fsdp": 4, "tensor": 2}), ("best_fit", 4, {"data": 2, "fsdp": 2, "context": 2})],
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
