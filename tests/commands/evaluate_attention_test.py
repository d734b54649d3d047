"""Suite attention, run by eval.py in a process, and drawn in the report."""

import html
import json

import pytest
from conftest import ROOT, TINY, child_environment
from helpers.command_server import commands
from helpers.report_runs import save_run, write_run

from difftx.config.recipes import load_config

pytestmark = pytest.mark.long


def evaluate(run, *flags, devices=8):
    command = ["eval.py", f"--workdir={run.workdir}", *flags]
    return commands().run(command, environment=child_environment(devices))


def test_attention_of_all_checkpoints_and_report(tmp_path):
    """Evaluate all checkpoints of a run. A second call skips them. The report has the tokens of each attention map."""
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    sizes = {"data.sequence_length": "256", "train.global_batch_tokens": "2048", "mesh.fsdp": "-1"}
    config = load_config(f"{ROOT}/configs/quickstart.py:diff", TINY | sizes | {"data.path": str(tmp_path / "text.txt")})
    run = save_run(config, tmp_path / "run", (3, 6))
    write_run(tmp_path / "metrics", config, layers=2)
    (tmp_path / "metrics" / "metrics.jsonl").rename(run.workdir / "metrics.jsonl")

    def call(*flags):
        result = evaluate(run, *flags, devices=2)
        assert result.returncode == 0, result.stderr
        return result.stdout

    suite = ["--suite=attention", "--step=all", "--eval.attention.samples=2"]
    printed = call(*suite)
    first, last = (json.loads((run.workdir / "evals" / "attention" / f"{step}.json").read_text()) for step in (3, 6))
    assert "Attention weights (suite attention)" in printed
    assert all(f"{result['numbers']['answer']:.5g}" in printed for result in (first, last))
    assert first["numbers"]["cosine_noise"] != last["numbers"]["cosine_noise"]
    assert sum(last["numbers"][part] for part in ("answer", "others", "noise", "question", "first")) == pytest.approx(1)
    folder = run.workdir / "evals" / "attention" / "6"
    assert {path.name for path in folder.glob("*.png")} == {f"{chart['name']}.png" for chart in last["charts"]}
    assert call(*suite).count("was made with the same settings") == 2

    report = commands().run(["difftx", "report", f"--workdir={run.workdir}", f"--out={tmp_path / 'page.html'}"])
    assert report.returncode == 0, report.stderr
    text = html.unescape((tmp_path / "page.html").read_text())
    for part in ("Cosine of A1 and A2", "noise, over the steps: run", "A1 − λ A2 of the last tokens"):
        assert part in text
    assert last["charts"][2]["x"][5][:2] == "5 "
    assert json.dumps(last["charts"][2]["x"][5])[1:-1] in text  # The report shows a token's text under the pointer.
