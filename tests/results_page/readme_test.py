"""The summary of docs/results.md in README.md."""

from conftest import ROOT

from benchmarks import results
from results_page.page import shown
from results_page.question_1 import better, verdict_again
from results_page.question_2 import by_optimizer, is_decided, p_value_in_one_family_of_ten
from results_page.question_4 import (
    LARGE,
    LARGE_LATER,
    LATER,
    OWN,
    SHARED,
    at_length,
    p_values_in_one_family,
    size_verdict,
)
from results_page.review import REVIEW_FAMILY, from_review
from results_page.runs import (
    AGAIN,
    LONGER,
    MORE_NOISE,
    NOISE,
    RECALL,
    best_of_tuning,
    contrast,
    solved,
    step_time,
)
from results_page.significance import corrected, fisher, two_sided

# The summary of README.md.
SUMMARY = (ROOT / "README.md").read_text().partition(results.SUMMARY_MARKERS[0])[2].partition("<!--")[0]
MUON_DIFFERENCE = {  # Has the short warm-up → differences of question 2.
    short: by_optimizer("Muon", (1, "diff", short), (-1, "transformer", short)) for short in (False, True)
}
# Row → differences, and the sign of the verdict: 0 for open, or None if the difference was not preregistered.
SUMMARY_ROWS = {
    "`diff` − `transformer`, 14 tokens per parameter": (
        contrast(AGAIN, "diff", "transformer"),
        verdict_again("diff", "transformer"),
    ),
    "`diff` − `transformer`, 20 tokens": (
        at_length("diff", "transformer", 20),
        size_verdict("diff", "transformer", "at 20"),
    ),
    "`diff` − `transformer`, 80 tokens": (at_length("diff", "transformer", 80), None),
    "`diff` − `transformer`, Muon, warm-up of 50 % of the steps": (
        MUON_DIFFERENCE[False],
        is_decided("the whole architecture, Muon"),
    ),
    "`diff` − `transformer`, Muon, warm-up of 1 %, which is better for the Transformer": (MUON_DIFFERENCE[True], None),
    "`diff-gain` − `zero-gain`, without the norm": (
        contrast(AGAIN, "diff-gain", "zero-gain"),
        verdict_again("diff-gain", "zero-gain"),
    ),
    "`diff` − `zero-norm`, with the norm": (
        contrast(AGAIN, "diff", "zero-norm"),
        verdict_again("diff", "zero-norm"),
    ),
    "`diff` − `zero-norm`, 20 tokens per parameter": (
        at_length("diff", "zero-norm", 20),
        size_verdict("diff", "zero-norm", "at 20"),
    ),
    "`diff` − `zero-norm`, 80 tokens": (at_length("diff", "zero-norm", 80), None),
    "`diff` − `diff-gain`, with the subtraction": (
        contrast(AGAIN, "diff", "diff-gain"),
        verdict_again("diff", "diff-gain"),
    ),
    "`gdla` − `transformer`, 80 tokens per parameter": (
        at_length("gdla", "transformer", 80),
        size_verdict("gdla", "transformer", "at 80", LATER),
    ),
    "`gated` − `transformer`, 80 tokens": (
        at_length("gated", "transformer", 80),
        size_verdict("gated", "transformer", "at 80", LATER),
    ),
    "`diff_v2` − `transformer`, 80 tokens": (
        at_length("diff_v2", "transformer", 80),
        size_verdict("diff_v2", "transformer", "at 80", LATER),
    ),
    "`top_k` − `transformer`, 14 tokens": (
        from_review("top_k", "transformer"),
        -1
        if corrected({pair: two_sided(from_review(*pair)) for pair in REVIEW_FAMILY})["top_k", "transformer"] < 0.05
        else 0,
    ),
}


def summary_table(heading):
    """Return the rows of the summary's table whose heading starts with a word."""
    table = SUMMARY.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_readme_has_the_differences_and_verdicts():
    found = {row[1]: tuple(row[2:]) for row in summary_table("question")}
    words = {None: "not preregistered", 0: "open", 1: "worse", -1: "better"}
    assert found == {name: (shown(values), words[verdict]) for name, (values, verdict) in SUMMARY_ROWS.items()}
    assert {len(values) for values, _ in SUMMARY_ROWS.values()} == {5, 8, 10}
    assert "over five to ten seeds" in SUMMARY
    prose = " ".join(SUMMARY.split())
    assert (
        "With AdamW, 150,000 parameters, and 14 or 20 tokens per parameter, the differential model is behind" in prose
    )
    assert better("transformer", "diff")
    assert size_verdict("diff", "transformer", "at 20") == 1
    assert "shrinks with more tokens" in SUMMARY
    assert "So does that of `zero-norm`" in prose
    assert "The warm-up gets longer with the tokens" in prose
    assert "If all lengths of training share one rate, `diff` − `transformer` with 20 tokens is open" in prose
    assert size_verdict("diff", "transformer", "at 20", SHARED) == 0
    assert "and `diff` is better than `zero-norm`" in prose
    assert size_verdict("diff", "zero-norm", "at 20", SHARED) == -1
    assert (
        "In one correction for all contrasts of a question and size, the lead of `diff` with Muon and the deficit of "
        "`diff_v2` are open"
    ) in prose
    assert p_value_in_one_family_of_ten("the whole architecture, Muon") > 0.05
    assert p_values_in_one_family(OWN, LATER)["diff_v2", "transformer", "at 80", LATER] > 0.05
    assert {size_verdict(arm, "transformer", "slope") for arm in ("diff", "zero-norm")} == {-1}
    assert is_decided("transformer's need for a long warm-up, Muon") == -1


def test_the_readme_has_the_solved_runs():
    prose = " ".join(SUMMARY.split())
    parts = {"15": (RECALL, "recall"), "31": (NOISE, "recall-31"), "63": (MORE_NOISE, "recall-63")}
    counts = {
        distractors: [solved(study, arm, task) for arm in ("diff", "zero-norm")]
        for distractors, (study, task) in parts.items()
    }
    texts = {distractors: ["{} of {}".format(*of) for of in both] for distractors, both in counts.items()}
    few, more, most = texts.values()
    assert f"Among 15 distractors, `diff` solves {few[0]} runs, and `zero-norm` {few[1]}" in prose
    assert f"Among 31, they solve {' and '.join(more)}, and among 63, {' and '.join(most)}. These differences" in prose
    for both in counts.values():
        assert fisher(*both) > 0.05
    longer = [solved(LONGER, arm, "recall-63") for arm in ("diff", "zero-norm")]
    assert longer == [(5, 6), (6, 6)]
    assert (
        "For 63, tuning found no settings with which `diff` solves the task in 2,500 steps; with 5,000, it solves 5 of "
        "6 runs, and `zero-norm` 6 of 6"
    ) in prose
    assert best_of_tuning(MORE_NOISE, "diff", "recall-63") < 0.9


def test_the_readme_has_the_times():
    prose = " ".join(SUMMARY.split())
    gdla, gated, diff_v2, top_k = map(step_time, ("gdla", "gated", "diff_v2", "top_k"))
    assert (
        f"a training step of `gdla` takes {gdla} times as long as one of the Transformer, `gated` {gated}, `diff_v2` "
        f"{diff_v2}, and `top_k` {top_k} times"
    ) in prose


def test_the_readme_has_the_larger_models():
    prose = " ".join(SUMMARY.split())
    assert (
        "With 430,000 parameters and 20 tokens, `gated` is better than the Transformer, and `diff`, `gdla` and "
        "`diff_v2` are open"
    ) in prose
    assert [size_verdict(arm, "transformer", "at 20", LARGE_LATER) for arm in ("gated", "gdla", "diff_v2")] == [
        -1,
        0,
        0,
    ]
    assert size_verdict("diff", "transformer", "at 20", LARGE) == 0
