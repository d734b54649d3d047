"""Question 4: the models of 430,000 parameters."""

from results_page.page import PROSE, claim, shown
from results_page.question_4 import (
    LARGE,
    LARGE_LATER,
    LARGE_SHARED,
    LATER_ARMS,
    OWN,
    RUNS,
    SHARED,
    SIZE_FAMILIES,
    SIZE_P_VALUES,
    STEPS_OF,
    at_length,
    changed_in_one_family,
    cost_of_own_rate,
    p_values_in_one_family,
    size_verdict,
    tuned_rate,
)
from results_page.significance import corrected, interval, two_sided


def test_prose_has_the_differences_of_larger_models():
    large = {tokens: shown(at_length("diff", "transformer", tokens, LARGE)) for tokens in (5, 20)}
    assert (
        f"`diff` − `transformer` is {large[5]} at 5 tokens per parameter (not preregistered), and {large[20]}" in PROSE
    )
    assert f"`diff` − `zero-norm` is {shown(at_length('diff', 'zero-norm', 20, LARGE))} at 20 tokens" in PROSE
    assert f"With 430,000 parameters, `diff` is open at 20 ({large[20]})" in PROSE
    assert size_verdict("diff", "transformer", "at 20", LARGE) == 0


@claim("`transformer` has its smallest loss at four times this rate, `zero-norm` at twice, and `diff` at this rate")
def test_best_rates_of_the_larger_models():
    assert [
        tuned_rate(arm, STEPS_OF[LARGE][20]) / tuned_rate(arm, STEPS_OF[LARGE][5])
        for arm in ("transformer", "zero-norm", "diff")
    ] == [4, 2, 1]


def open_contrasts(seeds, family=LARGE):
    """Return the names of the contrasts of a family that are open with the first seeds."""
    values = corrected({name: two_sided(of[:seeds]) for name, of in SIZE_FAMILIES[family].items()})
    return {name for name, value in values.items() if value >= 0.05}


@claim(
    "With a rate for each length, the slopes of `diff` − `transformer` and of `zero-norm` − `transformer` in bits per "
    "byte fall. The six other preregistered contrasts of these arms are open"
)
def test_verdicts_of_the_larger_models():
    assert len(SIZE_FAMILIES[LARGE]) == 8
    decided = {("diff", "transformer", "slope"), ("zero-norm", "transformer", "slope")}
    assert {name: size_verdict(*name, LARGE) for name in decided} == dict.fromkeys(decided, -1)
    assert SIZE_FAMILIES[LARGE].keys() - open_contrasts(8) == decided
    assert {len(of) for of in SIZE_FAMILIES[LARGE].values()} == {8}


@claim("with five, all eight contrasts were open, and with seven, only the slope of `diff` was decided")
def test_larger_models_with_fewer_seeds():
    assert open_contrasts(5) == SIZE_FAMILIES[LARGE].keys()
    assert SIZE_FAMILIES[LARGE].keys() - open_contrasts(7) == {("diff", "transformer", "slope")}


@claim("The slope is below zero for each seed, as the plan expected")
def test_slope_of_zero_norm_in_larger_models():
    assert max(SIZE_FAMILIES[LARGE]["zero-norm", "transformer", "slope"]) < 0
    assert size_verdict("zero-norm", "transformer", "slope", LARGE) == -1


@claim(
    "the slope of `zero-norm` − `transformer` in bits per byte falls. The seven other preregistered contrasts are open "
    "with five seeds"
)
def test_verdicts_of_larger_models_with_a_shared_rate():
    assert len(SIZE_FAMILIES[LARGE_SHARED]) == 8
    assert size_verdict("zero-norm", "transformer", "slope", LARGE_SHARED) == -1
    assert sum(size_verdict(*name, LARGE_SHARED) == 0 for name in SIZE_FAMILIES[LARGE_SHARED]) == 7
    assert {len(of) for of in SIZE_FAMILIES[LARGE_SHARED].values()} == {5}


@claim(
    "the rates tuned at 20 tokens per parameter are not shown to lower the loss of `transformer` or of `zero-norm`: "
    "both intervals of the change contain zero"
)
def test_own_rates_do_not_lower_the_loss_of_larger_models():
    for arm in ("transformer", "zero-norm"):
        cost, half = interval(cost_of_own_rate(arm, 20, LARGE, LARGE_SHARED))
        assert abs(cost) < half


def test_seeds_of_the_later_arms_of_larger_models():
    seeds = {(r["arm"], r["changes"]["train.steps"]): [] for r in RUNS[LARGE] if r["arm"] in LATER_ARMS}
    for r in RUNS[LARGE]:
        if r["arm"] in LATER_ARMS:
            seeds[r["arm"], r["changes"]["train.steps"]].append(r["seed"])
    assert len(seeds) == 6
    assert all(sorted(of) == list(range(30, 38)) for of in seeds.values())


@claim(
    "`gated` is better than the Transformer with 20 tokens per parameter (marginal), and the five other contrasts of "
    "the later architectures are open"
)
def test_verdicts_of_the_later_arms_of_larger_models():
    family = SIZE_FAMILIES[LARGE_LATER]
    assert len(family) == 6
    assert {name: size_verdict(*name, LARGE_LATER) for name in family} == {
        name: -1 if name == ("gated", "transformer", "at 20") else 0 for name in family
    }


@claim("The page reported five of their eight seeds before: all six contrasts were open")
def test_later_arms_of_larger_models_with_fewer_seeds():
    assert open_contrasts(5, LARGE_LATER) == SIZE_FAMILIES[LARGE_LATER].keys()


@claim("there, `gated` is better than the Transformer (marginal), and `gdla` and `diff_v2` are open")
def test_answer_about_the_later_arms_of_larger_models():
    verdicts = {arm: size_verdict(arm, "transformer", "at 20", LARGE_LATER) for arm in LATER_ARMS}
    assert verdicts == {"gated": -1, "gdla": 0, "diff_v2": 0}


@claim("For `gated`, the corrected p-value is just below 0.05. For `gdla`, it is just above")
def test_p_values_of_the_later_arms_of_larger_models():
    p_values = SIZE_P_VALUES[LARGE_LATER]
    assert 0.04 < p_values["gated", "transformer", "at 20"] < 0.05 < p_values["gdla", "transformer", "at 20"] < 0.07


@claim("The plan also expected a rising slope of `gdla`, which is open")
def test_slope_of_gdla_in_larger_models():
    assert size_verdict("gdla", "transformer", "slope", LARGE_LATER) == 0


def test_prose_has_the_differences_of_the_later_arms_of_larger_models():
    gdla, gated, diff_v2 = (
        {tokens: shown(at_length(arm, "transformer", tokens, LARGE)) for tokens in (5, 20)}
        for arm in ("gdla", "gated", "diff_v2")
    )
    assert (
        f"`gdla` − `transformer` is {gdla[20]}, `gated` − `transformer` is {gated[20]}, and `diff_v2` − `transformer` "
        f"is {diff_v2[20]}. At 5, they are {gdla[5]}, {gated[5]} and {diff_v2[5]} (not preregistered)"
    ) in PROSE


@claim("In one family of all fourteen, the lead of `gated` and the slope of `zero-norm` would be open")
def test_one_family_of_the_larger_models():
    assert len(p_values_in_one_family(LARGE, LARGE_LATER)) == 14
    assert changed_in_one_family(LARGE, LARGE_LATER) == {
        ("gated", "transformer", "at 20", LARGE_LATER),
        ("zero-norm", "transformer", "slope", LARGE),
    }


@claim("Of the 96 runs, 76 name a commit before that of their plan")
def test_commit_of_the_runs_of_larger_models():
    """The plan of 54ad5ce came after a1466ba. The first runs have a plan and a commit of the day before."""
    commits = [r["commit"][:7] for r in RUNS[LARGE]]
    assert (len(commits), commits.count("a1466ba"), commits.count("dca788e")) == (96, 76, 20)
    assert "For 116 runs of question 4, it is older than the plan" in PROSE
    smaller = [r for r in RUNS[OWN] if r["commit"].startswith("b2195ee") and r not in RUNS[SHARED]]
    assert 76 + len(smaller) == 116


@claim("Of the 96 runs above, 20 are in this table too. It has the first five of their seeds")
def test_runs_of_larger_models_shared_between_the_parts():
    assert len(RUNS[LARGE]) == 96
    assert len([r for r in RUNS[LARGE] if r in RUNS[LARGE_SHARED]]) == 20
    assert {r["seed"] for r in RUNS[LARGE_SHARED]} == set(sorted({r["seed"] for r in RUNS[LARGE]})[:5])
