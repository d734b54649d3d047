"""The verdict's sentences, with numbers recomputed from the stored results by scipy."""

import math
import re

import numpy as np
import pytest
import scipy  # It imports scipy.stats at the first use, which takes a second.
from helpers.report_runs import tiny, write_result, write_run

from difftx.report.runs import read_runs
from difftx.report.verdict import verdict

BLOCKS, TOKENS = 20, 64


def blocks_of(losses, targets="a"):
    """Return the details of suite `loss` whose blocks of `TOKENS` tokens have these mean losses."""
    blocks = {"nats": [float(loss) * TOKENS for loss in losses], "tokens": [TOKENS] * len(losses)}
    return {"sets": {"valid": {"loss": float(np.mean(losses)), "blocks": {**blocks, "targets_sha256": targets}}}}


def make(folder, losses, *, architecture="diff", targets="a", steps=6, **changes):
    """Write a run whose last validation has these losses by block."""
    folder = write_run(folder, tiny(architecture, train__steps=steps, **changes))
    numbers = {"loss": float(np.mean(losses)), "bits_per_byte": float(np.mean(losses)) / 2}
    write_result(folder, "loss", steps, numbers, details=blocks_of(losses, targets))
    return folder


def judged(workdirs, metric="loss"):
    return verdict(read_runs(workdirs), metric)


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-\d+)?", text.replace("−", "-"))]


def test_one_run_each_is_paired_over_the_text(tmp_path):
    rng = np.random.default_rng(0)
    diff = rng.normal(2.5, 0.4, BLOCKS)  # The blocks differ more than the models, so only pairing shows the difference.
    plain = diff - rng.normal(0.1, 0.05, BLOCKS)
    runs = {
        "plain": (make(tmp_path / "plain", plain, architecture="transformer"), plain),
        "diff": (make(tmp_path / "diff", diff), diff),
    }
    for (first, (baseline, before)), (second, (other, after)) in (tuple(runs.items()), tuple(runs.items())[::-1]):
        found = judged([baseline, other])
        low, high = (float(f"{np.mean(losses):.4g}") for losses in (plain, diff))
        assert found.headline == (
            f"plain is better than diff: their validation losses on stdlib are {low} and {high} nats per token "
            "(one run each; lower is better)."
        )
        assert found.details[0].startswith(f"In nats per token, {second} − {first} = ")
        value, percent, _, low, high, blocks = numbers(found.details[0])
        gap = np.mean(after) - np.mean(before)
        assert (value, percent) == (float(f"{gap:.3g}"), float(f"{100 * gap / np.mean(before):.2f}"))
        expected = scipy.stats.ttest_rel(after, before).confidence_interval(0.95)
        assert (low, high) == (pytest.approx(expected.low, rel=1e-2), pytest.approx(expected.high, rel=1e-2))
        assert blocks == BLOCKS
        assert found.differences.keys() == {second}
        assert found.differences[second].rpartition(", ")[2] in found.details[0]
        assert "one run each cannot tell what another seed would do" in found.details[0]
        # The sizes, the training and the widths of heads are equal, and the head norm is a part of the architecture.
        assert found.details[1:] == []


def test_unequal_models_are_named(tmp_path):
    changes = {"model__num_heads": 2, "model__head_norm": "none", "model__mlp_dim": 400}
    runs = [
        make(tmp_path / "a", [2.0] * BLOCKS, model__head_norm="none"),
        make(tmp_path / "b", [2.1] * BLOCKS, architecture="transformer", **changes),
    ]
    # 4 layers with 3 * 128 more weights for each of 60 more units, less 4 λ vectors of 32 numbers per layer.
    counts = f"a 819,840 and b {819_840 + 4 * (60 * 3 * 128 - 128):,}"
    assert judged(runs).details[1:] == [
        f"The comparison is unequal in parameters: {counts}.",
        "The comparison is unequal in the width of heads: a 32 and b 64.",
    ]
    norms = [make(tmp_path / norm, [2.0] * BLOCKS, model__head_norm=norm) for norm in ("none", "rms")]
    assert judged(norms).details[1:] == ["The comparison is unequal in the head norm: none none and rms rms."]


def test_an_interval_around_zero_is_no_difference(tmp_path):
    rng = np.random.default_rng(1)
    first = rng.normal(2.5, 0.4, BLOCKS)
    second = first + rng.normal(0, 0.1, BLOCKS)
    found = judged([make(tmp_path / "a", first), make(tmp_path / "b", second, architecture="transformer")])
    low, high = scipy.stats.ttest_rel(second, first).confidence_interval(0.95)
    assert low < 0 < high
    assert re.match("(a and b|b and a) cannot be told apart: their validation losses on stdlib are ", found.headline)
    assert numbers(found.details[0])[3:5] == pytest.approx([low, high], rel=1e-2)


def test_interval_over_seeds_replaces_interval_over_text(tmp_path):
    losses = {"transformer": [2.2, 2.3, 2.28], "diff": [2.0, 2.1, 2.05]}
    runs = [
        make(tmp_path / f"{name}-{seed}", [loss] * BLOCKS, architecture=name, train__seed=seed, data__seed=seed)
        for name, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    found = judged(runs)
    means = {name: np.mean(of_seeds) for name, of_seeds in losses.items()}
    assert found.headline == (
        f"diff is better than transformer: their validation losses on stdlib are {means['diff']:.3f} and "
        f"{means['transformer']:.3f} nats per token (means over 3 runs each; lower is better)."
    )
    assert [arm.title for arm in found.arms] == ["transformer, mean of 3 runs", "diff, mean of 3 runs"]
    assert numbers(found.details[0])[0] == pytest.approx(means["diff"] - means["transformer"], rel=1e-3)
    student = scipy.stats.ttest_rel(losses["diff"], losses["transformer"]).confidence_interval(0.95)
    assert numbers(found.details[0])[3:] == pytest.approx([student.low, student.high, 3], rel=1e-2)
    # The order of the runs does not matter, because equal seeds form pairs. Different seeds form none.
    assert judged([*runs[:3], *runs[:2:-1]]).details == found.details
    other = make(tmp_path / "other", [2.05] * BLOCKS, train__seed=7, data__seed=7)
    welch = scipy.stats.ttest_ind(losses["diff"], losses["transformer"], equal_var=False).confidence_interval(0.95)
    unpaired = judged([*runs[:5], other]).details[0]
    assert numbers(unpaired)[3:] == pytest.approx([welch.low, welch.high, 3, 3], rel=1e-2)
    assert "which are not pairs" in unpaired
    # Two seeds of one arm and one of the other, or one seed twice, give no interval.
    headline = judged(runs[:4]).headline
    assert "at least two different seeds of each" in headline
    assert "means over 1 and 3 runs" in headline
    again = make(tmp_path / "again", [2.06] * BLOCKS)
    assert "at least two different seeds" in judged([*runs[:2], runs[3], again]).headline


def test_verdict_states_what_cannot_be_compared(tmp_path):
    a = make(tmp_path / "a", [2.0] * BLOCKS)
    b = make(tmp_path / "b", [2.1] * BLOCKS, architecture="transformer")
    other = make(tmp_path / "other", [2.1] * BLOCKS, architecture="transformer", targets="b")
    assert judged([a, other]).headline == "No verdict: a and other were validated on different text."
    foreign = make(tmp_path / "foreign", [2.1] * BLOCKS, architecture="transformer", targets="b")
    manifest = (foreign / "manifest.json").read_text()
    (foreign / "manifest.json").write_text(manifest.replace("a" * 64, "b" * 64))
    found = judged([a, foreign], "bits_per_byte")
    assert found.headline == "No verdict: a and foreign have different tokenizers."
    assert found.details[0].startswith("Their targets do not show whether the text is the same.")
    old = write_run(tmp_path / "old", tiny("transformer", train__steps=6), loss=lambda step: 1.0)
    assert judged([a, old]).headline.endswith("but one run each cannot tell whether that is chance.")
    none = write_run(tmp_path / "none", tiny("transformer", train__steps=2))
    assert judged([a, none]).headline == "No verdict: there is no finite validation loss of none."
    short = make(tmp_path / "short", [2.1] * BLOCKS, architecture="transformer", steps=3)
    (limit,) = judged([a, short]).details[1:]
    assert re.fullmatch(r"The comparison is unequal in training tokens: a [\d,]+ and short [\d,]+\.", limit)
    metrics = (b / "metrics.jsonl").read_text().splitlines(keepends=True)
    (b / "metrics.jsonl").write_text("".join(line for line in metrics if '"step": 6' not in line))
    assert "b is not finished: step 5 of 6." in judged([a, b]).details


def test_a_validation_before_the_last_step_is_named(tmp_path):
    """The evaluation after the last step of b has failed, so its last validation is that of step 3."""
    a = write_run(tmp_path / "a", tiny("transformer", train__steps=6))
    b = write_run(tmp_path / "b", tiny("diff", train__steps=6))
    rows = (b / "metrics.jsonl").read_text().splitlines(keepends=True)
    (b / "metrics.jsonl").write_text("".join(row for row in rows if '"valid", "step": 6' not in row))
    missing = "b has trained to step 6, but its last validation is that of step 3 (run difftx eval --suite=loss)."
    assert missing in judged([a, b]).details
    write_result(b, "loss", 6, {"loss": 1.1, "bits_per_byte": 0.5})
    assert not any("last validation" in detail for detail in judged([a, b]).details)


@pytest.mark.parametrize("metric", ["loss", "bits_per_byte"])
def test_a_run_that_diverged_after_a_validation_has_no_verdict(tmp_path, metric):
    """Validation 3 has the lower loss 1, and those of the steps 6, 9 and 12 are not finite."""
    a = write_run(tmp_path / "a", tiny("transformer", train__steps=12))
    loss = {step: 1.0 if step < 4 else math.nan for step in range(13)}.get
    b = write_run(tmp_path / "b", tiny("diff", train__steps=12), loss=loss)
    none = write_run(tmp_path / "none", tiny("gda", train__steps=2))
    unit = "" if metric == "loss" else " in bits per byte"
    found = judged([a, b], metric)
    assert found.headline == f"No verdict: there is no finite validation loss{unit} of b."
    assert found.details == ["b: the loss of its last validation, at step 12, is not finite."]
    assert [arm.mean(metric) is None for arm in found.arms] == [False, True]
    found = judged([a, b, none], metric)
    assert found.headline == f"No verdict: there is no finite validation loss{unit} of b and none."
    assert found.details[1:] == ["Run difftx eval --suite=loss on none."]
    # A finite result of a later step counts, and a null of the same step has precedence over the row of the training.
    write_result(b, "loss", 15, {"loss": 2.0, "bits_per_byte": 0.5})
    assert judged([a, b], metric).headline.startswith("a has a lower ")
    write_result(a, "loss", 12, {"loss": math.nan, "bits_per_byte": math.nan})
    assert judged([a, b], metric).details == ["a: the loss of its last validation, at step 12, is not finite."]


def test_seeds_of_other_data_are_not_averaged(tmp_path):
    """Runs of equal configs are one arm, unless the data at the path changed between them."""
    for i, text in enumerate("xxyx"):
        folder = write_run(tmp_path / f"seed{i}", tiny("diff", train__steps=6, train__seed=i), text=text)
        write_result(folder, "loss", 6, {"loss": 2.0 + i})
    arms = judged([tmp_path / f"seed{i}" for i in range(4)]).arms
    assert [[run.name for run in arm.runs] for arm in arms] == [["seed0", "seed1", "seed3"], ["seed2"]]


def test_runs_that_began_with_other_weights_are_not_averaged(tmp_path):
    """Seeds may continue from a run each. Runs of the same seed from two runs are two models."""

    def run(name, seed, **changes):
        return make(tmp_path / name, [2.0 + seed / 10] * BLOCKS, train__seed=seed, **changes)

    scratch = [run(f"scratch{seed}", seed) for seed in (0, 1)]
    for field in ("checkpoint__init_from", "checkpoint__branch_from"):
        continued = [run(f"{field}{seed}", seed, **{field: f"before{seed}"}) for seed in (0, 1)]
        other = run(f"{field}-other", 0, **{field: "other"})
        arms = judged([*scratch, *continued, other]).arms
        assert [[record.workdir for record in arm.runs] for arm in arms] == [scratch, continued, [other]]
    found = judged([scratch[0], tmp_path / "checkpoint__init_from1"])
    assert found.headline.startswith("scratch0 is better than checkpoint__init_from1: ")
    weights = "scratch0 new ones and checkpoint__init_from1 those of another run"
    assert found.details[1:] == [f"The comparison is unequal in the initial weights: {weights}."]


def test_seeds_on_other_machines_are_one_arm(tmp_path):
    """Fields that only change rounding or speed, such as those of a smaller device, do not split an arm."""
    machines = [
        {"train__accumulation": 2, "model__remat": "full", "model__attention_implementation": "xla"},
        {"data__prefetch_batches": 8, "data__cache_mib": 64, "train__compilation_cache": "none"},
        {"train__kernel_choice": "fixed", "data__verify": "true"},
    ]
    runs = [
        make(tmp_path / f"{name}-{seed}", [loss + seed / 10] * BLOCKS, architecture=name, train__seed=seed, **machine)
        for name, loss in (("transformer", 2.2), ("diff", 2.0))
        for seed, machine in enumerate(machines)
    ]
    found = judged(runs)
    assert [arm.title for arm in found.arms] == ["transformer, mean of 3 runs", "diff, mean of 3 runs"]
    assert "over 3 pairs of runs with equal seeds" in found.details[0]
    other = make(tmp_path / "other", [2.0] * BLOCKS, train__seed=3, optimizer__weight_decay=0.3)
    assert [len(arm.runs) for arm in judged([*runs[3:], other]).arms] == [3, 1]


def test_one_run_and_many(tmp_path):
    a = make(tmp_path / "a", [2.0] * BLOCKS)
    found = judged([a])
    assert found.headline == "a reaches a validation loss of 2 nats per token on stdlib."
    assert found.details == ["There is no other model to compare it with."]
    others = [
        make(tmp_path / name, [loss] * BLOCKS, architecture=name) for name, loss in (("gda", 1.5), ("diff_v2", 3))
    ]
    found = judged([a, *others])
    assert found.headline == (
        "Of 3 models, gda has the lowest validation loss on stdlib, and the 95 % interval of its difference from each "
        "other model excludes 0."
    )
    assert found.details[:2] == [
        "The table has the difference of each model from a.",
        "gda and diff_v2: the 95 % interval is paired over 20 blocks of the same validation text. It shows what the "
        "choice of text changes; one run each cannot tell what another seed would do.",
    ]
    assert found.differences == {"gda": "−0.500 (−25.00%), −0.500 to −0.500", "diff_v2": "+1 (+50.00%), +1 to +1"}
    near = make(tmp_path / "near", np.random.default_rng(0).normal(1.6, 0.4, BLOCKS), architecture="gated")
    old = write_run(tmp_path / "old", tiny("sink", train__steps=6), loss=lambda step: 9.0)
    found = judged([a, *others, near, old])
    assert found.headline.startswith("Of 5 models, gda has the lowest")
    assert found.headline.endswith(", but it cannot be told apart from near and old.")
    assert "old: there is no interval: one run each cannot tell whether that is chance." in found.details
