"""Units, directions and labels of the numbers of suites."""

import json
import re

import pytest
from conftest import ROOT

from difftx.errors import UserError
from difftx.evals import SUITES
from difftx.evals.measures import explanation_of, format_value, measure_of, measures_of
from difftx.evals.result import Measure
from difftx.evals.suite import Suite

# Metrics of tasks of lm-eval that the recorded results lack.
OTHER_METRICS = "filter|exact_match|f1|perplexity|bits_per_byte"
BUILT_IN = [name for name, suite in SUITES.items() if suite.evaluate.__module__.startswith("difftx.")]


@pytest.mark.parametrize("suite", BUILT_IN)
def test_every_suite_is_explained(suite):
    title, text = explanation_of(suite)
    assert (title, text) == (SUITES[suite].title, SUITES[suite].explanation)
    assert title
    assert text.endswith(".")


def test_a_suite_without_an_explanation_has_its_name_and_its_docstring(monkeypatch):
    assert explanation_of("removed") == ("removed", "")
    monkeypatch.setitem(SUITES._entries, "plain", Suite(evaluate=SUITES["loss"].evaluate))
    assert explanation_of("plain") == (
        "plain",
        "Score each validation set. The numbers are unweighted means over sets.",
    )


@pytest.mark.parametrize(
    ("suite", "number", "unit", "better"),
    [
        ("loss", "loss", "nats per token", "lower"),
        ("loss", "perplexity", "", "lower"),
        ("loss", "bits_per_byte", "bits per byte", "lower"),
        ("recall", "ar_hit_loss", "nats per token", "lower"),
        ("recall", "ar_hit_tokens", "tokens", None),
        ("position", "documents", "documents", None),
        ("exact_match", "exact_match", "share", "higher"),
        ("needle", "n1_r1_512_lwm", "share", "higher"),
        ("icl", "trec_random_margin", "share", "lower"),
        ("icl", "trec_alternating_stable_accuracy", "share", "higher"),
        ("icl", "trec_random_stable_shots", "demonstrations", None),
        ("attention", "answer", "share", "higher"),
        ("attention", "noise", "share", "lower"),
        ("attention", "answer_signed", "share", None),
        ("attention", "entropy", "nats", None),
        ("attention", "cosine_answer", "", None),
        ("outliers", "logits_top_1", "", "lower"),
        ("outliers", "logits_median", "", None),
        ("throughput", "forward_diff_tokens_per_second", "tokens per second", "higher"),
        ("throughput", "forward_time_rise_percent", "%", "lower"),
        ("harness", "arc_easy_acc_norm", "share", "higher"),
        ("harness", "arc_easy_acc_stderr", "share", None),
        ("hallucination", "qa_accuracy_when_answered_by_offline_judge", "share", "higher"),
        ("hallucination", "qa_answer_rate", "share", None),
        # Numbers of suites that run other suites.
        ("quantize", "loss_loss_4_bits", "nats per token", "lower"),
        ("quantize", "recall_others_tokens_8_bits", "tokens", None),
        ("cache", "needle_accuracy_128_tokens", "share", "higher"),
        ("cache", "bytes_per_token_128_tokens", "bytes per token", "lower"),
        ("test", "position_documents", "documents", None),
        ("harness", "gsm8k_exact_match_strict-match", "share", "higher"),
        ("harness", "gsm8k_exact_match_stderr_strict-match", "share", None),
        ("harness", "wikitext_word_perplexity", "", "lower"),
        ("harness", "lambada_openai_perplexity_stderr", "", None),
        ("loss", "of_an_extension", "", None),
        ("of_an_extension", "loss", "", None),
    ],
)
def test_a_number_has_its_unit_and_direction(suite, number, unit, better):
    measure = measure_of(suite, number)
    assert (measure.unit, measure.better) == (unit, better)


def recorded_numbers(suite):
    values = json.loads((ROOT / "tests" / "golden" / "golden.json").read_text())["values"]
    found = [re.fullmatch(rf"\w+/{suite}/numbers/(.+)", name) for name in values]
    return [match[1] for match in found if match]


@pytest.mark.parametrize(
    "suite", [name for name in BUILT_IN if not SUITES[name].inner_numbers and name != "throughput"]
)
def test_every_declared_measure_is_that_of_a_recorded_number(suite):
    """Each recorded number also has a declared measure. A form that matches no number has a typing error.

    The suite throughput has no recorded numbers, and those of `harness` are of tasks without `OTHER_METRICS`.
    """
    used = {id(measure_of(suite, number)) for number in recorded_numbers(suite)}
    assert used <= {id(measure) for measure in SUITES[suite].measures.values()}
    unused = [form for form, measure in SUITES[suite].measures.items() if id(measure) not in used]
    assert [form for form in unused if suite != "harness" or not re.search(OTHER_METRICS, form)] == []


def test_labels_of_numbers_of_other_suites():
    assert measure_of("recall", "ar_hit_loss").label == "AR-Hit loss"
    assert measure_of("quantize", "recall_ar_hit_loss_4_bits").label == "recall AR-Hit loss 4 bits"
    assert all(measure.label for measure in SUITES["attention"].measures.values())


def test_stored_measures_count_also_without_the_suite():
    own = {"exact_match": Measure("metres", "higher", "length")}
    stored = {"numbers": {"exact_match": 1.0, "accuracy": 2.0}}
    stored["measures"] = {"exact_match": {"unit": "metres", "better": "higher", "label": "length"}}
    assert measures_of("exact_match", stored) == own | {"accuracy": Measure("share", "higher")}
    assert measures_of("of_an_extension", stored) == own | {"accuracy": Measure("")}
    with pytest.raises(UserError, match="better='low': use 'lower', 'higher' or None"):
        Measure("metres", "low")


def test_only_parts_in_angle_brackets_are_special(monkeypatch):
    """Other characters of a form stand for themselves, also those with a meaning in regular expressions."""
    forms = ("share (top 1)", "c++_accuracy", "++", "<task>_a.b", "x<number>y")
    suite = Suite(evaluate=SUITES["loss"].evaluate, measures={form: Measure(form) for form in forms})
    monkeypatch.setitem(SUITES._entries, "odd", suite)
    for number in forms[:3]:
        assert measure_of("odd", number).unit == number
    assert measure_of("odd", "t_1_a.b").unit == measure_of("odd", "a.b").unit == "<task>_a.b"
    assert measure_of("odd", "x12y").unit == "x<number>y"
    assert {measure_of("odd", number).unit for number in ("t_a_b", "xy", "c_accuracy")} == {""}


def test_a_form_for_several_numbers_has_no_label():
    with pytest.raises(
        UserError, match=r"measures\['<task>_accuracy'\] has label='right', the same for several numbers"
    ):
        Suite(evaluate=SUITES["loss"].evaluate, measures={"<task>_accuracy": Measure("share", "higher", "right")})


def test_values_are_shown_with_at_most_five_digits():
    shown = [format_value(value) for value in (None, 3, 3.0, 0.123456789, 12345.678, 1234567.8, True, "a", 1e16)]
    assert shown == ["–", "3", "3", "0.12346", "12,346", "1.235e+06", "True", "a", "1e+16"]
