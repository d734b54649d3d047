"""The introduction of the page, the replications, the defaults and the limits."""

import json
import statistics

from results_page.page import claim
from results_page.question_4 import OWN, RUNS, SHARED, size_verdict
from results_page.review import from_review
from results_page.runs import AGAIN, COLLECTED, FIRST, LONGER, MORE_NOISE, NOISE, RECALL, contrast, tokens_per_parameter
from results_page.significance import interval


@claim("most of which train for half a minute to three minutes")
def test_seconds_of_a_run():
    assert (
        statistics.mean(
            30 <= r["wall_seconds"] <= 180
            for study, runs in COLLECTED.items()
            if study.startswith(("question", "review")) and not study.endswith("tuning")
            for r in runs
        )
        > 0.7
    )


@claim("uncommitted changes in its working tree, as in 78 runs of question 4")
def test_runs_with_uncommitted_changes():
    assert sum(r["commit"].endswith("+") for r in COLLECTED["question-4-shared"]) == 78
    assert all(r in RUNS[SHARED] for r in RUNS[OWN] if r["commit"].endswith("+"))


@claim("bits per byte on novels with 14 tokens per parameter")
def test_tokens_per_parameter_of_diff():
    assert {round(r["tokens"] / r["parameters"]) for r in COLLECTED[AGAIN] if r["arm"] == "diff"} == {14}


@claim("No contrast here shows that a gain improves it on text")
def test_gain_does_not_improve_the_transformer():
    assert interval(contrast(AGAIN, "transformer-gain", "transformer"))[0] > 0


@claim("`gdla` and `gated` (question 4) and `top_k`")
def test_recommended_arms_are_better():
    assert {size_verdict(arm, "transformer", "at 20") for arm in ("gdla", "gated")} == {-1}
    assert sum(interval(from_review("top_k", "transformer"))) < 0


@claim("On text they train on 10 to 14 tokens per parameter, except in question 4 (5 to 80) and in question 5 (28")
def test_tokens_per_parameter_on_text():
    assert [
        tokens_per_parameter(study, "novels")
        for study in (FIRST, "question-1-wide", "question-4-shared", "question-5-start")
    ] == [(14, 14), (10, 10), (5, 80), (14, 14)]


def core_hours(*without):
    """Return the time of all runs of the page but those of some studies. Runs that two studies share count once."""
    seconds = {
        json.dumps(r): r["wall_seconds"]
        for study, runs in COLLECTED.items()
        if study.startswith(("question", "review")) and not study.startswith(without)
        for r in runs
    }
    return sum(seconds.values()) / 3600


@claim("in more than twenty hours of two cores. All runs of this page took 51 core hours, of 80 in the plan")
def test_hours_of_the_study():
    """`make study-controls` does not run question 5."""
    assert 2 * 20 < core_hours("question-5") < 2 * 25
    assert round(core_hours("no study")) == 51


@claim("On recall they train on 9 to 22, and on 43 in one part of question 6")
def test_tokens_per_parameter_on_recall():
    assert [tokens_per_parameter(study, "recall") for study in (RECALL, NOISE, MORE_NOISE, LONGER)] == [
        (9, 9),
        (9, 13),
        (22, 22),
        (43, 43),
    ]
