"""Suites outliers, quantize and gradients by eval.py, as a process of its own, and in the report."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, child_environment

from difftx.config.recipes import load_config
from report.run_dirs import write_run
from report.suites_test import save_run

pytestmark = pytest.mark.long

FLAGS = [
    "--eval.outliers.tokens=300",
    "--eval.gradients.tokens=64",
    "--eval.gradients.at_initialization=no_norm",
    "--eval.quantize.bits=16,4",
]


def evaluate(run, *flags):
    command = [sys.executable, "eval.py", f"--workdir={run.workdir}", *flags]
    return subprocess.run(command, cwd=ROOT, env=child_environment(8), capture_output=True, text=True, timeout=300)


def test_three_suites_end_to_end(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    changes = {"data.path": str(tmp_path / "text.txt"), "eval.loss_tokens": "500", "mesh.fsdp": "8"}
    config = load_config(f"{ROOT}/configs/quickstart.py:diff", TINY | changes)
    run = save_run(config, tmp_path / "run", (6,))
    done = evaluate(run, "--suite=outliers,quantize,gradients", *FLAGS)
    assert done.returncode == 0, done.stderr
    results = {
        suite: json.loads((run.workdir / "evals" / suite / "6.json").read_text())
        for suite in ("outliers", "quantize", "gradients")
    }
    outliers, quantize, gradients = (result["numbers"] for result in results.values())
    assert outliers["logits_top_1"] >= outliers["logits_top_100"] > outliers["logits_median"] > 0
    assert outliers["tokens"] == 288
    assert quantize["loss_loss_16_bits"] != quantize["loss_loss_4_bits"]
    assert gradients["checkpoint_query_1_norm"] > 0
    assert "gradients_no_norm.png" in done.stdout
    again = evaluate(run, "--suite=outliers,quantize,gradients", *FLAGS)
    assert again.stdout.count("was made with the same settings") == 3
    other = evaluate(run, "--suite=quantize", *FLAGS, "--eval.loss_tokens=300")  # A field of the suite inside.
    assert "was made" not in other.stdout
    mistake = evaluate(run, "--suite=quantize", "--eval.quantize.suites=los")
    assert mistake.returncode == 2
    assert "Did you mean 'loss'" in mistake.stderr
    trained = write_run(tmp_path / "trained", run.config)
    (trained / "metrics.jsonl").rename(run.workdir / "metrics.jsonl")
    report = evaluate(run, "--report")
    assert report.returncode == 0, report.stderr
    page = (run.workdir / "report.html").read_text()
    assert all(text in page for text in ("Gradient norms of the checkpoint", "by the bits of attention logits"))
