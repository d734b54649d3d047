"""Compare eval.py in two real processes with an evaluation in one process."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import child_environment
from helpers.command_server import commands
from helpers.evals_results import LOSS_SUITES, flat
from helpers.processes import free_port
from helpers.report_runs import save_run

from difftx.evals import run as evals
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.restoring import restore_params

pytestmark = pytest.mark.long


def test_two_processes_score_as_one(config, text_file, tmp_path):
    """Two processes of two devices each write the same numbers as one process of eight devices, up to rounding."""
    suites = [*LOSS_SUITES, "outliers", "gradients", "quantize"]
    changes = {"eval__loss_tokens": 21 * 32, "eval__position_documents": 5, "mesh__fsdp": 8}
    changes |= {"eval__outliers__tokens": 500, "eval__gradients__tokens": 500}
    changes |= {"eval__gradients__at_initialization": "counterpart", "eval__quantize__bits": "16,4"}
    run = save_run(config(data__path=text_file, data__document_mask=True, **changes), tmp_path / "run", [6])
    params = restore_params(Checkpoints(run.workdir).read(6), run.config, run.mesh)
    expected = evals.evaluate(run, params, 6, suites)
    flags = [f"--workdir={run.workdir}", f"--suite={','.join(suites)}", "--again", "--mesh.data=2", "--mesh.fsdp=2"]
    together = ["--coordinator", f"localhost:{free_port()}", "--processes=2"]
    ended = commands().run_together(
        [["eval.py", *flags, *together, f"--process={i}"] for i in range(2)], environment=child_environment(2)
    )
    assert [process.returncode for process in ended] == [0, 0], ended
    assert "(suite recall)" in ended[0].stdout
    assert "suite" not in ended[1].stdout  # Only the primary process reports.
    for suite, result in expected.items():
        written = json.loads((run.workdir / "evals" / suite / "6.json").read_text())
        del written["options"], written["measures"]  # The settings and the chance levels, of which some are numbers.
        both = [flat(values) for values in (written, {"step": 6, **dataclasses.asdict(result)})]
        # Single values, gradients, and values on the edge of two quantization levels vary more than sums of losses.
        np.testing.assert_allclose(*both, rtol=1e-6 if suite in LOSS_SUITES else 2e-3)
