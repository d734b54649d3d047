"""Analyses that no plan named: worth in tokens, pooled seeds, many settings, and the validation text."""

import math
import statistics

import numpy as np
import pytest
import scipy.stats

from benchmarks.post_hoc_tables import curve_through
from benchmarks.results_figures import spread
from results_page.page import PAGE, PROSE, claim, section, shown, shows_p
from results_page.post_hoc import (
    LENGTHS,
    SETTINGS,
    VALIDATION,
    as_worth,
    bought_by,
    difference_in,
    log_worth,
    over_settings,
    read_from_chords,
    read_from_curve,
    with_jackknife,
)
from results_page.question_4 import LARGE, OWN, STEPS_OF, by_seed_at
from results_page.review import REVIEW_FAMILY
from results_page.runs import AGAIN, COLLECTED, FIRST, LOSS, contrast, losses, step_time
from results_page.significance import T_975, corrected, interval

METHODS = {"curve": read_from_curve, "chords": read_from_chords}
WORTH_SECTION = section("### Worth in tokens", "### One rate for all lengths")
PAIRS_OVER_SEEDS = [("diff", "transformer"), ("diff", "diff-gain"), ("diff-gain", "transformer"), ("diff", "zero-norm")]


def plus_minus(mean, half):
    return f"{mean:+.3f} ± {half:.3f}"


def advantage(tokens, seeds, read=read_from_curve):
    own, other = (log_worth(arm, tokens, OWN, seeds, read) for arm in ("diff", "zero-norm"))
    return own - other


def slope(value, seeds, read):
    return scipy.stats.linregress(np.log2(LENGTHS), [value(tokens, seeds, read) for tokens in LENGTHS]).slope


def test_a_curve_through_three_points_is_found():
    """The points are of a power law with known parameters; a loss gives back its tokens."""
    points = {tokens: 1.5 + 0.7 * tokens**-0.4 for tokens in (0.7, 3.0, 12.0)}
    assert curve_through(points) == pytest.approx((1.5, 0.7, 0.4), rel=1e-6)
    assert curve_through(dict(list(points.items())[1:]), 0.4) == pytest.approx((1.5, 0.7, 0.4), rel=1e-6)
    assert curve_through(points).tokens(1.5 + 0.7 * 5**-0.4) == pytest.approx(5)


@pytest.mark.parametrize("arm", ["zero-norm", "diff", "diff_v2", "gdla", "gated"])
def test_the_table_of_worths(arm):
    [row] = [line for line in WORTH_SECTION.splitlines() if line.startswith(f"| `{arm}` |")]
    expected = [
        as_worth(*with_jackknife(lambda seeds, at=at: log_worth(arm, *at, seeds)))
        for at in [(tokens, part) for part in (OWN, LARGE) for tokens in STEPS_OF[part]]
    ]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == expected


def test_changes_of_worth_from_20_to_80():
    changes = {
        (arm, name): with_jackknife(
            lambda seeds, arm=arm, read=read: (
                log_worth(arm, 80, OWN, seeds, read) - log_worth(arm, 20, OWN, seeds, read)
            )
        )
        for name, read in METHODS.items()
        for arm in ("zero-norm", "diff", "gdla", "gated")
    }
    zero, diff, gdla, gated = (plus_minus(*changes[arm, "curve"]) for arm in ("zero-norm", "diff", "gdla", "gated"))
    assert f"changes by {zero} for `zero-norm`, {diff} for `diff`, {gdla} for `gdla` and {gated} for `gated`" in PROSE
    zero, diff, gdla, gated = (plus_minus(*changes[arm, "chords"]) for arm in ("zero-norm", "diff", "gdla", "gated"))
    assert f"With straight lines, it changes by {zero}, {diff}, {gdla} and {gated}" in PROSE
    assert "the deficit of `zero-norm` does not shrink from 20 to 80 tokens per parameter" in PROSE
    assert all(sum(changes["zero-norm", name]) < 0 for name in METHODS)
    assert "the form of the curve decides the sign for `gdla` and `gated`" in PROSE
    assert all(changes[arm, "curve"][0] > 0 > changes[arm, "chords"][0] for arm in ("gdla", "gated"))


def test_worth_of_the_second_map():
    worths = [as_worth(*with_jackknife(lambda seeds, t=tokens: advantage(t, seeds))) for tokens in LENGTHS]
    assert (
        f"A token of `diff` is worth {worths[0]} tokens of `zero-norm` at 5 tokens per parameter, {worths[1]} at 20, "
        f"and {worths[2]} at 80"
    ) in PROSE
    slopes = [with_jackknife(lambda seeds, read=read: slope(advantage, seeds, read)) for read in METHODS.values()]
    curve, chords = (plus_minus(*of) for of in slopes)
    assert f"per doubling of the tokens is {curve}, and {chords} with straight lines" in PROSE
    assert "the worth of the second map grows" in PROSE
    assert all(mean > half for mean, half in slopes)


def test_worth_at_equal_time():
    per_time = {
        (arm, tokens): 2 ** log_worth(arm, tokens) / float(step_time(arm, decimals=6))
        for arm in ("gdla", "gated")
        for tokens in (20, 80)
    }
    at = {name: f"{of:.2f}" for name, of in per_time.items()}
    assert (
        f"Worth over the time of a step is {at['gdla', 20]} for `gdla` and {at['gated', 20]} for `gated` at 20 tokens "
        f"per parameter, and {at['gdla', 80]} and {at['gated', 80]} at 80: about level"
    ) in PROSE
    assert all(0.9 < of < 1.1 for of in per_time.values())


def test_lead_of_gdla_in_larger_models():
    changes = {}
    for tokens in (5, 20):
        small, large = (by_seed_at("gdla", "transformer", tokens, part) for part in (OWN, LARGE))
        changes[tokens] = [large[seed] - small[seed] for seed in sorted(large)]
        mean, half = interval(changes[tokens])
        assert mean > half
        assert log_worth("gdla", tokens, LARGE) < log_worth("gdla", tokens)
    assert f"changes by {shown(changes[5])} at 5 and by {shown(changes[20])} at 20 tokens per parameter" in PROSE
    assert "So the lead of `gdla` is smaller there" in PROSE


def range_of(values):
    return " to ".join(dict.fromkeys(f"{value:.3f}" for value in (min(values), max(values))))


def test_what_parameters_buy():
    runs = {r["arm"]: r["parameters"] for study in (AGAIN, "question-5") for r in COLLECTED[study]}
    unused = 2 * 2 * 64 * 64  # Second queries and keys of two layers.
    factors = runs["zero-norm"] / (runs["zero-norm"] - unused), runs["zero-branch"] / runs["transformer"]
    fewer, more = (range_of(bought_by(factor)) for factor in factors)
    assert f"this gives what 11 % and 22 % more parameters buy: {fewer} and {more}." in PROSE
    assert f"11 % more parameters lower the loss by {fewer} at equal tokens" in PROSE
    gained = -interval(contrast("question-5", "zero-branch", "transformer"))[0]
    assert gained / statistics.fmean(bought_by(factors[1])) == pytest.approx(0.2, abs=0.03)
    assert PROSE.count("about a fifth of what so many parameters") == 2


def test_differences_over_both_sets_of_question_1():
    for pair in PAIRS_OVER_SEEDS:
        of = contrast(FIRST, *pair) + contrast(AGAIN, *pair)
        assert len(of) == 15
        test = scipy.stats.ttest_1samp(of, 0)
        mean, (low, high) = np.mean(of), test.confidence_interval()
        [text] = set(
            PROSE.partition("**Both sets together**")[2]
            .partition("**All settings")[0]
            .split(f"`{pair[0]}` − `{pair[1]}` ")[1:]
        )
        assert text.startswith(f"{plus_minus(mean, (high - low) / 2)} (p ")
        assert shows_p(text.partition("(p ")[2].partition(")")[0], test.pvalue)


def test_differences_over_all_settings():
    with_adamw = [name for name in SETTINGS if "Muon" not in name]
    behind = over_settings("diff", "transformer", with_adamw)
    assert len(behind) == 10
    assert all(of > 0 for of in behind)
    assert PROSE.count("above zero in 10 of 10 settings with AdamW") == 2
    of = over_settings("diff", "zero-norm")
    assert (len(of), sum(value < 0 for value in of)) == (11, 10)
    low, high = scipy.stats.t.interval(0.95, 10, np.mean(of), scipy.stats.sem(of))
    text = plus_minus(np.mean(of), (high - low) / 2)
    mean = f"of which two are with Muon. Its mean over them is {text}"
    assert f"`diff` − `zero-norm` is below zero in 10 of 11 settings, {mean}" in PROSE
    assert (
        f"its effect is small and consistent: {text} over all settings (post hoc), no more than its parameters" in PROSE
    )
    assert -np.mean(of) < min(bought_by(1 / (1 - 0.11)))


def test_differences_on_the_validation_text():
    names = ["second set", *(name for name in SETTINGS if name.startswith("0."))]
    arms = {r["arm"] for study in (AGAIN, "question-4") for r in COLLECTED[study]} - {"transformer"}
    pairs = [
        [difference_in(name, arm, "transformer", number) for number in (LOSS, VALIDATION)]
        for name in names
        for arm in arms
        if difference_in(name, arm, "transformer") is not None
    ]
    gap = max(abs(test - validation) for test, validation in pairs)
    assert (
        f"{len(pairs)} of them (question 1, second set, and question 4) change by at most {gap:.3f} (post hoc)" in PROSE
    )


def test_welchs_test_of_top_k():
    p_values = {
        (arm, other): scipy.stats.ttest_ind(
            [*losses("review-novels", arm).values()], [*losses(AGAIN, other).values()], equal_var=False
        ).pvalue
        for arm, other in REVIEW_FAMILY
    }
    p = corrected(p_values)["top_k", "transformer"]
    assert f"its corrected p-value is {p:.3f} (post hoc)" in PROSE
    assert p > 0.05


@claim("*Marginal* means a corrected p-value between 2 and 5 %")
def test_marginal_verdicts():
    """Each bullet or paragraph that calls a difference marginal has a row with such a p-value on the page."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    p_values = {(cells[0], cells[2]): cells[3] for cells in rows if len(cells) == 5 and " ± " in cells[2]}
    for one, other, text in [
        ("diff", "diff-gain", shown(contrast(AGAIN, "diff", "diff-gain"))),
        ("diff", "transformer-gain", shown(contrast("question-1-wide", "diff", "transformer-gain"))),
        ("diff", "transformer", shown(contrast("question-1-stdlib", "diff", "transformer", VALIDATION))),
        ("diff", "transformer-gain", shown(contrast("question-1-stdlib", "diff", "transformer-gain", VALIDATION))),
        ("diff_v2", "transformer", shown([*by_seed_at("diff_v2", "transformer", 80).values()])),
        ("gated", "transformer", shown([*by_seed_at("gated", "transformer", 20, LARGE).values()])),
        ("top_k", "transformer", None),
        ("diff, optimizer=muon", "transformer, optimizer=muon", None),
    ]:
        found = [
            p for (title, value), p in p_values.items() if title == f"`{one}` − `{other}`" and text in (None, value)
        ]
        assert len(found) == 1
        assert 0.02 <= float(found[0]) < 0.05


def test_labels_of_lines_are_spread():
    assert spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    positions = spread([0.5, 0.52, 0.9, 0.95], 0.1)
    assert positions == pytest.approx([0.46, 0.56, 0.875, 0.975])
    assert min(np.diff(spread([0.1, 0.15, 0.2, 0.28], 0.1))) == pytest.approx(0.1)
    assert math.fsum(spread([0.1, 0.15, 0.2], 0.1)) == pytest.approx(0.45)


def test_the_quantile_of_fifteen_seeds_is_that_of_the_page():
    assert T_975[8] == pytest.approx(scipy.stats.t.ppf(0.975, 7), abs=1e-6)
