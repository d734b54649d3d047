"""Question 4: the tables of all parts, and the models of 150,000 parameters."""

import re

import pytest

from difftx.config.recipes import load_config
from results_page.page import PROSE, claim, shown, shows_p
from results_page.post_hoc import more_tokens
from results_page.question_4 import (
    LARGE,
    LARGE_LATER,
    LATER,
    LATER_ARMS,
    OWN,
    PARAMETERS_OF,
    RUNS,
    SECTIONS,
    SHARED,
    SIZE_FAMILIES,
    SIZE_P_VALUES,
    SIZE_PAIRS,
    STEPS_OF,
    at_length,
    changed_in_one_family,
    cost_of_own_rate,
    longest_of,
    p_values_in_one_family,
    sign_of_interval,
    size_losses,
    size_verdict,
    tuned_rate,
)
from results_page.runs import COLLECTED, median_seconds, step_time
from results_page.significance import corrected, interval, two_sided


@pytest.mark.parametrize("part", RUNS)
def test_the_lengths_of_question_4_have_their_differences(part):
    table = SECTIONS[part].partition("| tokens per parameter | tokens |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    pairs = [pair for pair in SIZE_PAIRS if at_length(*pair, 20, part)]
    assert [int(row[0]) for row in rows] == [tokens for tokens in STEPS_OF[part] if size_losses("diff", tokens, part)]
    for row in rows:
        tokens = int(row[0])
        assert row[1] == f"{1024 * STEPS_OF[part][tokens]:,}"
        assert row[2] == shown([*size_losses("transformer", tokens, part).values()]).lstrip("+")
        values = [at_length(*pair, tokens, part) for pair in pairs]
        assert row[3:] == [shown(of) if of else "" for of in values]


@pytest.mark.parametrize("family", SIZE_FAMILIES)
def test_the_contrasts_of_question_4_have_their_intervals(family):
    """The section of a part has the table of its family, and then that of its later arms, if it has such a family."""
    part_of = {LATER: OWN, LARGE_LATER: LARGE}
    part = part_of.get(family, family)
    families_of_part = [name for name in SIZE_FAMILIES if part_of.get(name, name) == part]
    tables = re.findall(r"^\| contrast \|.*\n.*\n((?:\|.*\n)+)", SECTIONS[part], re.MULTILINE)
    assert len(tables) == len(families_of_part)
    table = tables[families_of_part.index(family)]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    rows = {tuple(cells[:2]): cells[2:] for cells in lines}
    assert len(rows) == len(SIZE_FAMILIES[family])
    titles = {
        "at 20": "20 tokens per parameter",
        "at 80": "80 tokens per parameter",
        "size": "20 tokens per parameter, change with the size",
        "slope": "slope per doubling of the tokens, 5 to {}",
    }
    for (one, other, at), of in SIZE_FAMILIES[family].items():
        mean, p, verdict = rows[f"`{one}` − `{other}`", titles[at].format(longest_of(family, one))]
        assert mean == shown(of)
        assert shows_p(p, SIZE_P_VALUES[family][one, other, at])
        words = {0: "open", 1: "worse", -1: "better"} if at[:2] == "at" else {0: "open", 1: "rises", -1: "falls"}
        assert verdict == words[size_verdict(one, other, at, family)]


def test_the_arms_of_question_4_have_their_seconds():
    table = SECTIONS[OWN].partition("The median seconds of a run")[2].partition("|\n\n")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in f"{table}|".splitlines()[2:]]
    arms = [name.strip("`") for name in lines[0][1:]]
    assert {tuple(row) for row in lines[2:]} == {
        (
            str(tokens),
            *(
                f"{median_seconds([r for r in RUNS[OWN] if r['changes']['train.steps'] == str(steps)], arm):.0f}"
                for arm in arms
            ),
        )
        for tokens, steps in STEPS_OF[OWN].items()
    }
    assert len(arms) == 6


@pytest.mark.parametrize("part", RUNS)
def test_the_rates_of_question_4_are_those_of_the_tuned_seed(part):
    for r in RUNS[part]:
        steps = int(r["changes"]["train.steps"]) if part in (OWN, LARGE) else STEPS_OF[part][5]
        assert r["learning_rate"] == tuned_rate(r["arm"], steps)
        assert r["seed"] in range(30, 38)


def test_runs_that_two_parts_of_question_4_share_are_the_same():
    by_run = [
        {(r["arm"], r["changes"]["train.steps"], r["learning_rate"], r["seed"]): r for r in RUNS[part]}
        for part in (OWN, SHARED)
    ]
    shared = by_run[0].keys() & by_run[1].keys()
    assert len(shared) >= 6 * 8  # Those with 5 tokens per parameter, at least.
    assert all(by_run[0][run] == by_run[1][run] for run in shared)


@claim("All arms have as many parameters as the Transformer within 0.3 %")
def test_parameters_of_all_arms():
    assert all(abs(r["parameters"] / PARAMETERS_OF[part] - 1) < 0.003 for part in RUNS for r in RUNS[part])


def test_prose_has_the_differences_by_length():
    at = {tokens: shown(at_length("diff", "transformer", tokens)) for tokens in STEPS_OF[OWN]}
    at_20, at_80 = (
        {arm: shown(at_length(arm, "transformer", tokens)) for arm in ("gdla", "gated")} for tokens in (20, 80)
    )
    assert f"`gdla` − `transformer` is {at_20['gdla']}, and `gated` − `transformer` is {at_20['gated']}" in PROSE
    assert f"is {at[5]} at 5 tokens per parameter (not preregistered), {at[20]} at 20, and {at[80]} at 80 (not" in PROSE
    assert (
        f"`diff` − `transformer` is {at[5]}, {at[20]} and {at[80]} at 5, 20 and 80 tokens per parameter (not "
        "preregistered at 5 and 80). In tokens, `diff` needs "
    ) in PROSE
    more = {arm: [more_tokens(arm, tokens) for tokens in STEPS_OF[OWN]] for arm in ("diff", "zero-norm")}
    diff, zero = ("{}, {} and {} %".format(*more[arm]) for arm in more)
    assert f"`diff` needs {diff} more than the Transformer for the same loss, and `zero-norm` {zero} ([post" in PROSE
    assert size_verdict("diff", "transformer", "slope", OWN) == -1
    assert f"At 80, they are {at_80['gdla']} and {at_80['gated']}" in PROSE
    assert {len(of) for name in (OWN, LATER) for of in SIZE_FAMILIES[name].values()} == {8}
    assert f"tokens per parameter, and {at[20]} with 20 (question 4)" in PROSE
    for arm, text in (("zero-norm", " per parameter"), ("diff_v2", "")):
        of = shown(at_length(arm, "transformer", 5))
        assert f"`{arm}` − `transformer` is {of} at 5{' tokens' if text else ''}{text} (not preregistered)" in PROSE
    assert f"at 5 (not preregistered), open at 20, and {shown(at_length('diff_v2', 'transformer', 80))} at 80" in PROSE


def test_prose_has_the_differences_of_the_second_map():
    at_20, at_80 = (shown(at_length("diff", "zero-norm", tokens)) for tokens in (20, 80))
    assert f"`diff` − `zero-norm` is {at_20}, which is open" in PROSE
    assert size_verdict("diff", "zero-norm", "at 20", OWN) == 0
    assert f"At 80 it is {at_80} (not preregistered)" in PROSE
    with_shared_rate = shown(at_length("diff", "zero-norm", 20, SHARED))
    assert f"With the shared rate of the next part it is {with_shared_rate}, and significant" in PROSE


@claim(
    "`gdla` and `gated` are better than the Transformer at 20 and at 80 tokens per parameter. `diff` is worse at 20, "
    "and `diff_v2` at 80 (marginal)"
)
def test_answer_names_the_architectures_that_differ():
    for arm in ("gdla", "gated"):
        assert size_verdict(arm, "transformer", "at 20") == size_verdict(arm, "transformer", "at 80", LATER) == -1
    assert size_verdict("diff", "transformer", "at 20") == size_verdict("diff_v2", "transformer", "at 80", LATER) == 1


def test_prose_has_the_times_of_training_steps():
    gdla, gated, top_k = map(step_time, ("gdla", "gated", "top_k"))
    assert f"a training step takes {gdla}, {gated} and {top_k} times as long" in PROSE


def test_the_table_of_training_steps_has_every_arm():
    """Each round has a record of every arm, and the same number of tokens."""
    rounds = {(r["arm"], r["seed"]) for r in COLLECTED["step-times"]}
    arms, numbers = {arm for arm, _ in rounds}, {number for _, number in rounds}
    assert len(rounds) == len(COLLECTED["step-times"]) == len(arms) * len(numbers)
    assert len({r["tokens"] for r in COLLECTED["step-times"]}) == 1
    table = SECTIONS[OWN].partition("measured in turn on one idle core:\n")[2].partition("\n\n    JAX")[0]
    found = {line.split("|")[1].strip(): line.split("|")[4].strip() for line in table.strip().splitlines()[2:]}
    assert found == {arm: step_time(arm, decimals=2) for arm in arms}


@claim("In one family with the others, `diff_v2` − `transformer` at 80 and the slope of `gated` to 80 would be open")
def test_one_family_of_the_smallest_models():
    assert len(p_values_in_one_family(OWN, LATER)) == 18
    assert changed_in_one_family(OWN, LATER) == {
        ("diff_v2", "transformer", "at 80", LATER),
        ("gated", "transformer", "slope", LATER),
    }


@claim("With 20 tokens per parameter, `diff` is worse than the Transformer, and `gdla` and `gated` are better")
def test_verdicts_at_20_tokens_per_parameter():
    assert size_verdict("diff", "transformer", "at 20") == 1
    assert size_verdict("gdla", "transformer", "at 20") == size_verdict("gated", "transformer", "at 20") == -1


@claim(
    "Whether `diff` at 20 is worse than the Transformer, and better than `zero-norm`, depends on the rates, which one "
    "seed chose: with [one rate for all lengths](#one-rate-for-all-lengths) both verdicts differ"
)
def test_verdicts_that_depend_on_the_rates():
    verdicts = {
        part: [size_verdict("diff", other, "at 20", part) for other in ("transformer", "zero-norm")]
        for part in (OWN, SHARED)
    }
    assert verdicts == {OWN: [1, 0], SHARED: [0, -1]}


@claim(
    "With [one rate for all lengths](#one-rate-for-all-lengths), `diff` − `transformer` at 20 is open, and `diff` is "
    "better than `zero-norm`"
)
def test_answer_names_the_verdicts_with_a_shared_rate():
    assert size_verdict("diff", "transformer", "at 20", SHARED) == 0
    assert size_verdict("diff", "zero-norm", "at 20", SHARED) == -1


@claim(
    "and below zero for each seed. Whether the difference in bits per byte changes with the number of tokens is open"
)
def test_second_map_at_80_tokens_per_parameter():
    assert max(at_length("diff", "zero-norm", 80)) < 0
    assert size_verdict("diff", "zero-norm", "slope") == 0


@claim("The estimates are almost equal, and the intervals differ")
def test_second_map_with_both_choices_of_rates():
    assert (
        abs(interval(at_length("diff", "zero-norm", 20))[0] - interval(at_length("diff", "zero-norm", 20, SHARED))[0])
        < 0.002
    )


@claim("Those of `diff` and `zero-norm` fall, and those of the three later arms to 80 rise")
def test_slopes_in_bits_per_byte():
    assert {size_verdict(arm, "transformer", "slope") for arm in ("diff", "zero-norm")} == {-1}
    assert {size_verdict(arm, "transformer", "slope", LATER) for arm in LATER_ARMS} == {1}


@claim("With 80, `gdla` and `gated` are still better, and `diff_v2` is worse (marginal)")
def test_later_arms_at_80_tokens_per_parameter():
    assert [size_verdict(arm, "transformer", "at 80", LATER) for arm in ("gdla", "gated", "diff_v2")] == [-1, -1, 1]


@claim("For `diff_v2`, a lead at 5 becomes a deficit at 80")
def test_lead_of_diff_v2_becomes_a_deficit():
    assert sign_of_interval("diff_v2", "transformer", 5) == -1
    assert size_verdict("diff_v2", "transformer", "at 80", LATER) == 1


@claim("For `gated`, the corrected p-value is just below 0.05, and the slope from 5 to 20 is open")
def test_slope_of_gated():
    assert 0.04 < SIZE_P_VALUES[LATER]["gated", "transformer", "slope"] < 0.05
    assert size_verdict("gated", "transformer", "slope") == 0


@claim("With five, `diff_v2` at 80 was open, and so was the slope of `gated`")
def test_later_arms_with_five_seeds():
    p_values = corrected({contrast: two_sided(of[:5]) for contrast, of in SIZE_FAMILIES[LATER].items()})
    assert p_values["diff_v2", "transformer", "at 80"] > 0.05
    assert p_values["gated", "transformer", "slope"] > 0.05


@claim("at 5 (not preregistered), open at 20, and")
def test_diff_v2_at_5_and_20_tokens_per_parameter():
    assert sign_of_interval("diff_v2", "transformer", 5) == -1
    assert size_verdict("diff_v2", "transformer", "at 20") == 0


@claim("It is half of the steps, from 361 to 5,782 updates")
def test_updates_of_warmup():
    assert load_config("controls:novels-diff", {}).optimizer.warmup_steps == 0.5
    assert [steps // 2 for steps in STEPS_OF[OWN].values()] == [361, 1445, 5782]


@claim(
    "the rate that the tuned seed chooses for `gdla` gives a higher mean loss on the reported seeds than its rate "
    "at 5. The interval of this difference contains zero"
)
def test_own_rate_of_gdla_at_20_tokens_per_parameter():
    cost, half = interval(cost_of_own_rate("gdla", 20))
    assert half > cost > 0


@claim(
    "two verdicts at 20 tokens per parameter differ: `diff` − `transformer` is open, and `diff` is better than "
    "`zero-norm`.** The other verdicts at 20 are the same, and so are those of the slopes"
)
def test_verdicts_that_differ_with_a_shared_rate():
    assert size_verdict("diff", "transformer", "at 20", SHARED) == 0
    assert size_verdict("diff", "zero-norm", "at 20", SHARED) == -1
    assert {name for name in SIZE_FAMILIES[OWN] if size_verdict(*name) != size_verdict(*name, SHARED)} == {
        ("diff", "transformer", "at 20"),
        ("diff", "zero-norm", "at 20"),
    }


@claim(
    "four arms trained again at 20 tokens per parameter, and the Transformer at 80, each with its own rate. Of the "
    "144 runs above, 80 are"
)
def test_runs_shared_with_the_first_part():
    assert len([r for r in RUNS[OWN] if r not in RUNS[SHARED]]) == 5 * 8 + 3 * 8
    assert len([r for r in RUNS[OWN] if r in RUNS[SHARED]]) == 80


@claim("With one rate, the slope rises too")
def test_slope_of_gdla_with_a_shared_rate():
    assert size_verdict("gdla", "transformer", "slope", SHARED) == 1


@claim(
    "Of the 64 runs that are only in the tables above, forty name a commit before that of their plan, because their "
    "working copy had not been updated. These are the new runs at 20 tokens per parameter, and those of the "
    "Transformer at 80"
)
def test_commit_of_the_runs_outside_the_shared_part():
    only_own = [r for r in RUNS[OWN] if r not in RUNS[SHARED]]
    before_plan = [r for r in only_own if r["commit"].startswith("b2195ee")]
    assert (len(only_own), len(before_plan)) == (64, 40)
    lengths = {(r["arm"], r["changes"]["train.steps"]) for r in only_own}
    assert {length for length in lengths if length[1] == "2891" or length[0] == "transformer"} == {
        (r["arm"], r["changes"]["train.steps"]) for r in before_plan
    }
