"""Suites needle, icl and attention on a real, tiny model, as eval.py runs them."""

import html
import importlib
import json
import sys

import numpy as np
import pytest
from conftest import ROOT, TINY, child_environment
from helpers.command_server import commands
from helpers.evals_examples import examples, task_of, write_lines
from helpers.report_runs import save_run, write_run
from jinja2.utils import htmlsafe_json_dumps

from difftx.commands.flags import Parser
from difftx.config.build import override
from difftx.config.recipes import load_config
from difftx.evals.icl import IclTask
from difftx.evals.needle.prompts import NeedlePrompts
from difftx.inference.decode import LanguageModel
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY
from difftx.inference.score import Item, loglikelihoods
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.restoring import restore_params
from difftx.training.run import Run

STEP = 900  # At this step, `save_run` scales the random parameters by 10, so that contexts affect the outputs.
NEEDLES = ['--eval.needle.cases=[{"needles": 2, "queries": 1}]', "--eval.needle.depths=0,1", "--eval.needle.samples=3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    write_lines(folder / "train.jsonl.gz", examples(60, 0))
    write_lines(folder / "test.jsonl", examples(9, 1))
    sizes = {"data.sequence_length": "512", "train.global_batch_tokens": "4096", "mesh.fsdp": "8"}
    sizes |= {"model.num_layers": "1", "data.path": str(folder / "text.txt")}
    config = load_config(f"{ROOT}/configs/quickstart.py:diff", TINY | sizes)
    return save_run(config, folder / "run", (STEP,))


def flags_of(run):
    tasks = [task_of(run.workdir.parent)]
    icl = [f"--eval.icl.tasks={json.dumps(tasks)}", "--eval.icl.shots=1,6", "--eval.icl.permutations=2"]
    return [*NEEDLES, *icl]


def evaluate(run, monkeypatch):
    flags = [f"--workdir={run.workdir}", "--suite=needle,icl", *flags_of(run)]
    monkeypatch.setattr(sys, "argv", ["eval.py", *flags])
    return importlib.import_module("eval").main()


def result(run, suite):
    return json.loads((run.workdir / "evals" / suite / f"{STEP}.json").read_text())


@pytest.mark.long
def test_both_suites_end_to_end(run, monkeypatch, capsys):
    assert evaluate(run, monkeypatch) == 0
    needle, icl = result(run, "needle"), result(run, "icl")
    printed = capsys.readouterr().out
    assert "Needles in a haystack (suite needle)" in printed
    assert f"{needle['numbers']['accuracy']:.5g}" in printed
    for suite, names in (("needle", ("needle", "needle_n2_r1")), ("icl", ("icl_trec", "icl_trec_permutations"))):
        figures = {path.name for path in (run.workdir / "evals" / suite / str(STEP)).iterdir()}
        assert figures == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
        assert not list((run.workdir / "evals" / suite).glob("*.items.jsonl"))

    # Compute the answers again from single prompts, which share nothing with other prompts.
    config = override(run.config, Parser("difftx eval", None, "eval", "mesh").overrides(flags_of(run)))
    made = Run.open(config, run.workdir)
    params = restore_params(Checkpoints(run.workdir).read(STEP), config, made.mesh)
    lm = LanguageModel(config, made.mesh, params, made.tokenizer)
    needle_prompts = NeedlePrompts(made)
    prompts = [needle_prompts.prompt(item) for item in needle_prompts.items]
    for prompt, first in zip(prompts[::3], needle["details"]["first_of_each_cell"], strict=True):
        (completion,) = generate(lm, [Request(prompt=prompt.tokens, new_tokens=32, seed=0)], GREEDY)
        assert first == {"id": prompt.item.id, "numbers": list(prompt.numbers), "answer": completion.text}

    task = IclTask(made, config.eval.icl.tasks[0])
    per_permutation = icl["details"]["tasks"]["trec"]["accuracy_of_each_permutation"]
    rows = {(row["order"], row["shots"]): row["accuracy"] for row in per_permutation}
    item = [item for item in task.items if "alternating" in item.orders and item.shots == 6][1]
    choices = []
    for prompt in task.prompts(item):
        scores = loglikelihoods(
            lm, [Item(prompt.context + prompt.question, label) for label in task.labels], batch_rows=2
        )
        choices.append(int(np.argmax([score.loglikelihood for score in scores])))
    labels = [example.label for example in task.questions]
    assert rows["alternating", 6][1] == pytest.approx(np.mean(np.equal(labels, choices)))
    assert len(set(choices)) > 1

    # A second run computes nothing.
    monkeypatch.setattr("difftx.evals.needle.suite.generate", None)
    monkeypatch.setattr("difftx.evals.icl.most_likely", None)
    assert evaluate(run, monkeypatch) == 0
    assert capsys.readouterr().out.count("was made with the same settings") == 2


@pytest.mark.long
def test_attention_of_all_checkpoints_and_report(tmp_path):
    """Evaluate all checkpoints of a run. A second call skips them. The report has the tokens of each attention map."""
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    sizes = {"data.sequence_length": "256", "train.global_batch_tokens": "2048", "mesh.fsdp": "-1"}
    config = load_config(f"{ROOT}/configs/quickstart.py:diff", TINY | sizes | {"data.path": str(tmp_path / "text.txt")})
    run = save_run(config, tmp_path / "run", (3, 6))
    write_run(tmp_path / "metrics", config, layers=2)
    (tmp_path / "metrics" / "metrics.jsonl").rename(run.workdir / "metrics.jsonl")

    def call(*flags):
        command = ["eval.py", f"--workdir={run.workdir}", *flags]
        result = commands().run(command, environment=child_environment(2))
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
    assert htmlsafe_json_dumps(last["charts"][2]["x"][5]) in text  # The report shows a token's text under the pointer.
