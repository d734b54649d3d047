"""studies/results.py makes docs/results.md, docs/exploratory.md and a part of README.md from docs/results.json."""

import json
import re
import statistics

import pytest
from conftest import ROOT
from helpers.report_runs import write_result, write_run

from difftx.config.recipes import load_config
from difftx.errors import UserError
from studies import exploratory_tables, results, step_times, study_records, tuning
from studies.controls_tables import SIGNIFICANT

COLLECTED = json.loads(results.COLLECTED.read_text())
AUDIT = ROOT / "benchmarks" / "records" / "2026-11-22_gain.md"


@pytest.mark.parametrize(("template", "page"), results.PAGES.items(), ids=lambda path: path.name)
def test_pages_are_up_to_date_with_the_runs_and_templates(template, page):
    rendered = results.render(COLLECTED, template.read_text())
    assert rendered == page.read_text(), "run `python studies/results.py render`, and read what changed"


def test_every_figure_of_the_pages_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "IMAGES", tmp_path)
    results.draw_figures(COLLECTED, "")
    pages = "".join(page.read_text() for page in (*results.PAGES.values(), results.README))
    drawn = [*tmp_path.glob("*.png")]
    assert {path.stem for path in drawn} == {*re.findall(r"(results\w*)\.png", pages)}
    assert all(path.stat().st_size > 5_000 for path in drawn)


def test_the_readme_is_up_to_date_with_the_runs_and_the_summary():
    readme = results.README.read_text()
    assert results.with_summary(readme, COLLECTED) == readme, "run `python studies/results.py render`"
    own = readme.partition("## Does it work?")[2].partition(results.SUMMARY_MARKERS[0])[0]
    assert not re.findall(r"\d\.\d{2,}", own)


@pytest.mark.parametrize("template", [*results.PAGES, results.SUMMARY], ids=lambda path: path.name)
def test_templates_contain_no_results(template):
    """Results have three decimals. The prose has such numbers only from an audit, whose record contains them."""
    text = re.sub(r"`[^`]*`|^    .*$|\{\{.*?\}\}|arXiv \S+", "", template.read_text(), flags=re.MULTILINE)
    text = re.sub(r"## Other published comparisons.*?\n## ", "", text, flags=re.DOTALL)
    text = text.replace(str(SIGNIFICANT), "")
    audited = re.findall(r"\d\.\d{2,}", AUDIT.read_text())
    assert set(re.findall(r"\d\.\d{2,}", text)) <= set(audited)
    # A mean over seeds describes only unimodal outcomes.
    assert not re.findall(r"\{\{(?:mean|difference) \S+ recall", template.read_text())


@pytest.fixture
def sweep(tmp_path):
    """Return a function that writes a finished sweep of recall, with the given accuracies by arm and seed."""

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
            write_result(workdir, "loss", 2, {"loss": 1 - accuracy})
            write_result(workdir, "exact_match", 2, {"accuracy": accuracy + 0.025}, details={"sets": sets})
            flags = [f"--config={spec}", f"--workdir={workdir}", *(f"--config.{n}={v}" for n, v in fields.items())]
            runs.append({"name": name, "flags": flags, "state": "done"})
        grid = {"task": ["recall"], "optimizer.learning_rate": ["0.02"]}
        description = {"config": "configs/toy.py", "grid": grid, "overrides": {"data.path": "/here/alone"}}
        (tmp_path / "sweep.json").write_text(json.dumps({**description, "runs": runs}))
        return tmp_path

    return make


ACCURACIES = {(arm, seed): base + seed / 10 for arm, base in (("diff", 0.5), ("transformer", 0.25)) for seed in (0, 1)}


def test_a_sweep_is_collected_and_rendered(sweep):
    records = results.collect([sweep(ACCURACIES)])
    first = records[0]
    assert (first["task"], first["arm"], first["seed"], first["wall_seconds"]) == ("recall", "diff", 0, 60.0)
    assert first["changes"] == {"optimizer.learning_rate": "0.02"}
    accuracies = {"exact_match/accuracy": 0.525, "exact_match/retrieval": 0.5, "exact_match/mqar": 0.55}
    assert first["numbers"] == {"loss/loss": 0.5, **accuracies, "lambda/1": 0.2, "lambda/2": 0.22}
    assert first["sweep"].endswith("--grid task=recall optimizer.learning_rate=0.02")
    assert "/here/alone" not in json.dumps(records)
    page = results.render({"mine": records}, "{{arms mine recall}}\nmore by {{difference mine recall diff loss/loss}}")
    assert "| diff | 115,456 | 0.02 | 0 of 2 | 0.500, 0.600 | 0.550, 0.650 | 0.500, 0.400 |" in page
    assert "| transformer | 115,264 | 0.02 | 0 of 2 | 0.250, 0.350 | 0.300, 0.400 | 0.750, 0.650 |" in page
    assert "4 runs of 1,024 tokens, seeds 0, 1; 4 minutes" in page
    assert page.endswith("more by -0.250 ± 0.000")
    other = [{**r, "learning_rate": 0.01, "numbers": {n: x / 2 for n, x in r["numbers"].items()}} for r in records]
    rates = {
        number: exploratory_tables.rates_table(other + records, "recall", number)
        for number in ("loss/loss", "exact_match/mqar")
    }
    assert "| diff | **0.225 ± 0.318** | 0.450 ± 0.635 |" in rates["loss/loss"]
    assert "| diff | 0.300 ± 0.318 | **0.600 ± 0.635** |" in rates["exact_match/mqar"]


def test_records_have_one_run_per_seed_and_show_uncommitted_changes(sweep):
    records = results.collect([sweep(ACCURACIES)])
    assert "; commit 0123abc; jax" in study_records.provenance(records)
    records[0]["commit"] = f"{'0123abc':0<40}+"
    assert "; commit 0123abc+, 0123abc; jax" in study_records.provenance(records)
    with pytest.raises(UserError, match="task recall, arm diff: two runs have the seed 0"):
        study_records.numbers_by_seed([*records, records[0]], "recall", "diff", "loss/loss")


def test_a_sweep_that_refuses_to_run_gives_no_losses(tmp_path):
    """The folder exists, as after an earlier sweep whose losses would be read. The command ends with exit code 2."""
    (tmp_path / "sweep.json").write_text('{"runs": []}')
    with pytest.raises(UserError, match="ended with exit code 2"):
        tuning.sweep(tmp_path, "configs/absent.py", ["task=recall", "arm=diff", "seed=0"], [])


def test_new_runs_are_compared_with_the_stated_intervals(capsys):
    def record(arm, seed, value):
        return {"task": "books", "arm": arm, "seed": seed, "numbers": dict.fromkeys(results.COMPARED["books"], value)}

    records = [record(arm, seed, value + seed / 10) for arm, value in (("a", 2), ("b", 3)) for seed in (0, 1)]
    assert results.compare(records, records) == 0
    assert "6 of 6 results agree" in capsys.readouterr().out
    shifted = [record(r["arm"], r["seed"], value + 0.7) for r in records for value in set(r["numbers"].values())]
    assert results.compare(shifted, records) == 1
    assert capsys.readouterr().out.count("| NO |") == 6
    assert results.compare(records[:2], records) == 1  # b was not run.


def test_new_runs_of_recall_are_compared_by_how_many_solved_it(capsys):
    def record(arm, seed, value):
        return {"task": "recall", "arm": arm, "seed": seed, "numbers": {"exact_match/retrieval": value}}

    def runs(**shares):
        return [record(arm, seed, value) for arm, values in shares.items() for seed, value in enumerate(values)]

    committed = runs(all=[0.97, 0.93], none=[0.1, 0.2], some=[0.95, 0.1])
    assert results.compare(runs(all=[1.0], none=[0.0, 0.89], some=[0.1, 0.1]), committed) == 0
    assert "| recall | some | solved | 1 of 2 | 0 of 2 | yes |" in capsys.readouterr().out
    assert results.compare(runs(all=[1.0, 0.1], none=[0.9, 0.1], some=[]), committed) == 1
    assert capsys.readouterr().out.count("| NO |") == 3


def test_unfinished_sweeps_and_missing_inputs_are_rejected(sweep):
    folder = sweep(ACCURACIES)
    with pytest.raises(UserError, match=r"no sweep\.json"):
        results.collect([folder / "recall-diff-seed0"])
    (folder / "sweep.json").write_text((folder / "sweep.json").read_text().replace("done", "stopped"))
    with pytest.raises(UserError, match="recall-diff-seed0 is not finished"):
        results.collect([folder])
    (folder / "sweep.json").write_text((folder / "sweep.json").read_text().replace("stopped", "done"))
    loss = folder / "recall-diff-seed0" / "evals" / "loss"
    (loss / "2.json").rename(loss / "1.json")
    with pytest.raises(UserError, match="the newest result of suite loss is of step 1; evaluate step 2"):
        results.collect([folder])


RUNS = {
    f"mine-{name}": [
        {"arm": arm, "seed": seed, "numbers": {"loss": loss + seed}, "changes": {}, "tokens": 140, "parameters": 10}
        for seed in (0, 1, 2)
    ]
    for name, arm, loss in (("a", "diff", -1.5), ("b", "transformer", 0.25))
}


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("{{count mine-a arm=diff}} of {{count mine-*}}", "3 of 6"),
        ("{{count mine-a+mine-a}}", "3"),  # A run that two studies share counts once.
        ("{{count mine-* loss<0}}, {{count mine-* arm~^trans seed!=0}}", "2, 2"),
        ("{{range mine-a loss}}, {{range mine-b tokens_per_parameter}}", "-1.5 to 0.5, 14"),
        ("{{count mine-* seed=0 model.init= = 2 | both}} runs{{count mine-a loss>9 = 0 |}}", "both runs"),
    ],
)
def test_placeholders_of_runs_show_values(place, shown):
    assert results.render(RUNS, place) == shown


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("{{count mine-* seed=0 = 3 | all}} runs", "the value is '2' now, so change this sentence"),
        ("{{arm mine-a}}", "no such placeholder"),
        ("{{arms yours recall}}", "no such study"),
    ],
)
def test_a_sentence_that_the_runs_do_not_give_is_refused(place, why):
    with pytest.raises(UserError, match=why):
        results.render(RUNS, place)


@pytest.mark.parametrize(("text", "side"), [("+0.2 ± 0.1", "above"), ("-0.2 ± 0.1", "below"), ("0.1 ± 0.2", "around")])
def test_an_interval_lies_on_one_side(text, side):
    assert [name for name, holds in results.SIDES.items() if holds(text)] == [f"{side} 0"]


def test_training_steps_are_timed_and_rendered(monkeypatch, tmp_path, capsys):
    """Two arms take one step in each of two rounds. The other studies stay as they are."""
    (tmp_path / "results.json").write_text('{"arms": []}')
    monkeypatch.setattr(results, "COLLECTED", tmp_path / "results.json")
    monkeypatch.setattr(step_times, "ARMS", {"controls": ("transformer", "gated")})
    assert step_times.main(["--rounds=2", "--steps=1"]) == 0
    collected = json.loads(results.COLLECTED.read_text())
    assert collected.keys() == {"arms", "step-times"}
    times = {(r["arm"], r["seed"]): r["numbers"]["step_milliseconds"] for r in collected["step-times"]}
    assert times.keys() == {(arm, number) for arm in ("transformer", "gated") for number in (0, 1)}
    ratio = statistics.mean(times["gated", number] / times["transformer", number] for number in (0, 1))
    [parameters] = {r["parameters"] for r in COLLECTED["question-4"] if (r["task"], r["arm"]) == ("novels", "gated")}
    assert f"| gated | {parameters:,} | {statistics.mean(times['gated', n] for n in (0, 1)):.1f} | {ratio:.2f} |" in (
        capsys.readouterr().out
    )
    assert results.render(collected, "{{step_time step-times gated}}") == f"{ratio:.1f}"
