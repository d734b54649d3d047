"""The claims of docs/exploratory.md, recomputed from docs/results.json without benchmarks/exploratory_tables.py."""

import json
import re
import statistics

import pytest
from conftest import ROOT

from benchmarks import results
from difftx.config.recipes import load_config

COLLECTED = json.loads(results.COLLECTED.read_text())
PAGE = (ROOT / "docs" / "exploratory.md").read_text()
T_QUANTILE_2 = 4.302653  # 97.5 % quantile of Student's t with two degrees of freedom.


def of_arm(task, arm, number="loss/bits_per_byte", study="arms"):
    runs = {r["seed"]: r["numbers"][number] for r in COLLECTED[study] if (r["task"], r["arm"]) == (task, arm)}
    return [runs[seed] for seed in (0, 1, 2)]


def contrast(arm, reference, number="loss/bits_per_byte"):
    """Return mean and half-width of the 95 % interval of the paired differences on books."""
    return interval(of_arm("books", arm, number), of_arm("books", reference, number))


def interval(own, other):
    values = [a - b for a, b in zip(own, other, strict=True)]
    return statistics.fmean(values), T_QUANTILE_2 * statistics.stdev(values) / 3**0.5


def shown(mean, half, sign="+"):
    """Return mean and interval with three decimals, or with four if three do not show which one is larger."""
    decimals = 2 if abs(mean) >= 10 else 4 if f"{abs(mean):.3f}" == f"{half:.3f}" != "0.000" else 3
    return f"{mean:{sign}.{decimals}f} ± {half:.{decimals}f}"


@pytest.mark.parametrize(
    ("arm", "reference"),
    [
        ("diff", "transformer"),
        ("transformer-8x256-norm", "transformer-8x256"),
        ("diff", "diff-no_norm"),
        ("diff", "transformer-8x256-norm"),
        ("diff-no_norm", "transformer-8x256"),
        ("diff-no_norm", "transformer"),
        ("diff_v2", "transformer"),
        ("diff_v2", "transformer-8x256"),
    ],
)
def test_contrasts_are_printed_with_their_intervals(arm, reference):
    mean, half = contrast(arm, reference)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {arm} − {reference} |"))
    assert row.endswith(f"| {shown(mean, half)} | {'yes' if abs(mean) <= half else 'no'} |")
    prose = " ".join(PAGE.partition("## Books")[0].split())
    assert shown(mean, half) in prose
    assert f"`{arm}` − `{reference}`" in prose


def converted(arm):
    """Return mean and half-width of an arm's differences from the Transformer with continued training, on books."""
    return interval(*(of_arm("books-0.8m", name, study="differential") for name in (arm, "transformer")))


@pytest.mark.parametrize("arm", ["zero-branch", "dex", "split"])
def test_the_study_of_converted_models_has_its_contrasts(arm):
    """Each arm has the best rate of the tuning seed. The rates that were tried include half and twice that rate."""
    mean, half = converted(arm)
    prose = " ".join(PAGE.partition("## From a Transformer")[2].split())
    assert re.search(rf"`{arm}` − `transformer` (is )?{re.escape(shown(mean, half))}", prose)
    for task in ("books-0.8m", "recall", "recall-easy"):
        runs, tried = (
            [r for r in COLLECTED[study] if (r["task"], r["arm"]) == (task, arm)]
            for study in ("differential", "differential-rates")
        )
        assert {r["seed"] for r in tried} == {3}
        best = min(tried, key=lambda r: r["numbers"]["loss/loss"])["learning_rate"]
        assert {r["learning_rate"] for r in runs} == {best}
        assert {best / 2, best * 2} <= {r["learning_rate"] for r in tried}


def changes(task, arm, number, plain):
    """Return one number of a run minus another, for each seed of the study of caches."""
    return [a - b for a, b in zip(*(of_arm(task, arm, name, "cache") for name in (number, plain)), strict=True)]


def change_contrast(task, number, plain):
    """Return mean and half-width of the change by compression in `diff` minus that in the Transformer."""
    reference = {"books-0.8m": "transformer", "recall": "transformer-8x256-norm"}[task]
    return interval(*(changes(task, arm, number, plain) for arm in ("diff", reference)))


@pytest.mark.parametrize(
    ("task", "number"),
    [
        ("books-0.8m", "loss_loss"),
        ("books-0.8m", "recall_ar_hit_loss"),
        ("recall", "loss_loss"),
        ("recall", "exact_match_accuracy"),
    ],
)
def test_the_study_of_caches_has_its_differences(task, number):
    """The page shows the effect of each cache on the number per arm, and the contrast of the two arms.

    The effect is the number with the cache minus that with the whole cache.
    """
    section = PAGE.partition("## Compressed caches")[2].partition("## What was not run")[0]
    for arm in {r["arm"] for r in COLLECTED["cache"] if r["task"] == task}:
        first = next(r["numbers"] for r in COLLECTED["cache"] if r["task"] == task)
        caches = [name.removeprefix(f"cache/{number}_") for name in first if name.startswith(f"cache/{number}_")]
        assert len(caches) > 2
        for name in caches:
            own, whole = (of_arm(task, arm, f"cache/{number}_{cache}", "cache") for cache in (name, "whole"))
            mean, half = interval(own, whole)
            assert name == "whole" or shown(mean, half, sign="-") in section
            mean, half = change_contrast(task, f"cache/{number}_{name}", f"cache/{number}_whole")
            assert name == "whole" or f"{mean:+.4f} ± {half:.4f}" in section


@pytest.mark.parametrize("arm", ["diff", "transformer", "transformer-8x256-norm"])
def test_recall_is_reported_as_runs_that_solved_it(arm):
    count = sum(share >= 0.9 for share in of_arm("recall", arm, "exact_match/retrieval"))
    text = " ".join((ROOT / "docs" / "exploratory.md").read_text().split())
    assert re.search(rf"`{arm}`( solved it)? in {count} of 3", text)


def best(study, **wanted):
    """Return the lowest bits per byte of a study, over the learning rates of the runs with these changes."""
    return min(
        r["numbers"]["loss/bits_per_byte"]
        for r in COLLECTED[study]
        if (r["task"], r["arm"]) == ("books", wanted.get("arm", "diff"))
        and {n: v for n, v in r["changes"].items() if n != "optimizer.learning_rate"}
        == {n.replace("__", "."): v for n, v in wanted.items() if n != "arm"}
    )


def has_initialisation(r, init, zero):
    return (r["changes"]["model.init"], r["changes"]["model.zero_init_output"]) == (init, zero)


def fan_in_is_best():
    cells = {}
    for study in ("init", "init-short"):
        for r in COLLECTED[study]:
            cells.setdefault((study, r["arm"], r["learning_rate"]), []).append(r)
    tops = [min(runs, key=lambda r: r["numbers"]["loss/bits_per_byte"]) for runs in cells.values()]
    return len(tops) == 8 and all(has_initialisation(r, "fan_in", "true") for r in tops)


def transformer_ahead_from_all_four():
    return all(
        best("init", arm="transformer", model__init=init, model__zero_init_output=zero)
        < best("init", arm="diff", model__init=init, model__zero_init_output=zero)
        for init in ("fan_in", "normal")
        for zero in ("true", "false")
    )


def recall_rates(rate):
    return [
        r["numbers"]["exact_match/retrieval"]
        for r in COLLECTED["rates"]
        if (r["task"], r["learning_rate"]) == ("recall", rate)
    ]


SMALL, LARGE, EARLY, LATE = "books", "books-0.8m", 512_000, 2_048_000


def grown(task, arm, tokens):
    """Return the bits per byte of an arm minus those of the Transformer, each at its best rate, for one seed."""
    own, other = (
        min(
            r["numbers"]["loss/bits_per_byte"]
            for r in COLLECTED["sizes"]
            if (r["task"], r["arm"], r["tokens"]) == (task, name, tokens)
        )
        for name in (arm, "transformer")
    )
    return own - other


WHOLE = "cache/loss_loss_whole"


def of_cell(arm, optimizer, warmup):
    """Return the losses of a cell of the study of warm-up and optimizers, by seed."""
    fields = {"muon": {"optimizer.name": "muon"}, "adamw": {}}.get(
        optimizer, {"optimizer.name": "muon", "optimizer.muon.split": "groups"}
    )
    found = {
        r["seed"]: r["numbers"]["loss/bits_per_byte"]
        for r in COLLECTED["optimizers"]
        if r["arm"] == arm
        and float(r["changes"]["optimizer.warmup_steps"]) == warmup
        and {name: value for name, value in r["changes"].items() if "muon" in value or "muon" in name} == fields
    }
    assert set(found) == {0, 1, 2}
    return [found[seed] for seed in sorted(found)]


def sensitivity(arm, optimizer):
    """Return mean and half-width of the loss with a warm-up of 1 % minus that with 50 %."""
    return interval(of_cell(arm, optimizer, 0.01), of_cell(arm, optimizer, 0.5))


def behind(optimizer, warmup):
    """Return mean and half-width of diff's loss minus the Transformer's."""
    return interval(of_cell("diff", optimizer, warmup), of_cell("transformer", optimizer, warmup))


def lowest(task, arm):
    """Return the smallest mean over seeds of an arm of the study of transfer, and its learning rate."""
    found = {}
    for r in COLLECTED["transfer"]:
        if (r["task"], r["arm"]) == (task, arm):
            found.setdefault(r["learning_rate"], []).append(r["numbers"]["loss/bits_per_byte"])
    loss, rate = min((statistics.fmean(losses), rate) for rate, losses in found.items())
    assert {rate / 2, rate * 2} <= {round(tried, 6) for tried in found}  # The best rate is between two others.
    return loss, rate


def rate_at(task, arm):
    return lowest(task, arm)[1]


def at_rate(task, arm, rate):
    """Return the mean over seeds of an arm of the study of transfer at a learning rate."""
    return statistics.fmean(
        r["numbers"]["loss/bits_per_byte"]
        for r in COLLECTED["transfer"]
        if (r["task"], r["arm"], r["learning_rate"]) == (task, arm, rate)
    )


def easy(study):
    """Return the records of recall-easy."""
    return [r for r in COLLECTED[study] if r["task"] == "recall-easy"]


def unsolved(records):
    return [r for r in records if r["numbers"]["exact_match/retrieval"] < 0.9]


def rate_of(task, arm):
    """Return the learning rate of an arm in the comparison of all arms."""
    [rate] = {r["learning_rate"] for r in COLLECTED["arms"] if (r["task"], r["arm"]) == (task, arm)}
    return rate


def contrasts_in_favour():
    """Return the numbers of compressed caches whose contrast favours `diff` with an interval that excludes zero."""
    found = []
    for task, numbers in {
        "books-0.8m": ("cache/loss_loss", "cache/recall_ar_hit_loss", "quantize/loss_loss"),
        "recall": ("cache/loss_loss", "cache/exact_match_accuracy", "quantize/loss_loss"),
    }.items():
        names = next(r["numbers"] for r in COLLECTED["cache"] if r["task"] == task)
        for number in numbers:
            plain = f"{number}_16_bits" if number.startswith("quantize/") else f"{number}_whole"
            for name in (n for n in names if n.startswith(f"{number}_") and n != plain):
                mean, half = change_contrast(task, name, plain)
                better = mean if "accuracy" in number else -mean
                found += [(task, name)] if better > half else []
    return found


def contains_zero(mean_and_half):
    mean, half = mean_and_half
    return abs(mean) <= half


CACHE_CLAIMS = {
    "Neither interval contains zero: the loss of `diff` rises more": lambda: all(
        mean > half
        for mean, half in (
            change_contrast("books-0.8m", "cache/loss_loss_4_bits", WHOLE),
            change_contrast("books-0.8m", "quantize/loss_loss_4_bits", "quantize/loss_loss_16_bits"),
        )
    ),
    "in 8 bits** change either loss by less than a thousandth, on both tasks": lambda: all(
        abs(change) < 0.001
        for r in COLLECTED["cache"]
        for change in changes(r["task"], r["arm"], "cache/loss_loss_8_bits", WHOLE)
    ),
    "**Half of the tokens, on books**, changes either loss by less than a thousandth": lambda: all(
        abs(change) < 0.001
        for arm in ("diff", "transformer")
        for change in changes("books-0.8m", arm, "cache/loss_loss_64_tokens", WHOLE)
    ),
    "on recall**: both models lose about a quarter of their right answers": lambda: all(
        -0.3 < change < -0.2
        for r in COLLECTED["cache"]
        if r["task"] == "recall"
        for change in changes(
            "recall", r["arm"], "cache/exact_match_accuracy_16_tokens", "cache/exact_match_accuracy_whole"
        )
    ),
    "is the only contrast in the tables below in favour of `diff` whose interval excludes zero": lambda: (
        contrasts_in_favour() == [("recall", "cache/loss_loss_8_tokens")]
    ),
    "The interval of the contrast of the accuracies contains zero": lambda: contains_zero(
        change_contrast("recall", "cache/exact_match_accuracy_8_tokens", "cache/exact_match_accuracy_whole")
    ),
}

# Sentence of the page → check of it with docs/results.json.
CLAIMS = CACHE_CLAIMS | {
    "The intervals of `zero-branch` and `dex` contain zero, and `split` has the higher loss": lambda: (
        all(abs(mean) <= half for mean, half in map(converted, ("zero-branch", "dex")))
        and converted("split")[0] > converted("split")[1]
    ),
    "On recall, no arm solves the task": lambda: (
        (runs := [r for r in COLLECTED["differential"] if r["task"] == "recall"]) == unsolved(runs)
    ),
    "Without µP, the best rate does not transfer": lambda: all(
        rate_at("0.1m", name) >= 4 * rate_at("3m", name) for name in ("transformer", "diff")
    ),
    "With µP and CompleteP, it transfers within a factor of two": lambda: all(
        0.4 < rate_at("3m", f"{name}-mup") / rate_at("0.1m", name) < 2.1 for name in ("transformer", "diff")
    ),
    "At the best rate of 0.1M, the 3M models have lower losses with µP than without it": lambda: all(
        at_rate("3m", f"{name}-mup", rate_at("0.1m", name)) < at_rate("3m", name, rate_at("0.1m", name))
        for name in ("transformer", "diff")
    ),
    "At its own best rate, each 3M model has a lower loss without µP than with it": lambda: all(
        lowest("3m", name)[0] < lowest("3m", f"{name}-mup")[0] for name in ("transformer", "diff")
    ),
    "without µP than with it, by about a hundredth of the loss": lambda: all(
        0.005 < lowest("3m", f"{name}-mup")[0] / lowest("3m", name)[0] - 1 < 0.015 for name in ("transformer", "diff")
    ),
    "With Muon, this difference of `diff` is less than a fifth of that with AdamW": lambda: all(
        0 < sensitivity("diff", name)[0] < sensitivity("diff", "adamw")[0] / 5 for name in ("muon", "muon-groups")
    ),
    "With AdamW, the short warm-up raises the loss of `diff` more than that of `transformer`": lambda: (
        sensitivity("diff", "adamw")[0] > sensitivity("diff", "adamw")[1]
        and sensitivity("diff", "adamw")[0] > 4 * sensitivity("transformer", "adamw")[0]
    ),
    "With AdamW, `diff` has a higher loss than `transformer`. With Muon, both intervals contain zero": lambda: all(
        (behind(optimizer, warmup)[0] > behind(optimizer, warmup)[1]) == (optimizer == "adamw")
        for optimizer in ("adamw", "muon")
        for warmup in (0.01, 0.5)
    ),
    "With Muon, the mean loss of all three models is lower at every warm-up": lambda: all(
        statistics.fmean(of_cell(arm, "muon", warmup)) < statistics.fmean(of_cell(arm, "adamw", warmup))
        for arm in ("transformer", "diff", "diff_v2")
        for warmup in (0.01, 0.05, 0.2, 0.5)
    ),
    "whose interval contains zero": lambda: (
        contains_zero(interval(of_cell("transformer", "muon", 0.5), of_cell("transformer", "adamw", 0.5)))
        and not contains_zero(interval(of_cell("diff", "muon", 0.5), of_cell("diff", "adamw", 0.5)))
    ),
    "one run has a much higher loss than the other two": lambda: (
        (losses := sorted(of_cell("diff_v2", "adamw", 0.01)))[2] - losses[1] > 10 * (losses[1] - losses[0])
    ),
    "The runs that do not solve it have seed 0, whose Transformer had learned least": lambda: (
        {r["seed"] for r in unsolved(easy("differential"))} == {0}
        and min(easy("differential-start"), key=lambda r: r["numbers"]["exact_match/retrieval"])["seed"] == 0
    ),
    "The two arms with an unsolved run also have twice the rate of the other two": lambda: (
        {(r["arm"], r["learning_rate"]) for r in easy("differential")}
        == {("transformer", 0.01), ("dex", 0.01), ("zero-branch", 0.005), ("split", 0.005)}
        and {r["arm"] for r in unsolved(easy("differential"))} == {"transformer", "dex"}
    ),
    "Two contrasts add the head norm. Both intervals exclude zero": lambda: (
        not any(
            contains_zero(contrast(*arms))
            for arms in (("transformer-8x256-norm", "transformer-8x256"), ("diff", "diff-no_norm"))
        )
    ),
    "The arms with and without the head norm also differ in their rates": lambda: all(
        rate_of("books", without) == 2 * rate_of("books", norm)
        for norm, without in (("transformer-8x256-norm", "transformer-8x256"), ("diff", "diff-no_norm"))
    ),
    "All six differences of single seeds are positive, but both intervals contain zero": lambda: (
        all(
            a > b
            for arm, reference in (("diff", "transformer-8x256-norm"), ("diff-no_norm", "transformer-8x256"))
            for a, b in zip(of_arm("books", arm), of_arm("books", reference), strict=True)
        )
        and all(
            abs(mean) <= half
            for mean, half in (
                contrast("diff", "transformer-8x256-norm"),
                contrast("diff-no_norm", "transformer-8x256"),
            )
        )
    ),
    "If the head norm is added first, the two steps are about equal": lambda: (
        abs(contrast("transformer-8x256-norm", "transformer-8x256")[0] - contrast("diff", "transformer-8x256-norm")[0])
        < 0.01
    ),
    "If the second map is added first, the step of the head norm is the larger one": lambda: (
        contrast("diff", "diff-no_norm")[0] > 2 * contrast("diff-no_norm", "transformer-8x256")[0]
    ),
    "compare arms without the head norm with a Transformer. All three intervals contain zero": lambda: all(
        contains_zero(contrast(*arms))
        for arms in (("diff-no_norm", "transformer"), ("diff_v2", "transformer"), ("diff_v2", "transformer-8x256"))
    ),
    "at `1e-2` no arm solves the task": lambda: len(recall_rates(0.01)) == 8 and max(recall_rates(0.01)) < 0.9,
    "In the study of rates, two runs of 32 end in between": lambda: (
        len(shares := [share for rate in (0.00125, 0.0025, 0.005, 0.01) for share in recall_rates(rate)]) == 32
        and sum(0.2 < share < 0.9 for share in shares) == 2
    ),
    "The better rate of the short warm-up is the lowest that was tried, for both arms": lambda: all(
        min(
            (r for r in COLLECTED["settings"] if r["arm"] == arm and r["changes"].get("optimizer.warmup_steps") == "5"),
            key=lambda r: r["numbers"]["loss/bits_per_byte"],
        )["learning_rate"]
        == 0.004
        for arm in ("diff", "transformer")
    ),
    "the last table of [Recall](#recall) answer nearly all questions at the better of two rates": lambda: all(
        max(r["numbers"]["exact_match/retrieval"] for r in COLLECTED["recall-easy"] if r["arm"] == arm) > 0.99
        for arm in ("transformer", "diff-no_norm", "diff_v2")
    ),
    "than 8 in `transformer`, or than 4 in `diff`, change the loss by about a hundredth or less": lambda: all(
        abs(best("settings", arm=arm, model__num_heads=count) - best("settings", arm=arm)) < 0.011
        for arm, count in (("transformer", "2"), ("transformer", "4"), ("diff", "1"), ("diff", "2"))
    ),
    "is the best of four initialisations for both architectures, at both rates and both warm-ups": fan_in_is_best,
    "`transformer` has the lower loss with all four initialisations": transformer_ahead_from_all_four,
    "Both intervals contain zero. They are wide compared with the differences of Table 6": lambda: all(
        max(abs(mean), 0.004 / 0.693 * 5) <= half
        for mean, half in (contrast(a, "diff") for a in ("diff-lambda_0.8", "diff-lambda_0.5"))
    ),
    "the largest values are not smaller in the differential model": lambda: all(
        contrast("diff", "transformer", f"outliers/{name}_top_1")[0] > 0 for name in ("logits", "hidden")
    ),
    "The largest shares are those of `transformer-8x256-norm`": lambda: (
        min(of_arm("recall", "transformer-8x256-norm", "attention/answer"))
        > max(
            r["numbers"]["attention/answer"]
            for r in COLLECTED["arms"]
            if r["task"] == "recall" and r["arm"] != "transformer-8x256-norm"
        )
    ),
    "for the largest hidden state. The second interval contains zero": lambda: (
        contains_zero(contrast("diff", "transformer", "outliers/hidden_top_1"))
        and not contains_zero(contrast("diff", "transformer", "outliers/logits_top_1"))
    ),
    "have no head norm, and have twice the rate of `diff` and `transformer`": lambda: (
        {rate_of("books", arm) for arm in ("transformer-8x256", "diff-no_norm", "diff_v2")}
        == {2 * rate_of("books", "diff")}
        == {2 * rate_of("books", "transformer")}
        and set(
            sorted(
                {r["arm"] for r in COLLECTED["arms"]},
                key=lambda arm: statistics.fmean(of_arm("books", arm, "outliers/hidden_top_1")),
            )[-3:]
        )
        == {"transformer-8x256", "diff-no_norm", "diff_v2"}
    ),
    "seven times the parameters, or both, `diff` still has a higher loss than `transformer`": lambda: (
        min(grown(*run) for run in ((SMALL, "diff", LATE), (LARGE, "diff", EARLY), (LARGE, "diff", LATE))) > 0
    ),
    "`diff_v2` has a lower loss than `transformer` in some rows and a higher one in others": lambda: (
        min(grown(SMALL, "diff_v2", LATE), grown(LARGE, "diff_v2", LATE)) > 0
        and max(contrast("diff_v2", "transformer")[0], grown(LARGE, "diff_v2", EARLY)) < 0
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_of_the_page_follow_from_the_runs(claim):
    assert claim in " ".join(PAGE.split())
    assert CLAIMS[claim]()


@pytest.mark.parametrize("arm", dict.fromkeys(r["arm"] for r in COLLECTED["arms"]))
@pytest.mark.parametrize("task", ["books", "recall"])
def test_every_arm_has_three_seeds_and_equal_parameters_and_tokens(task, arm):
    own, reference = (
        [r for r in COLLECTED["arms"] if (r["task"], r["arm"]) == (task, name)] for name in (arm, "transformer")
    )
    assert {r["seed"] for r in own} == {r["seed"] for r in reference} == {0, 1, 2}
    assert {r["tokens"] for r in own} == {r["tokens"] for r in reference}
    assert own[0]["parameters"] == pytest.approx(reference[0]["parameters"], rel=0.01)


@pytest.mark.parametrize("arm", dict.fromkeys(r["arm"] for r in COLLECTED["arms"]))
@pytest.mark.parametrize("task", ["books", "recall"])
def test_learning_rates_of_the_config_are_the_best_of_those_tried(task, arm):
    tried = [r for r in COLLECTED["rates"] if (r["task"], r["arm"]) == (task, arm)]
    best = min(tried, key=lambda r: r["numbers"]["loss/loss"])["learning_rate"]
    config = load_config(str(ROOT / "configs" / f"toy.py:{task}-{arm}"), {})
    [used] = {r["learning_rate"] for r in COLLECTED["arms"] if (r["task"], r["arm"]) == (task, arm)}
    assert len(tried) > 1
    assert best == used == config.optimizer.learning_rate
