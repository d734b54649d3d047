"""docs/results.md says what docs/results.json says, and that is what runs said."""

import json
import re
import statistics

import pytest
from conftest import ROOT
from report.run_dirs import write_run

from benchmarks import results, results_tables
from difftx.config.recipes import load_config
from difftx.errors import UserError

COLLECTED = json.loads(results.COLLECTED.read_text())


def test_the_page_is_what_the_runs_make_of_the_template():
    page = results_tables.render(COLLECTED, results.TEMPLATE.read_text())
    assert page == results.PAGE.read_text(), "run `python benchmarks/results.py render`, and read what changed"


def test_the_template_has_no_result_of_its_own():
    """Results have three decimals: such a number in the prose would be one that no run stands behind."""
    text = re.sub(r"`[^`]*`|^    .*$|\{\{.*?\}\}|arXiv \S+", "", results.TEMPLATE.read_text(), flags=re.MULTILINE)
    assert not re.findall(r"\d\.\d{2,}", text)


@pytest.mark.parametrize("arm", dict.fromkeys(r["arm"] for r in COLLECTED["arms"]))
@pytest.mark.parametrize("task", ["books", "recall"])
def test_every_arm_has_three_seeds_and_as_many_parameters_and_tokens(task, arm):
    own, reference = (
        [r for r in COLLECTED["arms"] if (r["task"], r["arm"]) == (task, name)] for name in (arm, "transformer")
    )
    assert {r["seed"] for r in own} == {r["seed"] for r in reference} == {0, 1, 2}
    assert {r["tokens"] for r in own} == {r["tokens"] for r in reference}
    assert own[0]["parameters"] == pytest.approx(reference[0]["parameters"], rel=0.01)


@pytest.mark.parametrize("arm", dict.fromkeys(r["arm"] for r in COLLECTED["arms"]))
@pytest.mark.parametrize("task", ["books", "recall"])
def test_learning_rates_of_the_config_are_the_best_of_those_tried(task, arm):
    tried = [r for r in COLLECTED["rates"] if (r["task"], r["arm"]) == (task, arm)]
    best = min(tried, key=lambda r: r["numbers"]["loss/loss"])["learning_rate"]
    config = load_config(str(ROOT / "configs" / f"toy.py:{task}-{arm}"), {})
    [used] = {r["learning_rate"] for r in COLLECTED["arms"] if (r["task"], r["arm"]) == (task, arm)}
    assert len(tried) > 1
    assert best == used == config.optimizer.learning_rate


def test_intervals_are_those_of_a_table_of_students_t():
    values = [3.1, 3.4, 3.2]
    mean, half = results_tables.estimate(values)
    assert mean == pytest.approx(statistics.fmean(values))
    assert half == pytest.approx(4.302653 * statistics.stdev(values) / 3**0.5, rel=1e-6)  # Two degrees of freedom.
    assert results_tables.estimate([2.0]) == (2.0, None)


@pytest.fixture
def sweep(tmp_path):
    """Return a function: make the folder of a finished sweep of recall, whose accuracies are given by arm and seed."""

    def make(accuracies):
        runs = []
        for (arm, seed), accuracy in accuracies.items():
            spec, name = f"configs/toy.py:recall-{arm}", f"recall-{arm}-seed{seed}"
            fields = {"train.seed": str(seed), "data.seed": str(seed), "optimizer.learning_rate": "0.02"}
            short = {"train.steps": "2", "optimizer.warmup_steps": "1"}
            workdir = write_run(tmp_path / name, load_config(str(ROOT / spec), fields | short), layers=2)
            with (workdir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"split": "goodput", "step": 2, "attempt": 1, "wall_seconds": 60.04}) + "\n")
            sets = {"retrieval": {"accuracy": accuracy}, "mqar": {"accuracy": accuracy + 0.05}}
            for suite, result in (
                ("loss", {"numbers": {"loss": 1 - accuracy}}),
                ("exact_match", {"numbers": {"accuracy": accuracy + 0.025}, "details": {"sets": sets}}),
            ):
                path = workdir / "evals" / suite / "2.json"
                path.parent.mkdir(parents=True)
                path.write_text(json.dumps(result))
            flags = [f"--config={spec}", f"--workdir={workdir}", *(f"--config.{n}={v}" for n, v in fields.items())]
            runs.append({"name": name, "flags": flags, "state": "done"})
        grid = {"task": ["recall"], "optimizer.learning_rate": ["0.02"]}
        description = {"config": "configs/toy.py", "grid": grid, "overrides": {"data.path": "/here/alone"}}
        (tmp_path / "sweep.json").write_text(json.dumps({**description, "runs": runs}))
        return tmp_path

    return make


ACCURACIES = {(arm, seed): base + seed / 10 for arm, base in (("diff", 0.5), ("transformer", 0.25)) for seed in (0, 1)}


def test_a_sweep_becomes_records_and_these_a_table(sweep):
    records = results.collect([sweep(ACCURACIES)])
    first = records[0]
    assert (first["task"], first["arm"], first["seed"], first["wall_seconds"]) == ("recall", "diff", 0, 60.0)
    assert first["changes"] == {"optimizer.learning_rate": "0.02"}
    accuracies = {"exact_match/accuracy": 0.525, "exact_match/retrieval": 0.5, "exact_match/mqar": 0.55}
    assert first["numbers"] == {"loss/loss": 0.5, **accuracies, "lambda/1": 0.2, "lambda/2": 0.22}
    assert first["sweep"].endswith("--grid task=recall optimizer.learning_rate=0.02")
    assert "/here/alone" not in json.dumps(records)
    page = results_tables.render(
        {"mine": records}, "{{arms mine recall}}\nmore by {{difference mine recall diff loss/loss}}"
    )
    # Student's t of one degree of freedom: 12.706 × 0.0707 / √2 is 0.635; the pairs differ by the same.
    assert "| diff | 115,456 | 0.02 | 0.550 ± 0.635 | +0.250 ± 0.000 | 0.600 ± 0.635 | 0.450 ± 0.635 |" in page
    assert "| transformer | 115,264 | 0.02 | 0.300 ± 0.635 |  | 0.350 ± 0.635 | 0.700 ± 0.635 |" in page
    assert "4 runs of 1,024 tokens, seeds 0, 1; 4 minutes" in page
    assert page.endswith("more by -0.250 ± 0.000")
    other = [{**r, "learning_rate": 0.01, "numbers": {n: x / 2 for n, x in r["numbers"].items()}} for r in records]
    rates = {
        number: results_tables.rates_table(other + records, "recall", number)
        for number in ("loss/loss", "exact_match/mqar")
    }
    assert "| diff | **0.225 ± 0.318** | 0.450 ± 0.635 |" in rates["loss/loss"]
    assert "| diff | 0.300 ± 0.318 | **0.600 ± 0.635** |" in rates["exact_match/mqar"]


def test_sizes_and_lengths_of_training_are_rows_and_every_arm_has_its_best_rate():
    def record(task, tokens, arm, rate, seed, value):
        numbers = {"loss/loss": value}
        run = {"task": task, "tokens": tokens, "arm": arm, "learning_rate": rate, "seed": seed, "numbers": numbers}
        return run | {
            "parameters": {"set": 10, "set-large": 90, "other": 50}[task],
            "sweep": "",
            "hardware": "",
            "commit": "",
            "jax": "",
            "wall_seconds": 0,
        }

    records = [
        record("set-large", 500, "transformer", 0.1, 0, 3.0),
        record("set-large", 500, "diff", 0.1, 0, 2.5),
        record("set", 700, "transformer", 0.1, 0, 4.0),
        record("set", 700, "transformer", 0.2, 0, 3.5),
        record("set", 700, "transformer", 0.2, 1, 3.7),
        record("set", 700, "diff", 0.1, 0, 3.6),
        record("set", 700, "diff", 0.1, 1, 3.8),
        record("set", 700, "diff", 0.2, 0, 9.0),
        record("set", 700, "sink", 0.2, 0, 9.0),
        record("other", 700, "diff", 0.2, 0, 9.0),
    ]
    halves = {"a": records[:3], "b": records[3:]}
    assert results_tables.render(halves, "{{growth a+b set loss/loss diff diff_v2}}").splitlines()[2:4] == [
        "| 10 | 700 | 3.600 ± 1.271 (0.2) | +0.100 ± 0.000 (0.1) |  |",
        "| 90 | 500 | 3.000 (0.1) | -0.500 (0.1) |  |",
    ]


def test_new_runs_are_compared_with_the_stated_intervals(sweep, capsys):
    folder = sweep(ACCURACIES)
    records = results.collect([folder])
    assert results.compare(records, records) == 0
    assert "6 of 6 means are within" in capsys.readouterr().out
    shifted = [{**r, "numbers": {n: x + 0.7 for n, x in r["numbers"].items()}} for r in records]
    assert results.compare(shifted, records) == 1
    assert capsys.readouterr().out.count("| NO |") == 6
    assert results.compare(records[:2], records) == 1  # The Transformer was not run.


def test_what_is_not_finished_or_not_there_is_said(sweep):
    folder = sweep(ACCURACIES)
    with pytest.raises(UserError, match=r"no sweep\.json"):
        results.collect([folder / "recall-diff-seed0"])
    (folder / "sweep.json").write_text((folder / "sweep.json").read_text().replace("done", "stopped"))
    with pytest.raises(UserError, match="recall-diff-seed0 is not finished"):
        results.collect([folder])
    for place, message in (("{{arm mine}}", "no such place"), ("{{arms yours recall}}", "no such study")):
        with pytest.raises(UserError, match=message):
            results_tables.render({"mine": []}, place)
