"""Question 5: differential models from a pretrained Transformer."""

import math
import statistics

import pytest

from benchmarks import controls_study
from results_page.page import PROSE, claim, row_of, section, shown, shows_p
from results_page.runs import COLLECTED, LOSS, contrast, lambdas, step_time
from results_page.significance import corrected, interval, two_sided

CONVERTED = "question-5"
METHODS = ("zero-branch", "dex", "split")
CONVERTED_P_VALUES = corrected({(arm,): two_sided(contrast(CONVERTED, arm, "transformer")) for arm in METHODS})
CONVERTED_SECTION = section("## Question 5: from a pretrained Transformer", "## Question 6: distractors")


def converted_verdict(arm):
    """Return the sign of a method's difference from the Transformer, or 0 if it is open."""
    mean, _ = interval(contrast(CONVERTED, arm, "transformer"))
    return 0 if CONVERTED_P_VALUES[arm,] >= 0.05 else math.copysign(1, mean)


def is_as_good(arm):
    """Return whether the interval of a method's difference lies within a hundredth of a bit per byte of zero."""
    mean, half = interval(contrast(CONVERTED, arm, "transformer"))
    return abs(mean) + half < 0.01


def parameters(arm):
    (found,) = {r["parameters"] for r in COLLECTED[CONVERTED] if r["arm"] == arm}
    return found


@pytest.mark.parametrize("arm", METHODS)
def test_the_contrasts_of_question_5_have_their_intervals(arm):
    cells = row_of(arm, "transformer", CONVERTED_SECTION)
    assert cells[2] == shown(contrast(CONVERTED, arm, "transformer"))
    assert shows_p(cells[3], CONVERTED_P_VALUES[arm,])
    assert cells[4] == {0: "open", 1: "worse", -1: "better"}[converted_verdict(arm)]
    if arm != "dex":
        assert f"`{arm}` − `transformer` {'is ' if arm == 'zero-branch' else ''}{cells[2]}" in PROSE  # In the answers.


@claim("`dex` is equal to the Transformer within a ten-thousandth of a bit")
def test_dex_is_equal_to_the_transformer():
    mean, half = interval(contrast(CONVERTED, "dex", "transformer"))
    assert abs(mean) + half < 1e-4


def test_the_models_of_question_5_train_as_preregistered():
    """Fresh seeds, a rate per arm from another seed, and as many bytes after the conversion as before."""
    start = COLLECTED[f"{CONVERTED}-start"]
    assert [r["seed"] for r in start] == list(range(40, 48))
    assert {r["learning_rate"] for r in start} == {0.008}
    assert {r["tokens"] for r in (*start, *COLLECTED[CONVERTED])} == {2_048_000}
    for arm in ("transformer", *METHODS):
        tries = [r for r in COLLECTED[f"{CONVERTED}-tuning"] if r["arm"] == arm]
        assert {r["seed"] for r in tries} == {controls_study.TUNED_SEED}
        rate = min(tries, key=lambda r: r["numbers"]["loss/loss"])["learning_rate"]
        assert {rate / 2, rate * 2} <= {round(r["learning_rate"], 8) for r in tries}
        reported = [r for r in COLLECTED[CONVERTED] if r["arm"] == arm]
        assert {r["learning_rate"] for r in reported} == {rate}
        assert sorted(r["seed"] for r in reported) == list(range(40, 48))


def test_answer_about_conversion():
    time = step_time("zero-branch")
    gain = shown(contrast(CONVERTED, "zero-branch", "transformer"))
    assert (
        f"`zero-branch` is better than the Transformer by {gain}, with 22 % more parameters and {time} times the time"
    ) in PROSE
    assert "`dex` is as good, because it stays a Transformer. `split` is worse" in PROSE
    assert f"with 22 % more parameters and {time} times the time: about a fifth" in PROSE  # In the answers.
    assert f"a training step takes {time} times as long" in PROSE
    assert converted_verdict("zero-branch") == -1
    assert is_as_good("dex")
    assert converted_verdict("split") == 1


@claim('its interval lies within the hundredth of a bit per byte that counts as "as good"')
def test_zero_branch_is_as_good():
    assert is_as_good("zero-branch")


@claim("They have 22 % more parameters than the Transformer")
def test_parameters_of_converted_models():
    assert round(100 * (parameters("zero-branch") / parameters("transformer") - 1)) == 22
    assert max(parameters(arm) / parameters("transformer") for arm in ("dex", "split")) < 1.005


@claim("|λ| ends below a fiftieth in every run and layer")
def test_lambda_of_dex():
    assert max(abs(x) for layer in (1, 2) for x in lambdas(CONVERTED, layer, arm="dex")) < 1 / 50


@claim("λ is negative at the end of every run, in both layers")
def test_lambda_of_split():
    assert all(x < 0 for layer in (1, 2) for x in lambdas(CONVERTED, layer, arm="split"))


@claim("so the models do subtract")
def test_lambda_of_zero_branch():
    assert all(x > 0 for layer in (1, 2) for x in lambdas(CONVERTED, layer, arm="zero-branch"))


@claim("The models here have seen 14 bytes per parameter before the conversion")
def test_tokens_before_conversion():
    assert {round(r["tokens"] / r["parameters"]) for r in COLLECTED[f"{CONVERTED}-start"]} == {14}


@claim("on other text, with 0.8M parameters and three seeds, the means have the same order")
def test_order_of_methods_on_other_text():
    assert [
        sorted(
            METHODS,
            key=lambda arm: statistics.fmean(
                r["numbers"][number] for r in COLLECTED[study] if (r["task"], r["arm"]) == (task, arm)
            ),
        )
        for study, task, number in (
            (CONVERTED, "novels", LOSS),
            ("differential", "books-0.8m", "loss/bits_per_byte"),
        )
    ] == [["zero-branch", "dex", "split"]] * 2
