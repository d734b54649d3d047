"""The analysis of the preregistered questions: contrasts, Holm's correction and Fisher's test, each by brute force."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from difftx.json_files import read_json
from studies import (
    controls_study,
    controls_tables,
    post_hoc_tables,
    recall_tables,
    results,
    results_figures,
    size_tables,
    study_records,
)
from studies.controls_tables import Contrast


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


# ── The runs of docs/results.json: worth in tokens, and the tests of a family, by SciPy alone ──

COLLECTED = read_json(results.COLLECTED)


def rows_of(table):
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.partition("\n\n")[0].splitlines()[2:]]


def holm_by_hand(p_values):
    """Return corrected p-values: from the smallest on, each times the number of those at least as large."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        largest = corrected[i] = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
    return corrected


def check_family(table, values_of_each, words):
    """Compare the rows of a table with Student's t test; `words` are verdicts on a mean below and above zero."""
    tests = [scipy.stats.ttest_1samp(values, 0) for values in values_of_each]
    p_values = holm_by_hand([test.pvalue if any(of) else 1.0 for test, of in zip(tests, values_of_each, strict=True)])
    rows = zip(rows_of(table), values_of_each, tests, p_values, words, strict=True)
    for (*_, mean, p, verdict), values, test, corrected, (below, above) in rows:
        low, high = test.confidence_interval() if any(values) else (0.0, 0.0)
        assert [*map(float, mean.split(" ± "))] == pytest.approx([np.mean(values), (high - low) / 2], abs=6e-4)
        assert float(p.replace("<0.001", "0")) == pytest.approx(corrected, abs=1e-3)
        decided = f"{above if np.mean(values) > 0 else below}{', marginal' if corrected >= 0.02 else ''}"
        assert verdict == ("open" if corrected >= 0.05 else decided)


@pytest.mark.parametrize(
    ("studies", "family", "number"),
    [
        ("question-1-again", "again", study_records.TEST_LOSS),
        ("question-1-novels", "norm-or-gain", study_records.TEST_LOSS),
        ("question-1-wide", "main", study_records.TEST_LOSS),
        ("question-1-stdlib", "main", study_records.VALIDATION_LOSS),
        ("question-1-novels+question-2", "warmup", study_records.TEST_LOSS),
        ("question-1-novels+question-3-novels", "lambda", study_records.TEST_LOSS),
        ("question-5", "differential", study_records.TEST_LOSS),
        ("question-1-again+review-novels", "review", study_records.TEST_LOSS),
    ],
)
def test_the_contrasts_of_a_family_are_tested_over_paired_seeds(studies, family, number):
    records, values, words = results.joined(COLLECTED, studies), [], []
    losses = {(controls_tables.cell_of(r), r["seed"]): r["numbers"].get(number) for r in records}
    for _, plus, minus in controls_tables.FAMILIES[family]:
        seeds = sorted(seed for cell, seed in losses if cell == plus[0])
        values.append([sum(losses[c, s] for c in plus) - sum(losses[c, s] for c in minus) for s in seeds])
        words.append(("smaller", "larger") if len(plus) > 1 else ("better", "worse"))
    check_family(controls_tables.family_table(records, family, number), values, words)


@pytest.mark.parametrize("study", ["question-4", "question-4-shared"])
@pytest.mark.parametrize("task", controls_study.LENGTHS)
def test_contrasts_of_sizes_are_differences_slopes_and_changes_with_the_size(study, task):
    """The rows that come first are differences of seeds at a length; a slope is a covariance over a variance."""
    records = COLLECTED[study]

    def difference(contrast, tokens, of=task):
        steps = str(controls_study.LENGTHS[of][tokens])
        arms = [name.strip("` ") for name in contrast.split("−")]
        own, other = (
            {r["seed"]: r["numbers"][study_records.TEST_LOSS] for r in records
             if (r["task"], r["arm"], r["changes"]["train.steps"]) == (of, arm, steps)} for arm in arms
        )  # fmt: skip
        return {seed: own[seed] - other[seed] for seed in sorted(own)}

    tables = [size_tables.sizes_family_table] + [size_tables.sizes_later_table] * (study == "question-4")
    for table in (of(records, task) for of in tables):
        values, words = [], []
        for contrast, at, *_ in rows_of(table):
            if at.startswith("slope"):
                lengths = [t for t in controls_study.LENGTHS[task] if t <= int(at.rpartition(" ")[2])]
                x = [math.log2(t) for t in lengths if difference(contrast, t)]
                y = [d for t in lengths if (d := difference(contrast, t))]
                values.append([np.cov(x, [d[s] for d in y])[0, 1] / np.var(x, ddof=1) for s in y[-1]])
            else:
                own = difference(contrast, int(at.split()[0]))
                small = difference(contrast, 20, size_tables.SMALLEST) if at.endswith("size") else dict.fromkeys(own, 0)
                values.append([own[seed] - small[seed] for seed in own])
            words.append(("better", "worse") if at.endswith("parameter") else ("falls", "rises"))
        check_family(table, values, words)


def test_a_curve_through_three_points_is_found():
    """The points are of a power law with known parameters; a loss gives back its tokens."""
    points = {tokens: 1.5 + 0.7 * tokens**-0.4 for tokens in (0.7, 3.0, 12.0)}
    curve = post_hoc_tables.curve_through(points)
    assert curve == pytest.approx((1.5, 0.7, 0.4), rel=1e-6)
    assert post_hoc_tables.curve_through(dict(list(points.items())[1:]), 0.4) == pytest.approx(
        (1.5, 0.7, 0.4), rel=1e-6
    )
    assert curve.tokens(1.5 + 0.7 * 5**-0.4) == pytest.approx(5)


def fitted_curve(tokens, losses):
    """Return E, B and b of the curve E + B D^-b that is closest to the losses."""
    start, exact = [1.9, 0.5, 0.5], {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15}
    return scipy.optimize.least_squares(lambda p: p[0] + p[1] * tokens ** -p[2] - losses, start, **exact).x


@pytest.mark.parametrize("arm", ["zero-norm", "diff", "gated"])
def test_worth_is_read_from_a_fitted_curve_with_a_jackknife_over_seeds(arm):
    """The curve is fitted by least squares, and the variance is (n - 1) / n times the squares without each seed."""
    seeds = controls_study.SIZE_SEEDS
    steps = controls_study.LENGTHS["novels"].values()

    def mean(name, at, without):
        runs = (
            r for r in COLLECTED["question-4"] if (r["task"], r["arm"]) == ("novels", name) and r["seed"] != without
        )
        return statistics.fmean(
            r["numbers"][study_records.TEST_LOSS] for r in runs if r["changes"]["train.steps"] == str(at)
        )

    def log_worths(without):
        tokens = np.array([1024 * at / 1e6 for at in steps])
        losses = np.array([mean("transformer", at, without) for at in steps])
        floor, scale, exponent = fitted_curve(tokens, losses)
        own = np.array([mean(arm, at, without) for at in steps])
        return np.log2(((own - floor) / scale) ** (-1 / exponent) / tokens)

    whole, without = log_worths(None), np.array([log_worths(seed) for seed in seeds])
    n = len(seeds)
    deviations = np.sqrt((n - 1) / n * np.sum((without - without.mean(0)) ** 2, 0))
    found = post_hoc_tables.log_worth_estimates(COLLECTED["question-4"], "novels", arm)
    np.testing.assert_allclose([of.mean for of in found], whole, atol=1e-4)
    np.testing.assert_allclose([of.half_width for of in found], scipy.stats.t.ppf(0.975, n - 1) * deviations, rtol=1e-3)


def test_the_worth_of_a_difference_is_found_by_bisection_on_the_fitted_curve():
    """In most rows, neither arm is the Transformer. Its losses only give the curve."""
    runs = [r for r in COLLECTED["question-4"] if (r["task"], r["arm"]) == ("novels", "transformer")]
    tokens = np.array(sorted({r["tokens"] for r in runs})) / 1e6
    losses = [
        statistics.fmean(r["numbers"][study_records.TEST_LOSS] for r in runs if r["tokens"] == t * 1e6) for t in tokens
    ]
    floor, scale, exponent = fitted_curve(tokens, np.array(losses))
    own, trained = COLLECTED["question-1-again"], 2.048
    by_arm = {r["arm"]: [] for r in own}
    for r in sorted(own, key=lambda r: r["seed"]):
        by_arm[r["arm"]].append(r["numbers"][study_records.TEST_LOSS])

    def worth(change):
        excess = floor + scale * trained**-exponent + change
        return scipy.optimize.bisect(lambda t: floor + scale * t**-exponent - excess, 0.5, 10) / trained

    table = rows_of(post_hoc_tables.worth_family_table(own + COLLECTED["question-4"], "again"))
    assert len(table) == len(controls_tables.FAMILIES["again"])
    for title, _, _, found, _ in table:
        first, second = (by_arm[arm.strip("` ")] for arm in title.split("−"))
        changes = np.subtract(first, second)
        low, high = scipy.stats.ttest_1samp(changes, 0).confidence_interval()
        wanted = [worth(change) for change in (changes.mean(), high, low)]
        assert [*map(float, found.replace("(", "").replace(")", "").replace("to ", "").split())] == pytest.approx(
            wanted, abs=6e-3
        )


def test_differences_over_settings_and_seeds():
    """All settings of the page, each with its mean over seeds; Welch's test does not pair the seeds."""
    studies = (
        "question-1-novels+question-1-again+question-1-wide+question-1-stdlib+question-2+question-2-zero+question-4"
    )
    records = results.joined(COLLECTED, studies)
    of = [*post_hoc_tables.differences_by_setting(records, "diff", "zero-norm", study_records.TEST_LOSS).values()]
    assert len(of) == 11  # Two sets, wide heads, source code, two lengths of warm-up with Muon, five sizes and lengths.
    low, high = scipy.stats.t.interval(0.95, len(of) - 1, np.mean(of), scipy.stats.sem(of))
    assert post_hoc_tables.settings_text(records, "diff", "zero-norm") == f"{np.mean(of):+.3f} ± {(high - low) / 2:.3f}"
    again, review = COLLECTED["question-1-again"], COLLECTED["review-novels"]
    p_values = {
        (contrast.plus[0], contrast.minus[0]): scipy.stats.ttest_ind(
            [r["numbers"][study_records.TEST_LOSS] for r in review if r["arm"] == contrast.plus[0]],
            [r["numbers"][study_records.TEST_LOSS] for r in again if r["arm"] == contrast.minus[0]],
            equal_var=False,
        ).pvalue
        for contrast in controls_tables.FAMILIES["review"]
    }
    # The one of top_k and the Transformer is the largest, so Holm's correction leaves it.
    assert max(p_values, key=p_values.get) == ("top_k", "transformer")
    assert float(post_hoc_tables.welch_p_text(again + review, "review", "top_k", "transformer")) == pytest.approx(
        p_values["top_k", "transformer"], abs=1e-3
    )


def test_labels_of_lines_are_spread():
    assert results_figures.spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert results_figures.spread([0.5, 0.52, 0.9, 0.95], 0.1) == pytest.approx([0.46, 0.56, 0.875, 0.975])
    assert min(np.diff(results_figures.spread([0.1, 0.15, 0.2, 0.28], 0.1))) == pytest.approx(0.1)
