"""The analysis of the preregistered questions: contrasts, Holm's correction and Fisher's test, each by brute force."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
from conftest import ROOT

from benchmarks import controls_study, controls_tables, recall_tables, results_figures, size_tables, study_records
from benchmarks.controls_tables import Contrast
from difftx.config.recipes import load_config
from difftx.configs import controls, toy_continued
from difftx.errors import UserError
from difftx.model.abstract import count_parameters
from difftx.model.architectures import heads_of


def record(arm, seed, number=0.0, task="novels", rate=0.008, solved_at=None, **changes):
    numbers = {study_records.TEST_LOSS: number, "exact_match/retrieval": number}
    numbers |= {} if solved_at is None else {recall_tables.SOLVED_AT: solved_at}
    return {
        "task": task,
        "arm": arm,
        "seed": seed,
        "changes": {"optimizer.learning_rate": f"{rate:g}", **{n.replace("__", "."): v for n, v in changes.items()}},
        "numbers": numbers,
        "learning_rate": rate,
        "parameters": 1,
        "sweep": "sweep",
        "commit": "0123456789",
        "hardware": "a core",
        "wall_seconds": 60.0,
        "tokens": 1000,
        "jax": "0",
    }


@pytest.mark.parametrize("seed", range(5))
def test_holm_is_the_closed_test_of_bonferroni(seed):
    """A hypothesis is rejected if Bonferroni's test rejects each set of hypotheses that contains it."""
    rng = random.Random(seed)
    p_values = [rng.choice([rng.random(), 0.001, 0.02, 0.02]) for _ in range(6)]
    sets = [set(s) for size in range(1, 7) for s in itertools.combinations(range(6), size)]
    closed = [max(min(1.0, len(s) * min(p_values[j] for j in s)) for s in sets if i in s) for i in range(6)]
    np.testing.assert_allclose(controls_tables.holm(p_values), closed, rtol=1e-12)


def hypergeometric(k, n, solved, runs):
    return math.comb(n, k) * math.comb(runs - n, solved - k) / math.comb(runs, solved)


@pytest.mark.parametrize(("first", "second"), [(6, 0), (6, 3), (2, 2), (0, 4)])
def test_solved_runs_are_compared_by_fishers_exact_test(first, second):
    """The p-value is the probability of tables that are at most as likely as the one found."""
    records = [record("diff", seed, number=float(seed < first)) for seed in range(6)]
    records += [record("zero-norm", seed, number=float(seed < second)) for seed in range(6)]
    solved = first + second
    chances = [hypergeometric(k, 6, solved, 12) for k in range(max(0, solved - 6), min(6, solved) + 1)]
    own = hypergeometric(first, 6, solved, 12)
    expected = sum(chance for chance in chances if chance <= own * (1 + 1e-9))
    assert recall_tables.fisher_p_value(records, Contrast("", ("diff",), ("zero-norm",))) == pytest.approx(expected)


def test_a_contrast_pairs_the_seeds_of_its_cells():
    """The order of the records does not matter, and neither do the tuned fields."""
    records = [record("diff", seed, 2.0 + seed) for seed in (2, 0, 1)]
    records += [record("zero-gain", seed, 1.0 + seed**2, rate=0.016, model__post_scale="4") for seed in (0, 1, 2)]
    contrast = Contrast("", ("diff",), ("zero-gain",))
    assert controls_tables.contrast_values(records, contrast, study_records.TEST_LOSS) == [1.0, 1.0, -1.0]
    with pytest.raises(AssertionError, match="different seeds"):
        controls_tables.contrast_values(records[1:], contrast, study_records.TEST_LOSS)


def test_differences_of_differences_have_four_cells():
    cells = {"diff, a=1": 4.0, "diff, a=2": 3.0, "transformer, a=1": 2.5, "transformer, a=2": 2.0}
    records = [
        record(name.split(", ")[0], seed, value, a=name[-1]) for name, value in cells.items() for seed in range(3)
    ]
    contrast = Contrast("", ("diff, a=1", "transformer, a=2"), ("diff, a=2", "transformer, a=1"))
    assert controls_tables.contrast_values(records, contrast, study_records.TEST_LOSS) == [0.5] * 3


def test_the_p_value_is_that_of_a_test_by_simulation():
    """Of normal samples with mean zero, a share p has a t statistic at least as far from zero."""
    found = [-0.02, -0.031, -0.008, -0.025, 0.004]
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((200_000, len(found)))

    def t(rows):
        return np.abs(rows.mean(1)) / (rows.std(1, ddof=1) / math.sqrt(len(found)))

    expected = (t(samples) >= t(np.array([found]))).mean()
    assert controls_tables.p_value(found) == pytest.approx(expected, abs=0.004)
    assert controls_tables.p_value([0.0] * 5) == 1.0  # One cell under two names.


def test_only_contrasts_below_the_corrected_threshold_get_a_verdict():
    differences = {"diff": -0.05, "zero-norm": 0.0}
    noise = [0.001, -0.002, 0.0, 0.002, -0.001]
    arms = {arm for contrast in controls_tables.NORM_OR_GAIN_CONTRASTS for arm in (*contrast.plus, *contrast.minus)}
    records = [
        record(arm, seed, 2.0 + differences.get(arm, 0.0) + noise[(seed + i) % 5])
        for i, arm in enumerate(sorted(arms))
        for seed in range(5)
    ]
    rows = controls_tables.family_table(records, "norm-or-gain").splitlines()[2:]
    verdicts = {row.split("|")[1].strip(): row.split("|")[-2].strip() for row in rows}
    assert verdicts.pop("`diff` − `zero-norm`") == "better"
    assert verdicts.pop("`diff` − `transformer`") == "better"
    assert verdicts["`zero-norm` − `zero-gain`"] == "open"


def test_steps_to_solve_are_those_of_solved_runs():
    records = [record("diff", s, 0.95, "recall", solved_at=1250.0 + 250 * s) for s in range(2)]
    records += [record("diff", 2, 0.1, "recall")]
    table = recall_tables.solved_table(records, "recall")
    assert "| 2 of 3 | 1250, 1500, – | 0.950 |" in table
    assert statistics.median([0.95, 0.95, 0.1]) == 0.95


def test_names_of_cells_have_no_config_groups():
    changes = {"optimizer__name": "muon", "optimizer__warmup_steps": "0.01"}
    assert controls_tables.cell_of(record("diff", 0, **changes)) == "diff, optimizer=muon, warmup_steps=0.01"
    names = {cell for contrast in controls_tables.FAMILIES["warmup"] for cell in (*contrast.plus, *contrast.minus)}
    assert "diff, optimizer=muon, warmup_steps=0.01" in names


def test_the_subtraction_helps_against_noise_if_both_conditions_hold():
    """It solves more runs among many distractors, and its lead in accuracy grows, with an interval above zero."""
    few = {"diff": (1.0,) * 6, "zero-norm": (0.95,) * 6}
    with_norm, _ = recall_tables.SECOND_MAPS

    def runs(many):
        return [
            record(arm, seed, accuracy, task)
            for task, of_task in (("recall", few), ("recall-31", many))
            for arm, accuracies in of_task.items()
            for seed, accuracy in enumerate(accuracies)
        ]

    def helps(diff, zero):
        return recall_tables.helps_against_noise(runs({"diff": diff, "zero-norm": zero}), with_norm, "recall-31")

    all_solved, one_solved = (1.0,) * 6, (0.1, 0.2, 0.1, 0.2, 0.1, 0.95)
    solved_once = runs({"diff": all_solved, "zero-norm": one_solved})
    growth = recall_tables.noise_growth(solved_once, with_norm, "recall-31")
    np.testing.assert_allclose(growth, [0.85, 0.75, 0.85, 0.75, 0.85, 0.0])
    later = [r | {"seed": r["seed"] + 1} if r["task"] == "recall" else r for r in solved_once]
    with pytest.raises(AssertionError, match="different seeds"):
        recall_tables.noise_growth(later, with_norm, "recall-31")
    assert helps(all_solved, one_solved)
    assert not helps(all_solved, (1.0, 1.0, 1.0, 1.0, 1.0, 0.1))  # The interval contains zero.
    assert not helps((0.8,) * 6, (0.1,) * 6)  # None of them solves the task.
    assert not helps((0.9,) * 6, (0.88,) * 6)  # The lead shrinks.


def test_the_slope_is_the_change_per_doubling_of_the_tokens():
    """Differences that follow a line in the logarithm of the tokens have its slope, and noise that is even has none."""
    wiggle = {5: 0.003, 20: -0.006, 80: 0.003}  # Orthogonal to a line, since the lengths are equally far apart.
    seeds = {30: 0.1, 31: 0.5}
    exact = {
        tokens: {seed: -0.02 * math.log2(tokens) + c + wiggle[tokens] for seed, c in seeds.items()} for tokens in wiggle
    }
    np.testing.assert_allclose(size_tables.slopes(exact), [-0.02, -0.02])
    two = {5: {30: 0.25, 31: 0.0}, 20: {31: 0.02, 30: 0.05}}  # In another order.
    np.testing.assert_allclose(size_tables.slopes(two), [-0.1, 0.01], atol=1e-12)
    with pytest.raises(AssertionError, match="different seeds"):
        size_tables.slopes({5: {30: 0.25, 31: 0.0, 32: 9.0}, 20: two[20]})


def test_sizes_are_a_table_a_family_and_a_figure(tmp_path, monkeypatch):
    effects = {"diff": 0.02, "gdla": -0.03}
    records = [
        record(
            arm,
            seed,
            # With the size, the effect of diff grows by 0.01.
            2.0
            + effects.get(arm, 0.0)
            + 0.01 * (arm == "diff" and task != "novels")
            + 0.001 * math.sin(7 * seed + i * steps),
            task,
            train__steps=str(steps),
        )
        for task, lengths in controls_study.LENGTHS.items()
        for steps in lengths.values()
        for i, arm in enumerate(controls_study.ARCHITECTURES)
        for seed in range(8)
    ]
    for task, lengths in (("novels", ["5", "20", "80"]), ("novels-0.4m", ["5", "20"])):
        columns = [6] * len(lengths)
        rows = [
            [cell.strip() for cell in row.split("|")[1:-1]]
            for row in size_tables.sizes_table(records, task).partition("\n\n")[0].splitlines()
        ]
        assert [row[0] for row in rows[2:]] == lengths
        assert [sum(bool(cell) for cell in row[3:]) for row in rows[2:]] == columns
        rates = size_tables.size_rates_table(records, task).splitlines()[2:]
        assert [row.count(" 0.008 ") for row in rates] == columns  # One for each arm.
    drawn = []
    monkeypatch.setattr(results_figures, "save_figure", lambda figure, path: drawn.append(figure))
    results_figures.draw_sizes(records, tmp_path)
    panels = [{str(c.get_label()): c.lines[0].get_ydata() for c in axes.containers} for axes in drawn[0].axes]
    legend = [text.get_text() for axes in drawn[0].axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    assert sorted(legend) == sorted(panels[0])
    assert [{len(differences) for differences in panel.values()} for panel in panels] == [{3}, {2}]
    for panel in panels:
        assert panel["gdla − transformer"] == pytest.approx(-0.03, abs=0.002)
    for name in ("diff − transformer", "diff − zero-norm"):
        assert panels[0][name] == pytest.approx(0.02, abs=0.002)
        assert panels[1][name] == pytest.approx(0.02 + 0.01, abs=0.002)
    for arm, steps in (("diff", "11565"), ("gdla", "2891")):
        fewer = [r for r in records if r["arm"] != arm or r["seed"] < 5 or r["changes"]["train.steps"] != steps]
        differences = size_tables.differences_by_length(fewer, "novels", arm)
        assert sorted(map(len, differences.values())) == [5, 8, 8]
        with pytest.raises(AssertionError, match="different seeds"):
            size_tables.slopes(differences)
    fewer = [r for r in records if r["arm"] != "transformer" or r["seed"] < 5]
    with pytest.raises(AssertionError, match=r"no runs of the seeds \[5, 6, 7\] of diff"):
        size_tables.differences_by_length(fewer, "novels", "diff")
    few = [r for r in records if r["changes"]["train.steps"] != "11565"]
    assert "| 80 |" not in size_tables.sizes_table(few, "novels")

    def verdicts_of(task, table=size_tables.sizes_family_table):
        rows = [row.split("|") for row in table(records, task).splitlines()[2:]]
        return {(row[1].strip(), row[2].strip()): row[5].strip() for row in rows}

    verdicts = verdicts_of("novels")
    assert len(verdicts) == 12
    assert verdicts["`diff` − `zero-norm`", "20 tokens per parameter"] == "worse"
    assert verdicts["`diff` − `transformer`", "20 tokens per parameter"] == "worse"
    assert verdicts["`gdla` − `transformer`", "20 tokens per parameter"] == "better"
    assert verdicts["`diff` − `transformer`", "slope per doubling of the tokens, 5 to 80"] == "open"
    assert verdicts["`gdla` − `transformer`", "slope per doubling of the tokens, 5 to 20"] == "open"
    assert verdicts_of("novels", size_tables.sizes_later_table) == {
        (f"`{arm}` − `transformer`", at): "better" if (arm, at) == ("gdla", "80 tokens per parameter") else "open"
        for arm in ("diff_v2", "gdla", "gated")
        for at in ("80 tokens per parameter", "slope per doubling of the tokens, 5 to 80")
    }
    verdicts = verdicts_of("novels-0.4m")
    assert len(verdicts) == 8
    assert verdicts["`diff` − `zero-norm`", "20 tokens per parameter"] == "worse"
    assert verdicts["`diff` − `transformer`", "20 tokens per parameter, change with the size"] == "rises"
    assert verdicts["`diff` − `zero-norm`", "20 tokens per parameter, change with the size"] == "rises"
    assert verdicts["`zero-norm` − `transformer`", "slope per doubling of the tokens, 5 to 20"] == "open"
    verdicts = verdicts_of("novels-0.4m", size_tables.sizes_later_table)
    assert verdicts == {
        (f"`{arm}` − `transformer`", at): "better" if (arm, at) == ("gdla", "20 tokens per parameter") else "open"
        for arm in ("diff_v2", "gdla", "gated")
        for at in ("20 tokens per parameter", "slope per doubling of the tokens, 5 to 20")
    }


def test_alignment_is_the_growth_of_a_cosine_of_the_same_seed():
    def run(arm, seed, first, last):
        found = record(arm, seed, task="recall")
        cosines = {"attention/cosine_noise": last, "attention/cosine_answer": last / 2}
        firsts = {f"first/{name}": value - last + first for name, value in cosines.items()}
        return found | {"numbers": cosines | firsts}

    records = [run("diff", 1, 0.5, 0.6), run("zero-norm", 0, 0.4, 0.3), run("diff", 0, 0.5, 0.8)]
    records.append(run("zero-norm", 1, 0.4, 0.3))
    np.testing.assert_allclose(recall_tables.alignment_growth(records, "diff"), [0.3, 0.1])
    assert recall_tables.alignment_contrast_text(records, "diff", "zero-norm").startswith("+0.300 ±")
    assert "| diff | distractors | 0.500 ± 0.000 | 0.700 ± 1.271 | +0.200 ± 1.271 |" in (
        recall_tables.alignment_table(records)
    )


def test_diverging_lambdas_stand_by_rate_and_seed():
    def run(rate, seed, accuracy, *lambdas):
        found = record("diff-plain", seed, accuracy, "recall", rate=rate)
        return found | {"numbers": found["numbers"] | {f"lambda/{i}": x for i, x in enumerate(lambdas, 1)}}

    records = [run(0.01, 1, 0.1, -9.0, 0.5), run(0.01, 0, 0.2, -70.28, 0.4), run(0.02, 0, 0.95, 1.0, 2.0)]
    table = recall_tables.lambdas_table(records)
    assert "| 0.01 | 0 of 2 | -70.28, -9.00 | 0.40, 0.50 |" in table
    assert "| 0.02 | 1 of 1 | 1.00 | 2.00 |" in table


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


def test_longer_trainings_take_the_rate_of_the_shortest(tmp_path, monkeypatch):
    """In the part of question 4 with a shared rate, only the cells with the fewest tokens per parameter choose one."""
    calls = []

    def sweep(out, config, grid, flags):
        fields = dict(word.split("=") for word in grid)
        calls.append((fields["task"], fields["arm"], fields["seed"], fields["optimizer.learning_rate"], *flags))
        return abs(math.log2(float(fields["optimizer.learning_rate"]) / (4e-3 if fields["arm"] == "diff" else 1.6e-2)))

    monkeypatch.setattr(controls_study, "sweep", sweep)
    assert controls_study.main([f"--out={tmp_path}", "--question=4-shared", "--jobs=3"]) == 0
    assert {steps for *_, seed, _, steps in calls if seed == "100"} == {
        "--config.train.steps=723",
        "--config.train.steps=2083",
    }
    reported = [(arm, rate) for _, arm, seed, rate, _ in calls if seed == "30,31,32,33,34,35,36,37"]
    assert len(reported) == 2 * 6 + 3 * 3  # Three arms at the largest number of tokens, and with the larger models.
    assert {rate for arm, rate in reported if arm == "diff"} == {"0.004"}
    assert {rate for arm, rate in reported if arm != "diff"} == {"0.016"}


def test_each_length_has_its_own_rate(tmp_path, monkeypatch):
    """The best rate of each length is another one here."""
    best, calls = {"723": 4e-3, "2891": 8e-3, "11565": 1.6e-2, "2083": 2e-3, "8333": 8e-3}, []

    def sweep(out, config, grid, flags):
        fields = dict(word.split("=") for word in grid)
        [steps] = flags
        steps = steps.removeprefix("--config.train.steps=")
        calls.append((out.name, steps, fields["arm"], float(fields["optimizer.learning_rate"])))
        return abs(math.log2(float(fields["optimizer.learning_rate"]) / best[steps]))

    monkeypatch.setattr(controls_study, "sweep", sweep)
    assert controls_study.main([f"--out={tmp_path}", "--question=4"]) == 0
    reported = [(steps, arm, rate) for name, steps, arm, rate in calls if name == "reported"]
    assert len(reported) == 3 * 6 + 2 * 6
    assert all(rate == best[steps] for steps, _, rate in reported)
    folders = [{cell.folder for cell in controls_study.QUESTIONS[name]} for name in ("4", "4-shared")]
    assert {folder.rpartition("-")[2] for folder in folders[0] & folders[1]} == {"723", "2083"}


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
