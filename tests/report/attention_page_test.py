"""Suite attention of real checkpoints, by eval.py as a user calls it, and what the report makes of it."""

import html
import json
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, child_environment

from difftx.config.recipes import load_config
from difftx.report import panels
from difftx.report.runs import read_runs
from report.page_test import tiny, write_result
from report.run_dirs import write_run
from report.suites_test import save_run


def chart(value, **changes):
    series = [{"name": name, "x": [1.0, 2.0], "y": [value, value + i]} for i, name in enumerate(("noise", "answer"))]
    labels = {"title": "Cosine", "x_label": "layer", "y_label": "cosine"}
    return {"kind": "line", "name": "cosine", "series": series, **labels, "over_steps": True, **changes}


def test_lines_over_layers_are_drawn_over_the_steps(tmp_path):
    """Each line of a chart that says so: a line a layer. One step makes no line, and other charts none."""
    workdirs = [write_run(tmp_path / name, tiny("diff", train__steps=9)) for name in ("one", "two")]
    for step in (3, 6, 9):
        write_result(workdirs[0], "attention", step, {}, [chart(step / 10), chart(1.0, name="l0", over_steps=False)])
    write_result(workdirs[1], "attention", 9, {}, [chart(0.5)])
    section = panels.evaluations(read_runs(workdirs))
    found = {panel.title: panel for panel in section.panels}
    drawn = {title for title in found if "over the steps" in title}
    assert drawn == {f"attention: Cosine: {line}, over the steps: one" for line in ("noise", "answer")}
    values = found["attention: Cosine: answer, over the steps: one"].values
    assert values.header == ["steps", "layer 1", "layer 2"]
    assert values.rows == [["3", "0.3", "1.3"], ["6", "0.6", "1.6"], ["9", "0.9", "1.9"]]
    assert len({panel.id for panel in section.panels}) == len(section.panels)


@pytest.mark.long
def test_eval_and_report_as_processes(tmp_path):
    """Every checkpoint of a run; a second call skips them; the page has tokens by the map's cells."""
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    sizes = {"data.sequence_length": "256", "train.global_batch_tokens": "2048", "mesh.fsdp": "-1"}
    config = load_config(f"{ROOT}/configs/quickstart.py:diff", TINY | sizes | {"data.path": str(tmp_path / "text.txt")})
    run = save_run(config, tmp_path / "run", (3, 6))
    write_run(tmp_path / "metrics", config, layers=2)
    (tmp_path / "metrics" / "metrics.jsonl").rename(run.workdir / "metrics.jsonl")

    def call(*flags):
        command = [sys.executable, "eval.py", f"--workdir={run.workdir}", *flags]
        result = subprocess.run(
            command, cwd=ROOT, env=child_environment(2), capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    suite = ["--suite=attention", "--step=all", "--eval.attention.samples=2"]
    assert "step 6 attention  answer 0." in call(*suite)
    first, last = (json.loads((run.workdir / "evals" / "attention" / f"{step}.json").read_text()) for step in (3, 6))
    assert first["numbers"]["cosine_noise"] != last["numbers"]["cosine_noise"]
    assert sum(last["numbers"][part] for part in ("answer", "others", "noise", "question", "first")) == pytest.approx(1)
    folder = run.workdir / "evals" / "attention" / "6"
    assert {path.name for path in folder.glob("*.png")} == {f"{chart['name']}.png" for chart in last["charts"]}
    assert call(*suite).count("was made with the same settings") == 2

    call("--report", f"--out={tmp_path / 'page.html'}")
    text = html.unescape((tmp_path / "page.html").read_text())
    for part in ("attention: Cosine of A1 and A2", "noise, over the steps: run", "A1 − λ A2 of the last tokens"):
        assert part in text
    assert last["charts"][2]["x"][5][:2] == "5 "
    assert json.dumps(last["charts"][2]["x"][5])[1:-1] in text  # What a token says is shown under the pointer.
