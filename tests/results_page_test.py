"""Every claim of docs/results.md follows from docs/results.json, without the use of benchmarks/controls_tables.py."""

import json
import math
import re
import statistics

import pytest
from conftest import ROOT

from benchmarks import controls_study, results
from difftx.config.recipes import load_config
from difftx.configs import controls

COLLECTED = json.loads(results.COLLECTED.read_text())
PAGE = (ROOT / "docs" / "results.md").read_text()
PROSE = " ".join(PAGE.split())
LOSS = "test/loss_bits_per_byte"
# Quantiles of Student's t, by the number of seeds.
T_975 = {5: 2.776445, 6: 2.570582, 7: 2.446912, 8: 2.364624, 10: 2.262157}
FIRST, AGAIN, RECALL = "question-1-novels", "question-1-again", "question-1-recall"


def losses(study, arm, number=LOSS, **changes):
    """Return seed → loss of an arm with these changes."""
    wanted = {name.replace("__", "."): value for name, value in changes.items()}
    tuned = ("optimizer.learning_rate", *(["model.post_scale"] if arm.endswith("-gain") else []))
    return {
        r["seed"]: r["numbers"][number]
        for r in COLLECTED[study]
        if r["arm"] == arm and {n: v for n, v in r["changes"].items() if n not in tuned} == wanted
    }


def interval(values):
    """Return mean and half-width of the 95 % interval."""
    half = T_975[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def contrast(study, one, other, number=LOSS):
    own, reference = losses(study, one, number), losses(study, other, number)
    assert own.keys() == reference.keys()
    return [own[seed] - reference[seed] for seed in sorted(own)]


def shown(values):
    """Return mean and interval with three decimals, or with four if three do not show which one is larger."""
    mean, half = interval(values)
    decimals = 4 if f"{abs(mean):.3f}" == f"{half:.3f}" != "0.000" else 3
    return f"{mean:+.{decimals}f} ± {half:.{decimals}f}"


def row_of(one, other, section):
    """Return the cells of a contrast's row in a section of the page."""
    [line] = [line for line in section.splitlines() if line.startswith(f"| `{one}` − `{other}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def shows_p(text, p):
    """Return whether a table's text is a p-value, with three decimals."""
    return text == "<0.001" if p < 0.001 else float(text) == pytest.approx(p, abs=6e-4)


def solved(study, arm, task="recall"):
    accuracies = [
        r["numbers"]["exact_match/retrieval"] for r in COLLECTED[study] if (r["arm"], r["task"]) == (arm, task)
    ]
    return sum(a >= 0.9 for a in accuracies), len(accuracies)


def fisher(one, other):
    """Return the p-value of Fisher's exact test, by enumeration."""
    (a, n), (b, m) = one, other
    chances = {k: math.comb(n, k) * math.comb(m, a + b - k) for k in range(max(0, a + b - m), min(n, a + b) + 1)}
    return sum(chance for chance in chances.values() if chance <= chances[a]) / sum(chances.values())


def corrected(p_values):
    """Return p-values after Holm's correction: by decreasing size, each times the number of those at least as large."""
    found, largest = {}, 0.0
    for rank, (p, name) in enumerate(sorted((p, name) for name, p in p_values.items())):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        found[name] = largest
    return found


NORM_OR_GAIN = [
    ("diff", "zero-norm"),
    ("diff-gain", "zero-gain"),
    ("diff", "diff-gain"),
    ("zero-norm", "zero-gain"),
    ("diff-gain", "diff-plain"),
    ("diff", "transformer"),
    ("diff", "transformer-gain"),
]


def section(start, end):
    return PAGE.partition(f"\n{start}\n")[2].partition(f"\n{end}\n")[0]


NOVELS_SECTION = section("### Novels", "### Recall")
RECALL_SECTION = section("### Recall", "### Wide heads")


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


def test_contrasts_of_recall_are_fishers_test_with_holms_correction():
    expected = corrected({pair: fisher(*(solved(RECALL, arm) for arm in pair)) for pair in NORM_OR_GAIN})
    for pair in NORM_OR_GAIN:
        cells = row_of(*pair, RECALL_SECTION)
        counts = ["{} of {}".format(*solved(RECALL, arm)) for arm in pair]
        assert cells[2:5] == [*counts, f"{expected[pair]:.3f}"]
        assert (cells[5] == "open") == (expected[pair] >= 0.05)


@pytest.mark.parametrize("task", ["novels", "recall"])
def test_the_recipe_has_what_the_tuned_seed_chose(task):
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


def test_both_sets_of_question_1_have_other_seeds():
    assert set(losses(FIRST, "diff")) == set(range(10, 15))
    assert set(losses(AGAIN, "diff")) == set(range(20, 30))


def is_better(study, one, other, family):
    """Return whether Holm's correction in the family leaves the contrast significant, with `one` lower."""
    ranked = corrected({tuple(sorted(pair)): two_sided(contrast(study, *pair)) for pair in family})
    return ranked[tuple(sorted((one, other)))] < 0.05 and interval(contrast(study, one, other))[0] < 0


def two_sided(values):
    """Return the p-value of Student's t test, by integration of the density."""
    df = len(values) - 1
    t = abs(statistics.fmean(values)) / (statistics.stdev(values) / math.sqrt(len(values)))
    scale = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
    x, step, area = 0.0, t / 20_000, 0.0
    while x < t - step / 2:
        area += step * scale * (1 + (x + step / 2) ** 2 / df) ** (-(df + 1) / 2)
        x += step
    return 1 - 2 * area


NOVELS_FAMILY = [pair for pair in NORM_OR_GAIN if "diff-plain" not in pair]


def better(one, other):
    return is_better(AGAIN, one, other, NOVELS_FAMILY)


def verdict_again(one, other):
    """Return the sign of a contrast of the second set of question 1, or 0 if it is open."""
    return better(other, one) - better(one, other)


def all_solved(*arms):
    return all(solved(RECALL, arm) == (6, 6) for arm in arms)


def attention(arm, name):
    """Return the numbers of suite attention of an arm's runs."""
    return [r["numbers"][f"attention/{name}"] for r in COLLECTED[RECALL] if r["arm"] == arm]


def on_tuned_seed(arm, rate):
    return max(
        r["numbers"]["exact_match/retrieval"]
        for r in COLLECTED[f"{RECALL}-tuning"]
        if (r["arm"], r["learning_rate"]) == (arm, rate)
    )


# What the page says in words, and how docs/results.json shows it.
CLAIMS = {
    "Without the norm, the subtraction lowers the loss of the same code with λ = 0, but the model is not ahead of the "
    "Transformer. In the model with the subtraction, the norm raises the loss": lambda: (
        better("diff-gain", "zero-gain")
        and better("diff-gain", "diff")
        and interval(contrast(AGAIN, "diff-gain", "transformer"))[0] > 0
    ),
    "λ = 0 the parameters of the second attention weights, 11 % of all, are unused": lambda: (
        {
            # In each of two layers, the second query and key of all heads: 64 → 64.
            round(100 * 2 * 2 * 64 * 64 / r["parameters"])
            for r in COLLECTED[AGAIN]
            if r["arm"].startswith("zero")
        }
        == {11}
    ),
    "most of which train for half a minute to three minutes": lambda: (
        statistics.mean(
            30 <= r["wall_seconds"] <= 180
            for study, runs in COLLECTED.items()
            if study.startswith(("question", "review")) and not study.endswith("tuning")
            for r in runs
        )
        > 0.7
    ),
    "the differential model is behind the Transformer": lambda: better("transformer", "diff"),
    "With the norm it is open": lambda: not better("diff", "zero-norm") and not better("zero-norm", "diff"),
    "the corrected p-value is just above 0.05": lambda: (
        0.05
        < corrected({pair: two_sided(contrast(AGAIN, *pair)) for pair in NOVELS_FAMILY})["diff", "zero-norm"]
        < 0.06
    ),
    "Without the subtraction, norm or gain is open": lambda: (
        not better("zero-norm", "zero-gain") and not better("zero-gain", "zero-norm")
    ),
    "The best of the gains 1, 2, 4 and 8 is 1, so `diff-gain` is the differential model without norm and "
    "gain": lambda: (
        controls.TUNED["novels"]["diff-gain"]["model.post_scale"] == 1
        and controls_study.GAINS == (1, 2, 4, 8)
        and losses(FIRST, "diff-gain") == losses(FIRST, "diff-plain")
    ),
    "`diff` is worse than both Transformers": lambda: all(
        better(arm, "diff") for arm in ("transformer", "transformer-gain")
    ),
    "which left every contrast open": lambda: (
        min(
            corrected(
                {
                    pair: two_sided(contrast(FIRST, *pair)) if any(contrast(FIRST, *pair)) else 1.0
                    for pair in NORM_OR_GAIN
                }
            ).values()
        )
        > 0.05
    ),
    "No contrast is decided. In the code of differential attention, a norm or a gain solves the task in every run, "
    "with and without the subtraction": lambda: (
        all_solved("diff", "diff-gain", "zero-norm", "zero-gain")
        and min(corrected({p: fisher(*(solved(RECALL, arm) for arm in p)) for p in NORM_OR_GAIN}).values()) > 0.05
    ),
    "the seed that chose the rate of `transformer-gain` solves the task": lambda: (
        on_tuned_seed("transformer-gain", 5e-3) >= 0.9 and solved(RECALL, "transformer-gain")[0] < 3
    ),
    "In `diff`, A1 and A2 are more alike at the answer than at distractors": lambda: all(
        answer > noise
        for arm in ("diff", "zero-norm")
        for answer, noise in zip(attention(arm, "cosine_answer"), attention(arm, "cosine_noise"), strict=True)
    ),
    "`diff` has less weight than `zero-norm` on the answer": lambda: (
        max(attention("diff", "answer")) < min(attention("zero-norm", "answer"))
    ),
    "`diff` has less weight on both": lambda: all(
        sum(interval([a - b for a, b in zip(attention("diff", name), attention("zero-norm", name), strict=True)])) < 0
        for name in ("answer_signed", "noise_signed")
    ),
    "The weights are less sparse": lambda: max(attention("diff", "gini")) < min(attention("zero-norm", "gini")),
    "these models have no sink, with or without subtraction": lambda: all(
        share < 1 / 32 for arm in ("diff", "zero-norm", "transformer-wide-norm") for share in attention(arm, "first")
    ),
    "No contrast here shows that a gain improves it on text": lambda: (
        interval(contrast(AGAIN, "transformer-gain", "transformer"))[0] > 0
    ),
}


NOISE, MORE_NOISE, DIVERGING = "question-6", "question-6-more", "question-3-recall"


def accuracies(study, arm, task):
    return {
        r["seed"]: r["numbers"]["exact_match/retrieval"]
        for r in COLLECTED[study]
        if (r["arm"], r["task"]) == (arm, task)
    }


def lambdas(study, layer, **where):
    return [
        r["numbers"][f"lambda/{layer}"]
        for r in COLLECTED[study]
        if all(r[name] == value for name, value in where.items())
    ]


def rates(study, arm, task):
    return {r["learning_rate"] for r in COLLECTED[study] if (r["arm"], r["task"]) == (arm, task)}


def tokens_per_parameter(study, task):
    """Return the smallest and the largest number of a study's runs."""
    found = [round(r["tokens"] / r["parameters"]) for r in COLLECTED[study] if r["task"].startswith(task)]
    return min(found), max(found)


PARTS_OF_6 = ((NOISE, "recall-31"), (MORE_NOISE, "recall-63"))


def settings(study, arm, task):
    """Return the pairs of gain and learning rate of an arm's runs."""
    return {
        (r["changes"].get("model.post_scale"), r["learning_rate"])
        for r in COLLECTED[study]
        if (r["arm"], r["task"]) == (arm, task)
    }


def rate_factors(study, task):
    """Return arm → its rate on a task of a study, over that with 15 distractors."""
    found = {}
    for arm in {r["arm"] for r in COLLECTED[study] if r["task"] == task}:
        few = NOISE if arm == "diff-lambda_1" else RECALL
        [one], [other] = rates(study, arm, task), rates(few, arm, "recall")
        found[arm] = one / other
    return found


def diverging():
    """Return λ of layer 1 and whether the run solved the task, of each run."""
    return [(r["numbers"]["lambda/1"], r["numbers"]["exact_match/retrieval"] >= 0.9) for r in COLLECTED[DIVERGING]]


CLAIMS |= {
    "at 2 to 16 times the tuned rate, λ of layer 1 ends between -1.8 and -182 in 17 of 20 runs": lambda: (
        [done for x, done in diverging() if -182 < x < -1.8] == [False] * 17
        and len(diverging()) == 20
        and {r["learning_rate"] / 1.25e-3 for r in COLLECTED[DIVERGING]} == {2, 4, 8, 16}
        and rates(RECALL, "diff-plain", "recall") == {1.25e-3}
    ),
    "In the three others, |λ| of layer 1 is below 0.2, and all three solve it": lambda: (
        [done for x, done in diverging() if abs(x) < 0.2] == [True] * 3
    ),
    "λ of layer 2 stays between 0.2 and 1 in all runs": lambda: all(0.2 < x < 1 for x in lambdas(DIVERGING, 2)),
    "λ of layer 1 ends between -1.1 and -0.5 in four runs that solve the task": lambda: (
        len(
            [
                r
                for r in COLLECTED[RECALL]
                if r["arm"] == "diff-plain"
                and -1.1 < r["numbers"]["lambda/1"] < -0.5
                and r["numbers"]["exact_match/retrieval"] >= 0.9
            ]
        )
        == 4
    ),
    "With the norm, λ stays between 0 and 1 in all reported runs on recall": lambda: all(
        0 < x < 1
        for study in (RECALL, NOISE, MORE_NOISE)
        for layer in (1, 2)
        for x in lambdas(study, layer, arm="diff")
    ),
    "With a gain it does so among 15 and 31 distractors": lambda: all(
        0 < x < 1 for study in (RECALL, NOISE) for layer in (1, 2) for x in lambdas(study, layer, arm="diff-gain")
    ),
    "λ of layer 1 of `diff-gain` ends between -2.1 and -0.9 in all six runs": lambda: (
        [-2.1 < x < -0.9 for x in lambdas(MORE_NOISE, 1, arm="diff-gain")] == [True] * 6
    ),
    "With 31 distractors, both arms with λ = 0 solve every run": lambda: all(
        solved(NOISE, arm, "recall-31") == (6, 6) for arm in ("zero-norm", "zero-gain")
    ),
    "`zero-norm`, `zero-gain` and `diff-gain` solve all six": lambda: all(
        solved(NOISE, arm, "recall-31") == (6, 6) for arm in ("zero-norm", "zero-gain", "diff-gain")
    ),
    "`diff` and `diff-gain` solve no run, and `zero-gain`, which does not subtract, solves all six": lambda: (
        [solved(MORE_NOISE, arm, "recall-63") for arm in ("diff", "diff-gain", "zero-gain")] == [(0, 6), (0, 6), (6, 6)]
    ),
    "No gain or rate that was tried lets `diff-gain` solve the task on the tuned seed": lambda: (
        max(r["numbers"]["exact_match/retrieval"] for r in COLLECTED[f"{MORE_NOISE}-tuning"] if r["arm"] == "diff-gain")
        < 0.9
    ),
    "so that chance chose its settings. Those with which it solves 31 distractors were not tried with 63": lambda: (
        max(r["numbers"]["exact_match/retrieval"] for r in COLLECTED[f"{MORE_NOISE}-tuning"] if r["arm"] == "diff-gain")
        < 0.1
        and settings(NOISE, "diff-gain", "recall-31") == {("8", 1.25e-3)}
        and ("8", 1.25e-3) not in settings(f"{MORE_NOISE}-tuning", "diff-gain", "recall-63")
    ),
    "The gain of `diff-gain` is 4 with 15, 8 with 31 and 2 with 63; that of `zero-gain` is always 4": lambda: all(
        [
            str(int(controls.TUNED["recall"][arm]["model.post_scale"])),
            *(gain for study, task in PARTS_OF_6 for gain, _ in settings(study, arm, task)),
        ]
        == gains
        for arm, gains in (("diff-gain", ["4", "8", "2"]), ("zero-gain", ["4", "4", "4"]))
    ),
    "1, the smallest, is best for `diff-gain` on novels, and 8, the largest, is best in two arms of question "
    "6": lambda: (
        controls.TUNED["novels"]["diff-gain"]["model.post_scale"] == min(controls_study.GAINS)
        and {
            arm
            for study, task in PARTS_OF_6
            for arm in ("transformer-gain", "zero-gain", "diff-gain")
            for gain, _ in settings(study, arm, task)
            if gain == str(max(controls_study.GAINS))
        }
        == {"transformer-gain", "diff-gain"}
    ),
    "In `diff` on novels, λ ends between 0.1 and 0.5 in every run of question 1": lambda: all(
        0.1 < x < 0.5 for study in (FIRST, AGAIN) for layer in (1, 2) for x in lambdas(study, layer, arm="diff")
    ),
    "runs with 31 have 1.5 times the tokens of those with 15, and runs with 63 have 2.5 times": lambda: (
        [{r["tokens"] for r in COLLECTED[of] if r["task"] != "recall"} for of in (NOISE, MORE_NOISE)]
        == [{factor * r["tokens"] for r in COLLECTED[RECALL]} for factor in (1.5, 2.5)]
    ),
    "With 63, the accuracy of `diff` is lower than that of `zero-norm`, with an interval that excludes zero": lambda: (
        sum(
            interval(
                [
                    accuracy - accuracies(MORE_NOISE, "zero-norm", "recall-63")[seed]
                    for seed, accuracy in accuracies(MORE_NOISE, "diff", "recall-63").items()
                ]
            )
        )
        < 0
    ),
    "With 63 distractors, each solution is first seen at step 2,000 or later, of 2,500": lambda: all(
        r["numbers"].get("exact_match/solved_at_step", 2500) >= 2000 for r in COLLECTED[MORE_NOISE]
    ),
    "From 15 to 31, they halve for `transformer-gain`, `transformer-wide-norm`, `zero-gain`, `diff-gain` and "
    "λ = 1": lambda: (
        rate_factors(NOISE, "recall-31")
        == dict.fromkeys(("transformer-gain", "transformer-wide-norm", "zero-gain", "diff-gain", "diff-lambda_1"), 0.5)
        | {"zero-norm": 1, "diff": 1}
    ),
    "From 15 to 63, they halve for `diff`, `zero-gain` and λ = 1, and double for `diff-gain`": lambda: (
        rate_factors(MORE_NOISE, "recall-63")
        == {"diff": 0.5, "zero-gain": 0.5, "diff-lambda_1": 0.5, "diff-gain": 2, "zero-norm": 1}
    ),
    "The rate of `diff` is half that of `zero-norm` there": lambda: (
        {2 * rate for rate in rates(MORE_NOISE, "diff", "recall-63")} == rates(MORE_NOISE, "zero-norm", "recall-63")
    ),
    "With 63 distractors it does not": lambda: (
        solved(MORE_NOISE, "diff", "recall-63") <= solved(MORE_NOISE, "zero-norm", "recall-63")
    ),
    "two runs of `diff` do not reach an accuracy of 0.9, and all of `zero-norm` do": lambda: (
        (solved(NOISE, "diff", "recall-31"), solved(NOISE, "zero-norm", "recall-31")) == ((4, 6), (6, 6))
    ),
    "`zero-gain` is slightly more accurate than `diff-gain` in every run, at another rate and gain": lambda: (
        all(
            0 < value - accuracies(NOISE, "diff-gain", "recall-31")[seed] < 0.02
            for seed, value in accuracies(NOISE, "zero-gain", "recall-31").items()
        )
        and rates(NOISE, "zero-gain", "recall-31") != rates(NOISE, "diff-gain", "recall-31")
    ),
    "With 31 distractors and half the rate, `transformer-gain` and `transformer-wide-norm` solve all six "
    "runs": lambda: all(
        solved(NOISE, arm, "recall-31") == (6, 6) for arm in ("transformer-gain", "transformer-wide-norm")
    ),
    "On text they train on 10 to 14 tokens per parameter, except in question 4 (5 to 80) and in question 5 "
    "(28": lambda: (
        [
            tokens_per_parameter(study, "novels")
            for study in (FIRST, "question-1-wide", "question-4-shared", "question-5-start")
        ]
        == [(14, 14), (10, 10), (5, 80), (14, 14)]
    ),
    "On recall they train on 9 to 22": lambda: (
        [tokens_per_parameter(study, "recall") for study in (RECALL, NOISE, MORE_NOISE)] == [(9, 9), (9, 13), (22, 22)]
    ),
    "For `transformer`, no rate solves the task on the tuned seed": lambda: (
        max(r["numbers"]["exact_match/retrieval"] for r in COLLECTED[f"{RECALL}-tuning"] if r["arm"] == "transformer")
        < 0.9
    ),
}


SHORT = {"optimizer__warmup_fraction": "0.01"}
MUON = {"optimizer__name": "muon"}
OPTIMIZERS = {"AdamW": {}, "Muon": MUON}
DIFFERENCES = {  # Name → (sign, model, has the short warm-up) of its terms.
    "transformer's need for a long warm-up": [(1, "transformer", True), (-1, "transformer", False)],
    "diff's need for a long warm-up": [(1, "diff", True), (-1, "diff", False)],
    "diff's need minus transformer's": [
        (1, "diff", True),
        (1, "transformer", False),
        (-1, "diff", False),
        (-1, "transformer", True),
    ],
    "the whole architecture": [(1, "diff", False), (-1, "transformer", False)],
}


def by_optimizer(optimizer, *terms):
    """Return a sum of losses with signs by seed."""
    found = []
    for sign, arm, is_short in terms:
        changes = OPTIMIZERS[optimizer] | (SHORT if is_short else {})
        study = FIRST if not changes else "question-2-zero" if arm == "zero-norm" else "question-2"
        found.append((sign, losses(study, arm, **changes)))
    return [sum(sign * of[seed] for sign, of in found) for seed in range(10, 15)]


WARMUP_FAMILY = {
    f"{name}, {optimizer}": by_optimizer(optimizer, *terms)
    for optimizer in OPTIMIZERS
    for name, terms in DIFFERENCES.items()
}


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


SUBTRACTION_WITH_MUON = {
    f"{share} %": by_optimizer("Muon", (1, "diff", share == 1), (-1, "zero-norm", share == 1)) for share in (50, 1)
}


@pytest.mark.parametrize("share", SUBTRACTION_WITH_MUON)
def test_the_subtraction_with_muon_is_open(share):
    [line] = [line for line in PAGE.splitlines() if f"| the subtraction, warm-up of {share} |" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    p = corrected({(other,): two_sided(of) for other, of in SUBTRACTION_WITH_MUON.items()})[share,]
    assert cells[2] == shown(SUBTRACTION_WITH_MUON[share])
    assert shows_p(cells[3], p)
    assert cells[4] == "open"
    assert p >= 0.05
    assert "With Muon, `diff` − `zero-norm` is open at both" in PROSE


def is_decided(name):
    """Return the sign of a contrast of question 2, or zero if it is open."""
    p = corrected({(other,): two_sided(of) for other, of in WARMUP_FAMILY.items()})[name,]
    return 0 if p >= 0.05 else math.copysign(1, interval(WARMUP_FAMILY[name])[0])


MAIN = [("diff", "zero-norm"), ("diff", "transformer"), ("diff", "transformer-gain")]
WIDE_SECTION = section("### Wide heads", "### Other text")
STDLIB_SECTION = section("### Other text", "## Question 2: warm-up and optimizer")
MAIN_PARTS = [
    ("question-1-wide", LOSS, WIDE_SECTION),
    ("question-1-stdlib", "loss/bits_per_byte", STDLIB_SECTION),
]


@pytest.mark.parametrize(("study", "number", "part"), MAIN_PARTS, ids=["wide", "stdlib"])
def test_wide_heads_and_other_text_have_the_three_contrasts(study, number, part):
    values = {pair: contrast(study, *pair, number) for pair in MAIN}
    p_values = corrected({pair: two_sided(of) for pair, of in values.items()})
    for pair, of in values.items():
        cells = row_of(*pair, part)
        assert cells[2] == shown(of)
        assert shows_p(cells[3], p_values[pair])
        expected = "open" if p_values[pair] >= 0.05 else "worse" if interval(of)[0] > 0 else "better"
        assert cells[4] == expected


def verdicts(part):
    return [row_of(*pair, part)[4] for pair in MAIN]


CLAIMS |= {
    "With heads of width 32, `diff` is behind the Transformer with a gain; the other two contrasts are open": lambda: (
        verdicts(WIDE_SECTION) == ["open", "open", "worse"]
    ),
    "On the source code of Python's library, `diff` is behind both Transformers, as on novels": lambda: (
        verdicts(STDLIB_SECTION) == ["open", "worse", "worse"]
        and all(better(arm, "diff") for arm in ("transformer", "transformer-gain"))
    ),
}
CLAIMS |= {
    "With AdamW, a warm-up of 1 % of the steps is worse than 50 % for both models": lambda: all(
        is_decided(f"{arm}'s need for a long warm-up, AdamW") > 0 for arm in ("diff", "transformer")
    ),
    "With Muon, the short warm-up favours the Transformer. With AdamW, the estimate is as large, but the contrast is "
    "open": lambda: (
        is_decided("diff's need minus transformer's, Muon") > 0
        and not is_decided("diff's need minus transformer's, AdamW")
        and shown(WARMUP_FAMILY["diff's need minus transformer's, Muon"])[:6]
        == shown(WARMUP_FAMILY["diff's need minus transformer's, AdamW"])[:6]
    ),
    "With Muon, no harm of the short warm-up is shown for either model": lambda: all(
        interval(WARMUP_FAMILY[f"{arm}'s need for a long warm-up, Muon"])[0] < 0 for arm in ("diff", "transformer")
    ),
    "In one family of ten, this p-value would be above 0.05": lambda: (
        corrected(
            {(name,): two_sided(of) for family in (WARMUP_FAMILY, SUBTRACTION_WITH_MUON) for name, of in family.items()}
        )["the whole architecture, Muon",]
        > 0.05
    ),
    "λ of layer 2 ends between 0.3 and 0.5": lambda: all(
        0.3 < r["numbers"]["lambda/2"] < 0.5
        for r in COLLECTED["question-2"]
        if r["arm"] == "diff" and "optimizer.warmup_fraction" not in r["changes"]
    ),
    "The short warm-up makes the Transformer better": lambda: (
        is_decided("transformer's need for a long warm-up, Muon") < 0
    ),
    "For `diff` the change is open": lambda: not is_decided("diff's need for a long warm-up, Muon"),
    "With Muon and the long warm-up, `diff` is better than the Transformer": lambda: (
        is_decided("the whole architecture, Muon") < 0
    ),
    "With the long warm-up, the loss of `zero-norm` is lower than that of the Transformer too": lambda: (
        sum(interval(by_optimizer("Muon", (1, "zero-norm", False), (-1, "transformer", False)))) < 0
    ),
    "its corrected p-value is just below 0.05": lambda: (
        0.04
        < corrected({(name,): two_sided(of) for name, of in WARMUP_FAMILY.items()})["the whole architecture, Muon",]
        < 0.05
    ),
    "λ of layer 1 ends between -0.3 and 0.1": lambda: all(
        -0.3 < r["numbers"]["lambda/1"] < 0.1
        for r in COLLECTED["question-2"]
        if r["arm"] == "diff" and "optimizer.warmup_fraction" not in r["changes"]
    ),
}


REVIEW_FAMILY = [(arm, other) for other in ("transformer", "diff") for arm in ("top_k", "signed_mask")]


def from_review(one, other):
    own, reference = losses("review-novels", one), losses(AGAIN, other)
    assert own.keys() == reference.keys()
    return [own[seed] - reference[seed] for seed in sorted(own)]


def test_the_reviews_arms_have_their_contrasts():
    part = section("### Explicit sparsity and a signed mask", "## Defaults that follow")
    p_values = corrected({pair: two_sided(from_review(*pair)) for pair in REVIEW_FAMILY})
    for pair in REVIEW_FAMILY:
        values = from_review(*pair)
        cells = row_of(*pair, part)
        assert cells[2] == shown(values)
        assert shows_p(cells[3], p_values[pair])
        assert cells[4] == ("better" if pair[0] == "top_k" else "worse")
        assert p_values[pair] < 0.05
        assert (interval(values)[0] < 0) == (pair[0] == "top_k")
        assert f"`{pair[0]}` − `{pair[1]}` {shown(values)}" in PROSE
    assert "explicit top-k is better than both the Transformer and `diff`. A signed mask is worse than both" in PROSE
    assert "most of its runs fail" in PROSE
    assert solved("review-recall", "top_k", "recall-31")[0] < 3
    assert "solves every run" in PROSE
    assert solved("review-recall", "signed_mask", "recall-31") == (6, 6)
    keys = {task: load_config(f"controls:{task}-top_k", {}).model.top_k for task in ("novels", "recall-31")}
    assert keys == {"novels": 16, "recall-31": 6}


def test_training_does_not_align_the_maps_in_noise():
    """The cosine at distractors has to grow in `diff`, and more than in `zero-norm`; only the second holds."""
    runs = COLLECTED["review-nc3"]
    growth = {
        arm: {
            r["seed"]: r["numbers"]["attention/cosine_noise"] - r["numbers"]["first/attention/cosine_noise"]
            for r in runs
            if r["arm"] == arm
        }
        for arm in ("diff", "zero-norm")
    }
    own = [*growth["diff"].values()]
    more = [growth["diff"][seed] - growth["zero-norm"][seed] for seed in growth["diff"]]
    assert all(sum(interval(values)) < 0 for values in (own, [*growth["zero-norm"].values()]))
    assert interval(more)[0] > interval(more)[1]
    assert f"The first condition fails: the cosine falls in `diff` ({shown(own)})" in PROSE
    further = "it falls further in `zero-norm`, whose A2 is not trained"
    assert f"The second is met, because {further} (`diff` − `zero-norm` {shown(more)};" in PROSE
    assert "All of these runs solve recall" in PROSE
    assert all(r["numbers"]["exact_match/retrieval"] >= 0.9 for r in runs)


@pytest.mark.parametrize(("study", "distractors"), [(NOISE, 31), (MORE_NOISE, 63)])
@pytest.mark.parametrize(("one", "other"), [("diff", "zero-norm"), ("diff-gain", "zero-gain")])
def test_leads_among_distractors_are_differences_of_accuracies(one, other, study, distractors):
    leads = []
    for of, task in ((RECALL, "recall"), (study, f"recall-{distractors}")):
        own, reference = (accuracies(of, arm, task) for arm in (one, other))
        assert own.keys() == reference.keys()
        leads.append([own[seed] - reference[seed] for seed in sorted(own)])
    growth = [many - few for few, many in zip(*leads, strict=True)]
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| `{one}` − `{other}` | {distractors} |")]
    cells = [cell.strip().lstrip("+") for cell in line.strip("|").split("|")]
    assert cells[4:6] == [shown(leads[1]).lstrip("+"), shown(growth).lstrip("+")]
    counts = [solved(study, arm, f"recall-{distractors}") for arm in (one, other)]
    assert cells[2:4] == ["{} of {}".format(*count) for count in counts]
    mean, half = interval(growth)
    assert (cells[6] == "yes") == (counts[0] > counts[1] and mean > half)


SIZE_PAIRS = [
    *((arm, "transformer") for arm in ("zero-norm", "diff", "diff_v2", "gdla", "gated")),
    ("diff", "zero-norm"),
]
# The parts of question 4: a rate for each length, and one rate for all lengths, for both sizes.
OWN, SHARED, LARGE, LARGE_SHARED = "own rates", "shared rate", "larger models", "larger models, shared rate"
LARGER = (LARGE, LARGE_SHARED)
RUNS = {
    part: [r for r in COLLECTED[study] if r["task"] == task]
    for part, study, task in (
        (OWN, "question-4", "novels"),
        (SHARED, "question-4-shared", "novels"),
        (LARGE, "question-4", "novels-0.4m"),
        (LARGE_SHARED, "question-4-shared", "novels-0.4m"),
    )
}
# Part → tokens per parameter → updates of 1,024 tokens.
STEPS_OF = {part: {5: 2083, 20: 8333} if part in LARGER else {5: 723, 20: 2891, 80: 11565} for part in RUNS}
PARAMETERS_OF = {part: 426_624 if part in LARGER else 148_032 for part in RUNS}
SIZES_SECTION = section("## Question 4: size and tokens", "## Question 5: from a pretrained Transformer")
CONVERTED_SECTION = section("## Question 5: from a pretrained Transformer", "## Question 6: distractors")
HEADINGS = r"### (?:One rate for all lengths|Models of 430,000 parameters(?:, one rate)?)\n"
SECTIONS = dict(zip(RUNS, re.split(HEADINGS, SIZES_SECTION), strict=True))


def size_losses(arm, tokens, part):
    """Return seed → loss."""
    steps = str(STEPS_OF[part][tokens])
    return {
        r["seed"]: r["numbers"][LOSS] for r in RUNS[part] if (r["arm"], r["changes"]["train.steps"]) == (arm, steps)
    }


def by_seed_at(one, other, tokens, part=OWN):
    """Return seed → difference of two arms, for the seeds of the first."""
    own, reference = (size_losses(arm, tokens, part) for arm in (one, other))
    return {seed: own[seed] - reference[seed] for seed in sorted(own)}


def at_length(*of):
    return [*by_seed_at(*of).values()]


def slope(one, other, part, longest=80):
    """Return for each seed the covariance of difference and log2 of the tokens, over the variance of the latter."""
    lengths = [tokens for tokens in STEPS_OF[part] if tokens <= longest]
    of = {math.log2(tokens): found for tokens in lengths if (found := by_seed_at(one, other, tokens, part))}
    mean = statistics.fmean(of)
    scale = sum((x - mean) ** 2 for x in of)
    seeds = [seed for seed in min(of.values(), key=len) if all(seed in found for found in of.values())]
    return [sum((x - mean) * found[seed] for x, found in of.items()) / scale for seed in seeds]


def change_with_size(one, other, part):
    small = by_seed_at(one, other, 20, OWN if part == LARGE else SHARED)
    return [difference - small[seed] for seed, difference in by_seed_at(one, other, 20, part).items()]


LATER = "later arms"  # A second family of OWN, of arms whose runs with 80 tokens per parameter were planned later.
LATER_ARMS = ("diff_v2", "gdla", "gated")


def longest_of(family, one):
    """Return the most tokens per parameter of an arm's slope in a family."""
    return 20 if family in LARGER or (family != LATER and one in LATER_ARMS) else 80


SIZE_FAMILIES = {
    part: {
        **{(*pair, "at 20"): of for pair in SIZE_PAIRS if (of := at_length(*pair, 20, part))},
        **{
            (*pair, "slope"): slope(*pair, part, longest_of(part, pair[0]))
            for pair in SIZE_PAIRS
            if at_length(*pair, 20, part)
        },
    }
    for part in RUNS
}
for part in LARGER:
    for pair in (("diff", "transformer"), ("diff", "zero-norm")):
        SIZE_FAMILIES[part][*pair, "size"] = change_with_size(*pair, part)
SIZE_FAMILIES[LATER] = {
    **{(arm, "transformer", "at 80"): at_length(arm, "transformer", 80) for arm in LATER_ARMS},
    **{(arm, "transformer", "slope"): slope(arm, "transformer", OWN) for arm in LATER_ARMS},
}
SIZE_P_VALUES = {
    name: corrected({contrast: two_sided(of) for contrast, of in family.items()})
    for name, family in SIZE_FAMILIES.items()
}


def size_verdict(one, other, at, family=OWN):
    """Return the sign of a contrast of question 4, or 0 if it is open."""
    mean, _ = interval(SIZE_FAMILIES[family][one, other, at])
    return 0 if SIZE_P_VALUES[family][one, other, at] >= 0.05 else math.copysign(1, mean)


def sign_of_interval(one, other, tokens, part=OWN):
    """Return the sign of the mean if the uncorrected interval of a length excludes zero, or else 0."""
    mean, half = interval(at_length(one, other, tokens, part))
    return 0 if abs(mean) < half else math.copysign(1, mean)


def cost_of_own_rate(arm, tokens, own=OWN, shared=SHARED):
    """Return for each seed the loss with the rate of this length, minus that with the shared rate."""
    losses = size_losses(arm, tokens, own)
    return [losses[seed] - loss for seed, loss in size_losses(arm, tokens, shared).items()]


def median_seconds(runs, arm):
    return statistics.median(r["wall_seconds"] for r in runs if r["arm"] == arm)


CLAIMS |= {
    "With 20 tokens per parameter, `diff` is worse than the Transformer, and `gdla` and `gated` are better": lambda: (
        size_verdict("diff", "transformer", "at 20") == 1
        and size_verdict("gdla", "transformer", "at 20") == size_verdict("gated", "transformer", "at 20") == -1
    ),
    "The gap between `diff` and the Transformer shrinks with more tokens. The planned test of the subtraction is "
    "open": lambda: (
        size_verdict("diff", "transformer", "slope") == -1 and size_verdict("diff", "zero-norm", "at 20") == 0
    ),
    "and below zero for each seed. Whether the subtraction changes with the number of tokens is open": lambda: (
        max(at_length("diff", "zero-norm", 80)) < 0 and size_verdict("diff", "zero-norm", "slope") == 0
    ),
    "because the gap shrinks without it too": lambda: size_verdict("zero-norm", "transformer", "slope") == -1,
    "With 80, the leads of `gdla` and `gated` hold, and `diff_v2` is worse": lambda: (
        [size_verdict(arm, "transformer", "at 80", LATER) for arm in ("gdla", "gated", "diff_v2")] == [-1, -1, 1]
    ),
    "All three slopes to 80 are above zero, as the plan expected of `gdla`": lambda: (
        {size_verdict(arm, "transformer", "slope", LATER) for arm in LATER_ARMS} == {1}
    ),
    "With five, `diff_v2` at 80 was open, and so was the slope of `gated`": lambda: (
        (p_values := corrected({contrast: two_sided(of[:5]) for contrast, of in SIZE_FAMILIES[LATER].items()}))[
            "diff_v2", "transformer", "at 80"
        ]
        > 0.05
        < p_values["gated", "transformer", "slope"]
    ),
    "it is half of the steps, from 361 to 5,782 updates": lambda: (
        load_config("controls:novels-diff", {}).optimizer.warmup_fraction == 0.5
        and [steps // 2 for steps in STEPS_OF[OWN].values()] == [361, 1445, 5782]
    ),
    "at 5 (not preregistered), open at 20, and": lambda: (
        sign_of_interval("diff_v2", "transformer", 5) == -1 and size_verdict("diff_v2", "transformer", "at 20") == 0
    ),
    "All arms have as many parameters as the Transformer within 0.2 %": lambda: all(
        abs(r["parameters"] / PARAMETERS_OF[part] - 1) < 0.002 for part in RUNS for r in RUNS[part]
    ),
    "two verdicts at 20 tokens per parameter differ: `diff` − `transformer` is open, and `diff` is better than "
    "`zero-norm`.** The other verdicts at 20 are the same, and so are those of the "
    "slopes": lambda: (
        size_verdict("diff", "transformer", "at 20", SHARED) == 0
        and size_verdict("diff", "zero-norm", "at 20", SHARED) == -1
        and {name for name in SIZE_FAMILIES[OWN] if size_verdict(*name) != size_verdict(*name, SHARED)}
        == {("diff", "transformer", "at 20"), ("diff", "zero-norm", "at 20")}
    ),
    "four arms trained again at 20 tokens per parameter, and the Transformer at 80, each with its own rate. Of the "
    "144 runs above, 80 are": lambda: (
        len([r for r in RUNS[OWN] if r not in RUNS[SHARED]]) == 5 * 8 + 3 * 8
        and len([r for r in RUNS[OWN] if r in RUNS[SHARED]]) == 80
    ),
    "With one rate, the lead gets smaller there too": lambda: size_verdict("gdla", "transformer", "slope", SHARED) == 1,
    "the rate that the tuned seed chooses for `gdla` gives a higher mean loss on the reported seeds than its rate at "
    "5. The interval of this difference contains zero": lambda: (
        (cost := interval(cost_of_own_rate("gdla", 20)))[1] > cost[0] > 0
    ),
    "uncommitted changes in its working tree, as in 78 runs of question 4": lambda: (
        sum(r["commit"].endswith("+") for r in COLLECTED["question-4-shared"]) == 78
        and all(r in RUNS[SHARED] for r in RUNS[OWN] if r["commit"].endswith("+"))
    ),
    "The forty runs that are only in the tables above name a commit before that of their plan": lambda: (
        len([r for r in RUNS[OWN] if r not in RUNS[SHARED] and r["commit"].startswith("b2195ee")]) == 40
    ),
    "`transformer` has its smallest loss at four times this rate, `zero-norm` at twice, and `diff` at this "
    "rate": lambda: (
        [
            tuned_rate(arm, STEPS_OF[LARGE][20]) / tuned_rate(arm, STEPS_OF[LARGE][5])
            for arm in ("transformer", "zero-norm", "diff")
        ]
        == [4, 2, 1]
    ),
    "With a rate for each length and seven seeds, the gap between `diff` and the Transformer shrinks with more tokens. "
    "The seven other preregistered contrasts are open": lambda: (
        len(SIZE_FAMILIES[LARGE]) == 8
        and size_verdict("diff", "transformer", "slope", LARGE) == -1
        and sum(size_verdict(*name, LARGE) == 0 for name in SIZE_FAMILIES[LARGE]) == 7
        and {len(of) for of in SIZE_FAMILIES[LARGE].values()} == {7}
    ),
    "with the first five seeds, all eight contrasts were open": lambda: (
        min(corrected({name: two_sided(of[:5]) for name, of in SIZE_FAMILIES[LARGE].items()}).values()) >= 0.05
    ),
    "The slope is below zero for each seed, but open after the correction": lambda: (
        max(SIZE_FAMILIES[LARGE]["zero-norm", "transformer", "slope"]) < 0
        and size_verdict("zero-norm", "transformer", "slope", LARGE) == 0
    ),
    "the gap between `zero-norm` and the Transformer shrinks with more tokens. The seven other preregistered contrasts "
    "are open with five seeds": lambda: (
        len(SIZE_FAMILIES[LARGE_SHARED]) == 8
        and size_verdict("zero-norm", "transformer", "slope", LARGE_SHARED) == -1
        and sum(size_verdict(*name, LARGE_SHARED) == 0 for name in SIZE_FAMILIES[LARGE_SHARED]) == 7
        and {len(of) for of in SIZE_FAMILIES[LARGE_SHARED].values()} == {5}
    ),
    "the rates tuned at 20 tokens per parameter do not lower the loss of `transformer` or of `zero-norm`: both "
    "intervals of the change contain zero": lambda: all(
        abs((cost := interval(cost_of_own_rate(arm, 20, LARGE, LARGE_SHARED)))[0]) < cost[1]
        for arm in ("transformer", "zero-norm")
    ),
    "Of the 42 runs above, 20 are in this table too. It has the first five of their seeds": lambda: (
        len(RUNS[LARGE]) == 42
        and len([r for r in RUNS[LARGE] if r in RUNS[LARGE_SHARED]]) == 20
        and {r["seed"] for r in RUNS[LARGE_SHARED]} == set(sorted({r["seed"] for r in RUNS[LARGE]})[:5])
    ),
    "The estimates are almost equal, and the intervals differ": lambda: (
        abs(interval(at_length("diff", "zero-norm", 20))[0] - interval(at_length("diff", "zero-norm", 20, SHARED))[0])
        < 0.002
    ),
    "`gdla` and `gated` (question 4) and `top_k`": lambda: (
        {size_verdict(arm, "transformer", "at 20") for arm in ("gdla", "gated")} == {-1}
        and sum(interval(from_review("top_k", "transformer"))) < 0
    ),
    "A run of `top_k` takes 3.3 times as long as one of the Transformer": lambda: (
        round(median_seconds(COLLECTED["review-novels"], "top_k") / median_seconds(COLLECTED[AGAIN], "transformer"), 1)
        == 3.3
    ),
    "No rate lets it solve the task on the tuned seed": lambda: (
        max(
            r["numbers"]["exact_match/retrieval"]
            for r in COLLECTED["review-recall-tuning"]
            if (r["arm"], r["task"]) == ("top_k", "recall-31")
        )
        < 0.9
    ),
    "bits per byte on novels with 14 tokens per parameter": lambda: (
        {round(r["tokens"] / r["parameters"]) for r in COLLECTED[AGAIN] if r["arm"] == "diff"} == {14}
    ),
}


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


@pytest.mark.parametrize("family", SIZE_FAMILIES)
def test_the_contrasts_of_question_4_have_their_intervals(family):
    """The section of a part has the table of its family, and that of OWN then has the one of LATER."""
    part = OWN if family == LATER else family
    tables = re.findall(r"^\| contrast \|.*\n.*\n((?:\|.*\n)+)", SECTIONS[part], re.MULTILINE)
    assert len(tables) == (2 if part == OWN else 1)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[family == LATER].splitlines()]
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


def tuned_rate(arm, steps):
    """Return the rate of the smallest validation loss on the seed of the tuning, which has to be between two others."""
    tries = [
        r
        for r in COLLECTED["question-4-tuning"]
        if (r["arm"], r["changes"]["train.steps"]) == (arm, str(steps)) and r["seed"] == controls_study.TUNED_SEED
    ]
    rate = min(tries, key=lambda r: r["numbers"]["loss/loss"])["learning_rate"]
    assert {rate / 2, rate * 2} <= {round(r["learning_rate"], 8) for r in tries}
    return rate


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


CONVERTED = "question-5"
METHODS = ("zero-branch", "dex", "split")
CONVERTED_P_VALUES = corrected({(arm,): two_sided(contrast(CONVERTED, arm, "transformer")) for arm in METHODS})


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


CLAIMS |= {
    "`zero-branch` is slightly better than the Transformer, with 22 % more parameters. `dex` is as good, and `split` "
    "is worse": lambda: (
        converted_verdict("zero-branch") == -1 and is_as_good("dex") and converted_verdict("split") == 1
    ),
    'its interval lies within the hundredth of a bit per byte that counts as "as good"': lambda: is_as_good(
        "zero-branch"
    ),
    "They have 22 % more parameters than the Transformer": lambda: (
        round(100 * (parameters("zero-branch") / parameters("transformer") - 1)) == 22
        and max(parameters(arm) / parameters("transformer") for arm in ("dex", "split")) < 1.005
    ),
    "|λ| ends below a fiftieth in every run and layer": lambda: (
        max(abs(x) for layer in (1, 2) for x in lambdas(CONVERTED, layer, arm="dex")) < 1 / 50
    ),
    "λ is negative at the end of every run, in both layers": lambda: all(
        x < 0 for layer in (1, 2) for x in lambdas(CONVERTED, layer, arm="split")
    ),
    "so the models do subtract": lambda: all(
        x > 0 for layer in (1, 2) for x in lambdas(CONVERTED, layer, arm="zero-branch")
    ),
    "The models here have seen 14 bytes per parameter before the conversion": lambda: (
        {round(r["tokens"] / r["parameters"]) for r in COLLECTED[f"{CONVERTED}-start"]} == {14}
    ),
    "on other text, with 0.8M parameters and three seeds, the means have the same order": lambda: (
        [
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
        ]
        == [["zero-branch", "dex", "split"]] * 2
    ),
}


@pytest.mark.parametrize("arm", METHODS)
def test_the_contrasts_of_question_5_have_their_intervals(arm):
    cells = row_of(arm, "transformer", CONVERTED_SECTION)
    assert cells[2] == shown(contrast(CONVERTED, arm, "transformer"))
    assert shows_p(cells[3], CONVERTED_P_VALUES[arm,])
    assert cells[4] == {0: "open", 1: "worse", -1: "better"}[converted_verdict(arm)]
    assert f"`{arm}` − `transformer` {'is ' if arm == 'zero-branch' else ''}{cells[2]}" in PROSE  # In the answers.


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


@pytest.mark.parametrize("claim", CLAIMS)
def test_words_of_the_page_follow_from_the_runs(claim):
    assert claim in PROSE
    assert CLAIMS[claim]()


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


def test_the_prose_of_question_4_has_its_differences():
    at = {tokens: shown(at_length("diff", "transformer", tokens)) for tokens in STEPS_OF[OWN]}
    subtraction = shown(at_length("diff", "zero-norm", 20))
    others = {arm: shown(at_length(arm, "transformer", 20)) for arm in ("gdla", "gated")}
    assert f"`gdla` − `transformer` is {others['gdla']}, and `gated` − `transformer` is {others['gated']}" in PROSE
    assert f"is {at[5]} at 5 tokens per parameter (not preregistered), {at[20]} at 20, and {at[80]} at 80 (not" in PROSE
    later = {arm: shown(at_length(arm, "transformer", 80)) for arm in ("gdla", "gated")}
    assert f"With 80 they are {later['gdla']}, {later['gated']} and {at[80]}; with 5 the last is {at[5]} (the" in PROSE
    assert f"At 80, they are {later['gdla']} and {later['gated']}" in PROSE
    assert {len(of) for name in (OWN, LATER) for of in SIZE_FAMILIES[name].values()} == {8}
    assert f"`diff` − `zero-norm` is {subtraction}, which is open" in PROSE
    assert f"tokens per parameter, and {at[20]} with 20 (question 4)" in PROSE
    for arm, text in (("zero-norm", " per parameter"), ("diff_v2", "")):
        of = shown(at_length(arm, "transformer", 5))
        assert f"`{arm}` − `transformer` is {of} at 5{' tokens' if text else ''}{text} (not preregistered)" in PROSE
    changes = {}
    for arm in ("diff", *LATER_ARMS):
        of = {tokens: by_seed_at(arm, "transformer", tokens) for tokens in (20, 80)}
        changes[arm] = shown([difference - of[20][seed] for seed, difference in of[80].items()])
    assert f"From 20 to 80 alone, it changes by {changes['diff']} (not preregistered)" in PROSE
    assert (
        f"From 20 to 80 alone, `gdla` − `transformer` changes by {changes['gdla']}, `gated` − `transformer` by" in PROSE
    )
    assert f"by {changes['gated']}, and `diff_v2` − `transformer` by {changes['diff_v2']} (not preregistered)" in PROSE
    assert f"at 5 (not preregistered), open at 20, and {shown(at_length('diff_v2', 'transformer', 80))} at 80" in PROSE
    planned, longest = (shown(at_length("diff", "zero-norm", tokens)) for tokens in (20, 80))
    assert f"with 20, is open ({planned}); with 80, the difference is {longest} (not preregistered)" in PROSE
    again = shown(at_length("diff", "zero-norm", 20, SHARED))
    assert f"With the shared rate of the next part it is {again}, and significant" in PROSE
    assert f"At 80 it is {shown(at_length('diff', 'zero-norm', 80))} (not preregistered)" in PROSE
    large = {tokens: shown(at_length("diff", "transformer", tokens, LARGE)) for tokens in (5, 20)}
    assert (
        f"`diff` − `transformer` is {large[5]} at 5 tokens per parameter (not preregistered), and {large[20]}" in PROSE
    )
    assert f"`diff` − `zero-norm` is {shown(at_length('diff', 'zero-norm', 20, LARGE))} at 20 tokens" in PROSE
    assert f"`diff` − `transformer` is open with 20 tokens per parameter ({large[20]})" in PROSE


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
    assert "If all lengths of training share one rate, `diff` − `transformer` with 20 tokens is open" in prose
    assert size_verdict("diff", "transformer", "at 20", SHARED) == 0
    assert "and `diff` is better than `zero-norm`" in prose
    assert size_verdict("diff", "zero-norm", "at 20", SHARED) == -1
    assert "In a family with the contrasts of λ = 0, the lead of `diff` with Muon is open" in prose
    assert CLAIMS["In one family of ten, this p-value would be above 0.05"]()
    assert {size_verdict(arm, "transformer", "slope") for arm in ("diff", "zero-norm")} == {-1}
    assert is_decided("transformer's need for a long warm-up, Muon") == -1


def test_the_readme_has_the_solved_runs():
    arms = ("diff", "zero-norm", "diff-gain", "zero-gain", "transformer")
    counts = {
        distractors: {arm: solved(study, arm, task) for arm in arms}
        for distractors, study, task in (
            ("15", RECALL, "recall"),
            ("31", NOISE, "recall-31"),
            ("63", MORE_NOISE, "recall-63"),
        )
    }
    assert summary_table("distractors") == [
        [distractors, *("{} of {}".format(*count) if count[1] else "" for count in of.values())]
        for distractors, of in counts.items()
    ]
    for of in counts.values():
        assert fisher(of["diff"], of["zero-norm"]) > 0.05
    p = fisher(counts["63"]["diff-gain"], counts["63"]["zero-gain"])
    wanted = f"(Fisher's p {p:.3f}, without a correction), for which tuning found no settings that work"
    assert wanted in " ".join(SUMMARY.split())


@pytest.mark.parametrize("study", [FIRST, AGAIN, RECALL])
def test_every_arm_has_equally_many_tokens_and_seeds(study):
    runs = COLLECTED[study]
    seeds = {arm: sorted(r["seed"] for r in runs if r["arm"] == arm) for arm in {r["arm"] for r in runs}}
    assert len({tuple(of) for of in seeds.values()}) == 1
    assert len({r["tokens"] for r in runs}) == 1
    counts = [r["parameters"] for r in runs]
    assert max(counts) / min(counts) < 1.01


LAMBDAS = {
    "lambda_bound=sigmoid": {"model__lambda_bound": "sigmoid"},
    "lambda_bound=tanh": {"model__lambda_bound": "tanh"},
    "lambda_learning_rate_factor=0.1": {"optimizer__lambda_learning_rate_factor": "0.1"},
    "lambda_weight_decay=0.1": {"optimizer__lambda_weight_decay": "0.1"},
}


def test_forms_of_lambda_are_compared_with_the_papers():
    """All four contrasts are open, as the page says."""
    plain, p_values = losses(FIRST, "diff"), {}
    for name, changes in LAMBDAS.items():
        own = losses("question-3-novels", "diff", **changes)
        values = [own[seed] - plain[seed] for seed in range(10, 15)]
        [row] = [line for line in PAGE.splitlines() if line.startswith(f"| `diff, {name}` − `diff` |")]
        assert row.split("|")[3].strip().lstrip("+") == shown(values).lstrip("+")
        assert row.split("|")[5].strip() == "open"
        p_values[name,] = two_sided(values)
    assert min(corrected(p_values).values()) > 0.05
    for name, changes in LAMBDAS.items():
        mean, half = interval([losses("question-3-novels", "diff", **changes)[seed] - plain[seed] for seed in plain])
        assert abs(mean) + half < 0.01, name
    assert "The intervals exclude changes of more than a hundredth of a bit" in PROSE
    assert "All four forms of λ are open on novels" in PROSE
    assert "all four contrasts with the paper's λ are undecided" in PROSE
