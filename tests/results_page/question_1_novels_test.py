"""Question 1 on novels: norm, gain or subtraction?"""

import statistics

import pytest

from benchmarks import controls_study
from difftx.configs import controls
from results_page.page import PROSE, claim, row_of, section, shown
from results_page.post_hoc import bought_by
from results_page.question_1 import NORM_OR_GAIN, NOVELS_FAMILY, better
from results_page.runs import AGAIN, COLLECTED, FIRST, RECALL, contrast, losses
from results_page.significance import corrected, interval, two_sided

NOVELS_SECTION = section("### Novels", "### Recall")


@pytest.mark.parametrize(("study", "first"), [(AGAIN, True), (FIRST, False)])
def test_contrasts_of_question_1_have_their_intervals(study, first):
    """The table of the ten seeds stands first on the page, then that of the five."""
    tables = NOVELS_SECTION.partition("The first set, with five seeds")
    for one, other in NORM_OR_GAIN:
        if "diff-plain" in (one, other):
            continue
        values = contrast(study, one, other)
        cells = row_of(one, other, tables[0] if first else tables[2])
        assert cells[2] == shown(values)
        mean, half = interval(values)
        if abs(mean) < half:  # The uncorrected interval contains zero.
            assert cells[4] == "open"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("diff-gain", "zero-gain"),
        ("diff", "zero-norm"),
        ("diff", "diff-gain"),
        ("zero-norm", "zero-gain"),
        ("diff", "transformer"),
        ("diff", "transformer-gain"),
        ("zero-norm", "transformer"),
        ("transformer-wide-norm", "transformer"),
        ("diff-gain", "transformer"),
        ("zero-gain", "transformer-gain"),
    ],
)
def test_contrasts_in_the_prose_have_their_intervals(one, other):
    """Check the answers to question 1."""
    assert f"`{one}` − `{other}` is {shown(contrast(AGAIN, one, other))}" in PROSE


def test_both_sets_of_question_1_use_different_seeds():
    assert set(losses(FIRST, "diff")) == set(range(10, 15))
    assert set(losses(AGAIN, "diff")) == set(range(20, 30))


@pytest.mark.parametrize("task", ["novels", "recall"])
def test_recipe_has_the_tuned_settings(task):
    """Rate and gain of each arm are those of its smallest validation loss, and the best rate is between two others."""
    study = f"question-1-{task}"
    for arm, fields in controls.TUNED[task].items():
        tries = [r for r in COLLECTED[f"{study}-tuning"] if r["arm"] == arm]
        assert {r["seed"] for r in tries} == {controls_study.TUNED_SEED}
        best = min(tries, key=lambda r: r["numbers"]["loss/loss"])
        rate = best["learning_rate"]
        assert {rate / 2, rate * 2} <= {round(r["learning_rate"], 8) for r in tries}
        gain = {"model.post_scale": float(best["changes"]["model.post_scale"])} if arm.endswith("-gain") else {}
        assert fields == {"optimizer.learning_rate": rate, **gain}
        reported = [r for r in COLLECTED[study] if r["arm"] == arm]
        assert {r["learning_rate"] for r in reported} == {rate}
        assert controls_study.TUNED_SEED not in {r["seed"] for r in reported}


@pytest.mark.parametrize("study", [FIRST, AGAIN, RECALL])
def test_every_arm_has_equally_many_tokens_and_seeds(study):
    runs = COLLECTED[study]
    seeds = {arm: sorted(r["seed"] for r in runs if r["arm"] == arm) for arm in {r["arm"] for r in runs}}
    assert len({tuple(of) for of in seeds.values()}) == 1
    assert len({r["tokens"] for r in runs}) == 1
    counts = [r["parameters"] for r in runs]
    assert max(counts) / min(counts) < 1.01


@claim(
    "The head norm is about half of this. The second attention map lowers the loss of the same code: with the norm by "
    "about what its parameters would buy elsewhere, and without it by about twice as much"
)
def test_answer_about_norm_and_second_map():
    assert better("diff-gain", "zero-gain")
    assert better("diff-gain", "diff")
    assert "The second attention map helps the same code without the norm (`diff-gain` − `zero-gain`" in PROSE
    whole, norm, with_norm, with_gain = (
        interval(contrast(AGAIN, *pair))[0]
        for pair in (("diff", "transformer"), ("diff", "diff-gain"), ("zero-norm", "diff"), ("zero-gain", "diff-gain"))
    )
    assert norm / whole == pytest.approx(0.5, abs=0.1)
    bought = statistics.fmean(bought_by(1 / (1 - 0.11)))
    assert [with_norm / bought, with_gain / bought] == pytest.approx([1, 2], abs=0.25)


@claim(
    "with a gain, `zero-gain` has twice the rate and twice the gain of `diff-gain`, and with the norm, the rates are "
    "equal"
)
def test_settings_of_the_arms_with_and_without_second_map():
    rate, gain = "optimizer.learning_rate", "model.post_scale"
    tuned = controls.TUNED["novels"]
    assert [tuned["zero-gain"][name] / tuned["diff-gain"][name] for name in (rate, gain)] == [2, 2]
    assert tuned["zero-norm"][rate] == tuned["diff"][rate]


@claim("The control with λ = 0 is weak")
def test_weak_control():
    mean, half = interval(contrast(AGAIN, "zero-gain", "transformer-gain"))
    assert mean > half


@claim("with λ = 0, the second queries and keys, 11 % of the parameters, do not train")
def test_unused_parameters_without_second_map():
    assert {
        # In each of two layers, the second query and key of all heads: 64 → 64.
        round(100 * 2 * 2 * 64 * 64 / r["parameters"])
        for r in COLLECTED[AGAIN]
        if r["arm"].startswith("zero")
    } == {11}


@claim("With AdamW and 14 tokens per parameter, the whole differential model is behind the Transformer")
def test_diff_is_behind_the_transformer():
    assert better("transformer", "diff")


@claim("With the norm it is open")
def test_second_map_with_the_norm_is_open():
    assert not better("diff", "zero-norm")
    assert not better("zero-norm", "diff")


@claim("the corrected p-value is just above 0.05")
def test_corrected_p_value_of_the_second_map():
    assert (
        0.05
        < corrected({pair: two_sided(contrast(AGAIN, *pair)) for pair in NOVELS_FAMILY})["diff", "zero-norm"]
        < 0.06
    )


@claim("With λ = 0, norm or gain is open")
def test_norm_or_gain_with_lambda_0_is_open():
    assert not better("zero-norm", "zero-gain")
    assert not better("zero-gain", "zero-norm")


@claim("The best of the gains 1, 2, 4 and 8 is 1, so `diff-gain` is the differential model without norm and gain")
def test_best_gain_of_diff_is_one():
    assert controls.TUNED["novels"]["diff-gain"]["model.post_scale"] == 1
    assert controls_study.GAINS == (1, 2, 4, 8)
    assert losses(FIRST, "diff-gain") == losses(FIRST, "diff-plain")


@claim("`diff` is worse than both Transformers")
def test_diff_is_worse_than_both_transformers():
    assert all(better(arm, "diff") for arm in ("transformer", "transformer-gain"))


@claim("which left every contrast open")
def test_first_set_leaves_every_contrast_open():
    assert (
        min(
            corrected(
                {
                    pair: two_sided(contrast(FIRST, *pair)) if any(contrast(FIRST, *pair)) else 1.0
                    for pair in NORM_OR_GAIN
                }
            ).values()
        )
        > 0.05
    )
