"""Question 2: warm-up and optimizer."""

import statistics

import pytest

from results_page.page import PAGE, PROSE, claim, shown, shows_p
from results_page.question_2 import (
    SECOND_MAP_WITH_MUON,
    WARMUP_FAMILY,
    by_optimizer,
    is_decided,
    p_value_in_one_family_of_ten,
)
from results_page.runs import COLLECTED, FIRST, LOSS
from results_page.significance import corrected, interval, two_sided


@pytest.mark.parametrize("name", WARMUP_FAMILY)
def test_contrasts_of_question_2_have_their_intervals(name):
    """With Holm's correction over all eight."""
    [line] = [line for line in PAGE.splitlines() if f"| {name} |" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    values = WARMUP_FAMILY[name]
    assert cells[2] == shown(values)
    p = corrected({(other,): two_sided(of) for other, of in WARMUP_FAMILY.items()})[name,]
    assert shows_p(cells[3], p)
    assert (cells[4] == "open") == (p >= 0.05)


@pytest.mark.parametrize("share", SECOND_MAP_WITH_MUON)
def test_the_second_map_with_muon_is_open(share):
    [line] = [
        line
        for line in PAGE.splitlines()
        if f"| the second attention map (11 % of the parameters), warm-up of {share} |" in line
    ]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    p = corrected({(other,): two_sided(of) for other, of in SECOND_MAP_WITH_MUON.items()})[share,]
    assert cells[2] == shown(SECOND_MAP_WITH_MUON[share])
    assert shows_p(cells[3], p)
    assert cells[4] == "open"
    assert p >= 0.05
    assert "With Muon, `diff` − `zero-norm` is open at both" in PROSE


@claim("With AdamW, a warm-up of 1 % is worse than 50 % for both models")
def test_short_warmup_with_adamw_is_worse():
    assert all(is_decided(f"{arm}'s need for a long warm-up, AdamW") > 0 for arm in ("diff", "transformer"))


@claim(
    "A contrast of its own shows that with Muon, the short warm-up favours the Transformer. With AdamW, the estimate "
    "is as large, but the contrast is open"
)
def test_short_warmup_with_muon_favours_the_transformer():
    assert is_decided("diff's need minus transformer's, Muon") > 0
    assert not is_decided("diff's need minus transformer's, AdamW")
    assert (
        shown(WARMUP_FAMILY["diff's need minus transformer's, Muon"])[:6]
        == shown(WARMUP_FAMILY["diff's need minus transformer's, AdamW"])[:6]
    )


@claim("With Muon, no harm of the short warm-up is shown for either model")
def test_short_warmup_with_muon_does_no_harm():
    assert all(
        interval(WARMUP_FAMILY[f"{arm}'s need for a long warm-up, Muon"])[0] < 0 for arm in ("diff", "transformer")
    )


@claim("In one family of ten, this p-value would be above 0.05")
def test_p_value_in_one_family_of_ten():
    assert p_value_in_one_family_of_ten("the whole architecture, Muon") > 0.05


@claim(
    "On the seed and text of the tuning, `diff` has no lead, and the losses of the Transformer at its two best rates "
    "are almost equal"
)
def test_tuning_with_muon_and_a_long_warmup():
    losses = {
        arm: sorted(
            r["numbers"]["loss/bits_per_byte"]
            for r in COLLECTED["question-2-tuning"]
            if r["arm"] == arm and r["changes"].keys() == {"optimizer.name", "optimizer.learning_rate"}
        )
        for arm in ("diff", "transformer")
    }
    assert losses["diff"][0] > losses["transformer"][0]
    assert losses["transformer"][1] - losses["transformer"][0] < 1e-3


@claim("With Muon and the long warm-up, which is the worse one for the Transformer, `diff` is better")
def test_answer_names_the_warmup_of_the_lead_with_muon():
    assert is_decided("the whole architecture, Muon") == -1
    assert is_decided("transformer's need for a long warm-up, Muon") == -1


@claim(
    "Of the settings of question 2, Muon with a warm-up of 1 % has the smallest mean loss for both models (not "
    "preregistered)"
)
def test_smallest_mean_loss_of_question_2():
    muon_and_short = {"optimizer.name": "muon", "optimizer.warmup_steps": "0.01"}
    for arm in ("diff", "transformer"):
        by_setting = {}
        for r in COLLECTED["question-2"] + COLLECTED[FIRST]:  # The first set has AdamW with the long warm-up.
            if r["arm"] == arm:
                changes = {name: value for name, value in r["changes"].items() if name != "optimizer.learning_rate"}
                by_setting.setdefault(tuple(sorted(changes.items())), []).append(r["numbers"][LOSS])
        assert len(by_setting) == 4
        means = {setting: statistics.fmean(of) for setting, of in by_setting.items()}
        assert dict(min(means, key=means.get)) == muon_and_short


@claim("λ of layer 2 ends between 0.3 and 0.5")
def test_lambda_of_layer_2_with_muon():
    assert all(
        0.3 < r["numbers"]["lambda/2"] < 0.5
        for r in COLLECTED["question-2"]
        if r["arm"] == "diff" and "optimizer.warmup_steps" not in r["changes"]
    )


@claim("The short warm-up makes the Transformer better")
def test_short_warmup_with_muon_improves_the_transformer():
    assert is_decided("transformer's need for a long warm-up, Muon") < 0


@claim("For `diff` the change is open")
def test_short_warmup_with_muon_is_open_for_diff():
    assert not is_decided("diff's need for a long warm-up, Muon")


@claim(
    "With Muon and the long warm-up, which is the worse one for the Transformer, `diff` is better than the Transformer"
)
def test_diff_with_muon_is_better_than_the_transformer():
    assert is_decided("the whole architecture, Muon") < 0


@claim(
    "With the long warm-up, the loss of `zero-norm`, which has no second map, is lower than that of the Transformer too"
)
def test_zero_norm_with_muon_is_better_than_the_transformer():
    assert sum(interval(by_optimizer("Muon", (1, "zero-norm", False), (-1, "transformer", False)))) < 0


@claim("its corrected p-value is just below 0.05")
def test_corrected_p_value_of_diff_with_muon():
    assert (
        0.04
        < corrected({(name,): two_sided(of) for name, of in WARMUP_FAMILY.items()})["the whole architecture, Muon",]
        < 0.05
    )


@claim("λ of layer 1 ends between -0.3 and 0.1")
def test_lambda_of_layer_1_with_muon():
    assert all(
        -0.3 < r["numbers"]["lambda/1"] < 0.1
        for r in COLLECTED["question-2"]
        if r["arm"] == "diff" and "optimizer.warmup_steps" not in r["changes"]
    )
