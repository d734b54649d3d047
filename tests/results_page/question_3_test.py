"""Question 3: forms of λ, and its values at the end of training."""

from results_page.page import PAGE, PROSE, claim, shown
from results_page.runs import (
    AGAIN,
    COLLECTED,
    DIVERGING,
    FIRST,
    LONGER,
    MORE_NOISE,
    NOISE,
    RECALL,
    lambdas,
    losses,
    rates,
)
from results_page.significance import corrected, interval, two_sided

LAMBDAS = {
    "lambda_bound=sigmoid": {"model__lambda_bound": "sigmoid"},
    "lambda_bound=tanh": {"model__lambda_bound": "tanh"},
    "lambda_learning_rate_factor=0.1": {"optimizer__lambda_learning_rate_factor": "0.1"},
    "lambda_weight_decay=0.1": {"optimizer__lambda_weight_decay": "0.1"},
}


def test_forms_of_lambda_are_compared_with_the_papers():
    """All four contrasts are open, as the page says."""
    plain, p_values = losses(FIRST, "diff"), {}
    for name, changes in LAMBDAS.items():
        own = losses("question-3-novels", "diff", **changes)
        values = [own[seed] - plain[seed] for seed in range(10, 15)]
        [row] = [line for line in PAGE.splitlines() if line.startswith(f"| `diff, {name}` − `diff` |")]
        assert row.split("|")[3].strip().lstrip("+") == shown(values).lstrip("+")
        assert row.split("|")[5].strip() == "open"
        p_values[name,] = two_sided(values)
    assert min(corrected(p_values).values()) > 0.05
    for name, changes in LAMBDAS.items():
        mean, half = interval([losses("question-3-novels", "diff", **changes)[seed] - plain[seed] for seed in plain])
        assert abs(mean) + half < 0.01, name
    assert "The intervals exclude changes of more than a hundredth of a bit" in PROSE
    assert "All four forms of λ are open on novels" in PROSE
    assert "all four contrasts with the paper's λ are undecided" in PROSE


def diverging():
    """Return λ of layer 1 and whether the run solved the task, of each run."""
    return [(r["numbers"]["lambda/1"], r["numbers"]["exact_match/retrieval"] >= 0.9) for r in COLLECTED[DIVERGING]]


@claim("In `diff` on novels, λ ends between 0.1 and 0.5 in every run of question 1")
def test_lambda_of_diff_on_novels():
    assert all(0.1 < x < 0.5 for study in (FIRST, AGAIN) for layer in (1, 2) for x in lambdas(study, layer, arm="diff"))


@claim("at 2 to 16 times the tuned rate, λ of layer 1 ends between -1.8 and -182 in 17 of 20 runs")
def test_lambda_at_rates_above_the_tuned_one():
    assert [done for x, done in diverging() if -182 < x < -1.8] == [False] * 17
    assert len(diverging()) == 20
    assert {r["learning_rate"] / 1.25e-3 for r in COLLECTED[DIVERGING]} == {2, 4, 8, 16}
    assert rates(RECALL, "diff-plain", "recall") == {1.25e-3}


@claim("In the three others, |λ| of layer 1 is below 0.2, and all three solve it")
def test_lambda_of_the_solving_runs_is_small():
    assert [done for x, done in diverging() if abs(x) < 0.2] == [True] * 3


@claim("λ of layer 2 stays between 0.2 and 1 in all runs")
def test_lambda_of_layer_2_at_rates_above_the_tuned_one():
    assert all(0.2 < x < 1 for x in lambdas(DIVERGING, 2))


@claim("λ of layer 1 ends between -1.1 and -0.5 in four runs that solve the task")
def test_negative_lambda_of_runs_that_solve_the_task():
    assert (
        len(
            [
                r
                for r in COLLECTED[RECALL]
                if r["arm"] == "diff-plain"
                and -1.1 < r["numbers"]["lambda/1"] < -0.5
                and r["numbers"]["exact_match/retrieval"] >= 0.9
            ]
        )
        == 4
    )


@claim(
    "With the norm, λ stays between 0 and 1 in all reported runs on recall but two, which solve the task: with seed "
    "25, λ of layer 1 ends at -0.8 in the review's NC3, and at -0.1 among 63 distractors after 5,000 steps"
)
def test_lambda_with_the_norm_on_recall():
    outside = [
        (r, layer)
        for study, runs in COLLECTED.items()
        if study.startswith(("question", "review")) and not study.endswith("tuning")
        for r in runs
        if r["arm"] == "diff" and r["task"].startswith("recall")
        for layer in (1, 2)
        if not 0 < r["numbers"][f"lambda/{layer}"] < 1
    ]
    found = {
        next(study for study in ("review-nc3", LONGER) if run in COLLECTED[study]): (
            run["seed"],
            layer,
            round(run["numbers"][f"lambda/{layer}"], 1),
        )
        for run, layer in outside
    }
    assert len(outside) == 2
    assert found == {"review-nc3": (25, 1, -0.8), LONGER: (25, 1, -0.1)}
    assert all(run["numbers"]["exact_match/retrieval"] >= 0.9 for run, _ in outside)


@claim("With a gain it stays there among 15 and 31 distractors")
def test_lambda_with_a_gain_on_recall():
    assert all(
        0 < x < 1 for study in (RECALL, NOISE) for layer in (1, 2) for x in lambdas(study, layer, arm="diff-gain")
    )


@claim("λ of layer 1 of `diff-gain` ends between -2.1 and -0.9 in all six runs")
def test_lambda_of_diff_gain_with_63_distractors():
    assert [-2.1 < x < -0.9 for x in lambdas(MORE_NOISE, 1, arm="diff-gain")] == [True] * 6
