"""Units, directions and labels of the numbers of suites."""

import dataclasses
import json

import pytest
from conftest import ROOT

from difftx.config.suites import SUITES
from difftx.errors import UserError
from difftx.evals.attention.suite import NUMBERS
from difftx.evals.measures import EXPLANATIONS, LABELS, RULES, explanation_of, format_value, measure_of, measures_of
from difftx.evals.result import Measure, Result


def test_every_suite_is_explained():
    built_in = {name for name in SUITES if SUITES[name].evaluate.__module__.startswith("difftx.")}
    assert EXPLANATIONS.keys() == built_in
    assert all(title and text.endswith(".") for title, text in EXPLANATIONS.values())
    assert explanation_of("removed") == ("removed", "")


@pytest.mark.parametrize(
    ("number", "unit", "better"),
    [
        ("loss", "nats per token", "lower"),
        ("perplexity", "", "lower"),
        ("bits_per_byte", "bits per byte", "lower"),
        ("ar_hit_loss", "nats per token", "lower"),
        ("ar_hit_tokens", "tokens", None),
        ("documents", "documents", None),
        ("exact_match", "share", "higher"),
        ("n1_r1_512_lwm", "share", "higher"),
        ("trec_random_margin", "share", "lower"),
        ("trec_alternating_stable_accuracy", "share", "higher"),
        ("trec_random_stable_shots", "demonstrations", None),
        ("answer", "share", "higher"),
        ("noise", "share", "lower"),
        ("answer_signed", "share", None),
        ("entropy_a1", "nats", None),
        ("cosine_answer", "", None),
        ("logits_top_1", "", "lower"),
        ("logits_median", "", None),
        ("forward_diff_tokens_per_second", "tokens per second", "higher"),
        ("forward_time_rise_percent", "%", "lower"),
        ("arc_easy_acc_norm", "share", "higher"),
        ("arc_easy_acc_stderr", "share", None),
        ("qa_accuracy_when_answered_by_offline_judge", "share", "higher"),
        ("qa_answer_rate", "share", None),
        # Numbers of suites that run other suites.
        ("loss_loss_4_bits", "nats per token", "lower"),
        ("recall_others_tokens_8_bits", "tokens", None),
        ("needle_accuracy_128_tokens", "share", "higher"),
        ("bytes_per_token_128_tokens", "bytes per token", "lower"),
        ("of_an_extension", "", None),
    ],
)
def test_a_number_has_its_unit_and_direction(number, unit, better):
    assert (measure_of(number).unit, measure_of(number).better) == (unit, better)


def test_every_rule_matches_a_recorded_number():
    """A rule that matches no golden number has a typing error. The suites throughput and cache have none."""
    recorded = json.loads((ROOT / "tests" / "golden" / "golden.json").read_text())["values"]
    names = {name.rpartition("/")[2] for name in recorded if "/numbers/" in name and "/charts/" not in name}
    used = {id(measure_of(name)) for name in names}
    unused = {words for words, measure in RULES.items() if id(measure) not in used}
    assert unused == {"percent", "tokens_per_second", "bytes_per_token"}


def test_every_number_of_the_suite_attention_has_a_label():
    assert list(LABELS["attention"]) == list(NUMBERS)


def test_a_suite_gives_its_own_measures():
    result = Result(numbers={"loss": 1.0, "accuracy": 2.0}, measures={"loss": Measure("metres", "higher")})
    found = measures_of(json.loads(json.dumps(dataclasses.asdict(result))))
    assert found == {"loss": Measure("metres", "higher"), "accuracy": Measure("share", "higher")}
    with pytest.raises(UserError, match="'los', which is not one of the numbers"):
        Result(numbers={"loss": 1.0}, measures={"los": Measure("metres")})
    with pytest.raises(UserError, match="better='low': use 'lower', 'higher' or None"):
        Measure("metres", "low")


def test_values_are_shown_with_at_most_five_digits():
    shown = [format_value(value) for value in (None, 3, 3.0, 0.123456789, 12345.678, 1234567.8, True, "a", 1e16)]
    assert shown == ["–", "3", "3", "0.12346", "12,346", "1.235e+06", "True", "a", "1e+16"]
