"""Cells, settings and seeds of the studies: what the scripts train, and whether the collected runs are these."""

import math
import re
import statistics

import pytest
from conftest import ROOT

from difftx.config.recipes import load_config
from difftx.configs import controls, toy_continued
from difftx.errors import UserError
from difftx.json_files import read_json
from difftx.model.abstract import count_parameters
from difftx.model.architectures import heads_of
from studies import controls_study, results

COLLECTED = read_json(results.COLLECTED)


def test_the_controls_have_equally_many_parameters_and_widths():
    """All arms have the Transformer's parameters up to the vectors of norm and λ, and queries as wide."""
    for task in controls.TASKS:
        models = {arm: load_config(f"controls:{task}-{arm}", {}).model for arm in controls.ARMS}
        base = count_parameters(models["transformer"]).total
        assert all(abs(count_parameters(model).total - base) < base / 100 for model in models.values())
        assert models["diff"].num_heads >= 4
        heads = models["transformer"], models["transformer-wide-norm"], models["diff"]
        d, wide, of_diff = (heads_of(model).d_head for model in heads)
        assert (wide, of_diff) == (2 * d, d)
        assert heads[0].num_heads * d == 2 * heads[2].num_heads * of_diff


def test_lambda_zero_is_attention_with_the_first_weights():
    model = load_config("controls:novels-zero-norm", {}).model
    assert (model.architecture, model.lambda_learned, model.lambda_init) == ("diff", False, 0.0)
    factors = [1 - (0.8 - 0.6 * math.exp(-0.3 * layer)) for layer in range(model.num_layers)]
    assert model.post_scale == pytest.approx(statistics.fmean(factors), abs=0.003)


def test_the_study_tunes_and_reports_on_different_seeds(tmp_path, monkeypatch):
    """A cell tries gains, then rates until the best lies between two others, and reports with the best of both."""
    calls = []

    def sweep(out, config, grid, flags):
        fields = dict(word.split("=") for word in grid)
        calls.append((out.name, fields, flags))
        gain, rate = float(fields["model.post_scale"]), float(fields["optimizer.learning_rate"])
        return abs(math.log2(gain / 4)) + abs(math.log2(rate / 3.2e-2))

    monkeypatch.setattr(controls_study, "sweep", sweep)
    tuned = controls_study.train_cell(controls_study.Cell("novels", "zero-gain", {"a.b": "c"}), tmp_path)
    assert tuned == {"model.post_scale": "4", "optimizer.learning_rate": "0.032"}
    tries = [(float(f["model.post_scale"]), float(f["optimizer.learning_rate"])) for _, f, _ in calls[:-1]]
    assert tries[:4] == [(1, 8e-3), (2, 8e-3), (4, 8e-3), (8, 8e-3)]
    assert {rate for gain, rate in tries[4:]} == {8e-3, 1.6e-2, 3.2e-2, 6.4e-2}
    assert {f["seed"] for _, f, _ in calls[:-1]} == {"100"}
    name, fields, flags = calls[-1]
    assert (name, fields["seed"], flags) == ("reported", "10,11,12,13,14", ["--config.a.b=c"])
    assert {k: fields[k] for k in tuned} == tuned


def test_the_second_set_of_runs_takes_the_recipes_rate_and_gain(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(controls_study, "sweep", lambda *arguments: calls.append(arguments))
    for cell in controls_study.QUESTIONS["1-again"]:
        assert controls_study.train_cell(cell, tmp_path) == {}
    grids = [grid for _, _, grid, _ in calls]
    assert [grid[1] for grid in grids] == [f"arm={cell.arm}" for cell in controls_study.QUESTIONS["1-again"]]
    assert {tuple(grid[2:]) for grid in grids} == {("seed=20,21,22,23,24,25,26,27,28,29",)}
    first = {cell.folder for cell in controls_study.QUESTIONS["1-novels"]}
    assert not first & {folder.parent.name for folder, *_ in calls}


@pytest.mark.parametrize(("question", "has_own_rates"), [("4", True), ("4-shared", False)])
def test_lengths_have_their_own_rate_or_that_of_the_shortest(tmp_path, monkeypatch, question, has_own_rates):
    """The best rate of each length is another one here."""
    best, calls = {"723": 4e-3, "2891": 8e-3, "11565": 1.6e-2, "2083": 2e-3, "8333": 8e-3}, []

    def sweep(out, config, grid, flags):
        fields = dict(word.split("=") for word in grid)
        steps = flags[0].removeprefix("--config.train.steps=")
        calls.append((fields["seed"], fields["task"], steps, float(fields["optimizer.learning_rate"])))
        return abs(math.log2(calls[-1][-1] / best[steps]))

    monkeypatch.setattr(controls_study, "sweep", sweep)
    assert controls_study.main([f"--out={tmp_path}", f"--question={question}", "--jobs=3"]) == 0
    reported = [(task, steps, rate) for seeds, task, steps, rate in calls if seeds == "30,31,32,33,34,35,36,37"]
    # With one rate, three arms train at the largest number of tokens, and with the larger models.
    assert len(reported) == (3 * 6 + 2 * 6 if has_own_rates else 2 * 6 + 3 * 3)
    shortest = {task: str(min(lengths.values())) for task, lengths in controls_study.LENGTHS.items()}
    for task, steps, rate in reported:
        assert rate == best[steps if has_own_rates else shortest[task]]
    if not has_own_rates:
        assert {steps for seeds, _, steps, _ in calls if seeds == "100"} == set(shortest.values())


def test_lengths_are_tokens_per_parameter():
    for task, lengths in controls_study.LENGTHS.items():
        config = load_config(f"controls:{task}-transformer", {})
        parameters = count_parameters(config.model).total
        for tokens, steps in lengths.items():
            assert steps * config.train.global_batch_tokens / parameters == pytest.approx(tokens, rel=1e-3)


def test_every_cell_of_the_plan_is_an_arm_of_the_recipe():
    cells = [cell for question in controls_study.QUESTIONS.values() for cell in question]
    assert len(cells) > 40
    for cell in cells:
        load_config(f"controls:{cell.task}-{cell.arm}", dict(cell.changes))
    with pytest.raises(UserError, match="novels-dif"):
        load_config("controls:novels-dif", {})


def test_make_reproduce_trains_the_arms_and_seeds_of_question_1():
    lines = (ROOT / "Makefile").read_text().splitlines()
    variables = dict(line.split(" = ", 1) for line in lines if line.startswith(("CONTROLS = ", "SEEDS_")))
    assert tuple(variables["CONTROLS"].split(",")) == controls_study.NORM_OR_GAIN_ARMS
    novels = variables["SEEDS_novels"]
    seeds = {"novels": novels, "recall": variables["SEEDS_recall"].replace("$(SEEDS_novels)", novels)}
    for task, of_task in seeds.items():
        for cell in controls_study.QUESTIONS[f"1-{task}"]:
            assert of_task == ",".join(map(str, cell.seeds))


@pytest.mark.parametrize("task", toy_continued.STEPS)
def test_converted_arms_have_the_heads_of_their_transformer(task):
    """A weight of the Transformer fits the arm that starts from it; `split` pairs heads, which keep their width."""
    transformer, *arms = (
        load_config(f"{ROOT}/configs/toy_continued.py:{task}-{arm}", {}) for arm in toy_continued.ARMS
    )
    for arm in arms:
        pairs = 2 if arm.model.architecture == "diff" else 1
        assert pairs * arm.model.num_heads == transformer.model.num_heads
        assert heads_of(arm.model).d_head == heads_of(transformer.model).d_head
        assert (arm.model.d_model, arm.model.mlp_dim) == (transformer.model.d_model, transformer.model.mlp_dim)
        assert arm.train.steps == transformer.train.steps


# Studies → the study of their tuning, where each cell chose its rate.
TUNED = {study: f"{study}-tuning" for study in COLLECTED if f"{study}-tuning" in COLLECTED}
TUNED |= {"arms": "rates", "differential": "differential-rates", "optimizers": "optimizers-rates"}
OUTSIDE = ("optimizer.learning_rate", "model.post_scale")  # Fields that a cell tunes.


def by_cell(records):
    found = {}
    for r in records:
        changes = {n: v for n, v in r["changes"].items() if n not in OUTSIDE or r["arm"] in ("diff", "transformer")}
        changes.pop("optimizer.learning_rate", None)
        found.setdefault((r["task"], r["arm"], *sorted(changes.items())), []).append(r)
    return found


@pytest.mark.parametrize(("study", "tuning"), TUNED.items())
def test_runs_have_the_rate_and_gain_of_the_smallest_validation_loss(study, tuning):
    """The tuned seed is not reported, and the rate is between two others that were tried."""
    number = "loss/bits_per_byte" if study == "optimizers" else "loss/loss"
    reported, tries = by_cell(COLLECTED[study]), by_cell(COLLECTED[tuning])
    assert reported.keys() & tries.keys()
    for cell in reported.keys() & tries.keys():
        best = min(tries[cell], key=lambda r: r["numbers"][number])
        rate = best["learning_rate"]
        assert {r["learning_rate"] for r in reported[cell]} == {rate}, cell
        gains = {r["changes"].get("model.post_scale") for r in reported[cell]}
        assert gains == {best["changes"].get("model.post_scale")}, cell
        if study != "arms":
            assert not {r["seed"] for r in tries[cell]} & {r["seed"] for r in reported[cell]}
            assert {round(rate / 2, 8), round(rate * 2, 8)} <= {round(r["learning_rate"], 8) for r in tries[cell]}


@pytest.mark.parametrize("study", ["question-1-novels", "question-1-recall", "arms"])
def test_recipes_have_the_rates_and_gains_of_the_reported_runs(study):
    recipe = "toy" if study == "arms" else "controls"
    for task, arm, *_ in by_cell(COLLECTED[study]):
        runs = [r for r in COLLECTED[study] if (r["task"], r["arm"]) == (task, arm)]
        config = load_config(f"{ROOT}/configs/{recipe}.py:{task}-{arm}", {})
        assert {r["learning_rate"] for r in runs} == {config.optimizer.learning_rate}
        if arm.endswith("-gain"):
            assert {float(r["changes"]["model.post_scale"]) for r in runs} == {config.model.post_scale}


@pytest.mark.parametrize(
    "study", ["arms", "question-1-novels", "question-1-again", "question-1-recall", "question-5-start", "step-times"]
)
def test_every_arm_has_equally_many_seeds_tokens_and_parameters(study):
    for task in {r["task"] for r in COLLECTED[study]}:
        runs = [r for r in COLLECTED[study] if r["task"] == task]
        seeds = {arm: sorted(r["seed"] for r in runs if r["arm"] == arm) for arm in {r["arm"] for r in runs}}
        assert len({tuple(of) for of in seeds.values()}) == len({r["tokens"] for r in runs}) == 1
        counts = [r["parameters"] for r in runs if r["arm"] != "zero-branch"]
        assert max(counts) / min(counts) < 1.01


def test_both_sizes_of_question_4_have_the_seeds_and_lengths_of_the_plan():
    """All arms have as many parameters as the Transformer within 0.3 %, and the parts share runs with 5 tokens."""
    for (task, _, *changes), runs in by_cell(COLLECTED["question-4"]).items():
        assert sorted(r["seed"] for r in runs) == list(controls_study.SIZE_SEEDS)
        assert int(dict(changes)["train.steps"]) in controls_study.LENGTHS[task].values()
        size = {"novels": 148_032, "novels-0.4m": 426_624}[task]
        assert all(abs(r["parameters"] / size - 1) < 0.003 for r in runs)
    own, shared = ({repr(r) for r in COLLECTED[study]} for study in ("question-4", "question-4-shared"))
    assert len(own & shared) == 80 + 20


def test_factors_of_parameters_on_the_page_are_those_of_the_models():
    """`parameters_buy` has the factor of models without the second queries and keys, and that of zero-branch."""
    parameters = {r["arm"]: r["parameters"] for study in ("question-1-again", "question-5") for r in COLLECTED[study]}
    unused = 2 * 2 * 64 * 64  # Second queries and keys of two layers.
    factors = (
        parameters["zero-norm"] / (parameters["zero-norm"] - unused),
        parameters["zero-branch"] / parameters["transformer"],
    )
    template = "".join(path.read_text() for path in (*results.PAGES, results.SUMMARY))
    found = {float(factor) for factor in re.findall(r"parameters_buy question-4 ([\d.]+)", template)}
    assert sorted(found) == pytest.approx(sorted(factors), abs=1e-3)
