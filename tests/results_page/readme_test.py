"""The five findings of README.md, and the figure above them."""

import re

import pytest
from conftest import ROOT

from benchmarks import results
from results_page import question_2_test
from results_page.page import shown
from results_page.post_hoc import bought_by, log_worth, more_tokens
from results_page.question_1 import verdict_again
from results_page.question_2 import WARMUP_FAMILY, by_optimizer, is_decided
from results_page.question_4 import LARGE, LATER, OWN, PARAMETERS_OF, at_length, size_verdict
from results_page.runs import AGAIN, LONGER, MORE_NOISE, NOISE, RECALL, contrast, solved, step_time
from results_page.significance import interval

README = (ROOT / "README.md").read_text()
SUMMARY = README.partition(results.SUMMARY_MARKERS[0])[2].partition("<!--")[0]
# Text of the five findings, without the targets of links.
FINDINGS = [" ".join(re.sub(r"\]\(.*?\)", "]", of).split()) for of in re.split(r"^\d\. ", SUMMARY, flags=re.MULTILINE)]


def test_the_answer_comes_first():
    assert SUMMARY.startswith("**Not at this size.**")
    assert len(FINDINGS) == 1 + 5
    paper = 830e6
    assert round(paper / PARAMETERS_OF[LARGE], -2) == 1900
    assert "is 1,900 times as large as the largest here" in FINDINGS[0]


def test_the_figure_is_drawn_for_both_schemes():
    for end in results.SCHEMES:
        name = f"docs/images/results_worth{end}.png"
        assert name in SUMMARY
        assert (ROOT / name).stat().st_size > 10_000


def test_the_deficit_of_the_model():
    """With 150,000 parameters, the test at 20 tokens per parameter is decided; with 430,000, it is not."""
    more = [more_tokens("diff", tokens) for tokens in (5, 20, 80)]
    larger = at_length("diff", "transformer", 20, LARGE)
    assert "`diff` needs {}, {} and {} % more tokens than the Transformer".format(*more) in FINDINGS[1]
    start = " ".join((ROOT / "docs" / "index.md").read_text().split())
    assert "In tokens, it needs {}, {} and {} % more than the Transformer".format(*more) in start
    assert (
        f"430,000 parameters and 20 tokens per parameter, the difference is {shown(larger)}†: undecided" in FINDINGS[1]
    )
    assert size_verdict("diff", "transformer", "at 20") == 1
    assert size_verdict("diff", "transformer", "at 20", LARGE) == 0


def test_the_cost_of_the_head_norm():
    norm, whole = (contrast(AGAIN, "diff", other) for other in ("diff-gain", "transformer"))
    text = f"the loss of `diff` is {shown(whole)}† above the Transformer's; the head norm alone raises it by"
    text = f"{text} {shown(norm)}†"
    assert f"At 14 tokens per parameter, {text}" in FINDINGS[2]
    assert verdict_again("diff", "diff-gain") == verdict_again("diff", "transformer") == 1
    assert interval(norm)[0] / interval(whole)[0] == pytest.approx(0.5, abs=0.1)


def test_the_worth_of_the_second_map():
    gain = at_length("zero-norm", "diff", 80)
    bought = bought_by(1 / (1 - 0.11))
    costs = f"without as many parameters (11 %) loses {min(bought):.3f} to {max(bought):.3f}."
    text = f"At 80 tokens per parameter, the loss without it (λ = 0) is {shown(gain)} higher. A Transformer {costs}"
    assert text in FINDINGS[3]
    mean, half = interval(gain)
    assert half < mean == pytest.approx(sum(bought) / 2, abs=0.002)


def test_the_ranking_with_muon():
    long, short = (by_optimizer("Muon", (1, "diff", of), (-1, "transformer", of)) for of in (False, True))
    change = WARMUP_FAMILY["diff's need minus transformer's, Muon"]
    text = f"50 % of the steps ({shown(long)}†), and behind if it takes 1 % ({shown(short)}; change {shown(change)}†)."
    assert f"is ahead if the warm-up takes {text} For both models, Muon with 1 % is the best" in FINDINGS[4]
    assert (is_decided("the whole architecture, Muon"), is_decided("diff's need minus transformer's, Muon")) == (-1, 1)
    assert interval(short)[0] > interval(short)[1]
    question_2_test.test_smallest_mean_loss_of_question_2()


def test_other_variants_and_distractors():
    gdla, gated = (shown(at_length(arm, "transformer", 80)) for arm in ("gdla", "gated"))
    text = f"[`gdla`] ({gdla}†) and `gated` attention ({gated}†) are lower than the Transformer's after equal tokens"
    assert f"the losses of {text}, and about equal after equal time" in FINDINGS[5]
    for arm in ("gdla", "gated"):
        assert size_verdict(arm, "transformer", "at 80", LATER) == -1
        assert 2 ** log_worth(arm, 80, OWN) / float(step_time(arm, 6)) == pytest.approx(1, abs=0.1)
    assert "models with λ = 0 learn the task at least as often as `diff`" in FINDINGS[5]
    for study, task in ((RECALL, "recall"), (NOISE, "recall-31"), (MORE_NOISE, "recall-63"), (LONGER, "recall-63")):
        others = [solved(study, arm, task) for arm in ("zero-norm", *(["zero-gain"] if study != LONGER else []))]
        assert all(solved(study, "diff", task)[0] <= count for count, _ in others)
