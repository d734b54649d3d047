"""Question 1 on recall: norm, gain or subtraction?"""

import numpy as np
from conftest import ROOT

from difftx.config.recipes import load_config
from results_page.page import PROSE, claim, row_of, section, shown
from results_page.question_1 import NORM_OR_GAIN
from results_page.runs import COLLECTED, MORE_NOISE, NOISE, RECALL, best_of_tuning, solved
from results_page.significance import corrected, fisher, interval

SIGNED_OR_NOT = ("answer", "answer_signed", "noise_signed")
RECALL_SECTION = section("### Recall", "### Wide heads")


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


def test_contrasts_of_recall_are_fishers_test_with_holms_correction():
    expected = corrected({pair: fisher(*(solved(RECALL, arm) for arm in pair)) for pair in NORM_OR_GAIN})
    for pair in NORM_OR_GAIN:
        cells = row_of(*pair, RECALL_SECTION)
        counts = ["{} of {}".format(*solved(RECALL, arm)) for arm in pair]
        assert cells[2:5] == [*counts, f"{expected[pair]:.3f}"]
        assert (cells[5] == "open") == (expected[pair] >= 0.05)


@claim(
    "No contrast is decided. All four arms with the code of differential attention and a norm or a gain solve every "
    "run, with and without the second map"
)
def test_norm_or_gain_solves_recall():
    assert all_solved("diff", "diff-gain", "zero-norm", "zero-gain")
    few, all_runs = solved(RECALL, "diff-plain")
    assert few < all_runs
    plain = f"`diff-plain`, with neither, solves {few} of {all_runs}"
    assert PROSE.count(plain) == 2  # In the answer and in the section.
    assert fisher((few, all_runs), (6, 6)) > 0.05
    assert min(corrected({p: fisher(*(solved(RECALL, arm) for arm in p)) for p in NORM_OR_GAIN}).values()) > 0.05


@claim("For `transformer`, no rate solves the task on the tuned seed")
def test_no_rate_of_the_transformer_solves_recall():
    assert best_of_tuning(RECALL, "transformer", "recall") < 0.9


@claim("the seed that chose the rate of `transformer-gain` solves the task")
def test_tuned_seed_of_transformer_gain_solves_recall():
    assert on_tuned_seed("transformer-gain", 5e-3) >= 0.9
    assert solved(RECALL, "transformer-gain")[0] < 3


@claim("With 31 distractors and half the rate, `transformer-gain` and `transformer-wide-norm` solve all six runs")
def test_transformers_solve_31_distractors_at_half_the_rate():
    assert all(solved(NOISE, arm, "recall-31") == (6, 6) for arm in ("transformer-gain", "transformer-wide-norm"))


@claim("With 63 distractors it does not")
def test_subtraction_does_not_help_with_63_distractors():
    assert solved(MORE_NOISE, "diff", "recall-63") <= solved(MORE_NOISE, "zero-norm", "recall-63")


@claim("fewer positions make any two attention weights more alike, also those of `zero-norm`, whose A2 is not trained")
def test_cosine_of_unrelated_attention_weights():
    """Independent logits are more alike over the two positions of the answer than over 15 distractors.

    The same holds in `zero-norm` and, whatever the number of positions, for softmaxes that are less sharp.
    """
    generator = np.random.default_rng(0)

    def cosine(positions, deviation):
        a, b = np.exp(deviation * generator.standard_normal((2, 20_000, positions)))
        return np.mean(np.sum(a * b, -1) / np.sqrt(np.sum(a**2, -1) * np.sum(b**2, -1)))

    assert all(cosine(2, deviation) > cosine(15, deviation) + 0.2 for deviation in (1, 1.5, 2))
    assert all(cosine(positions, 1) > cosine(positions, 2) + 0.1 for positions in (2, 15))
    assert "the cosine of two attention weights falls if they only get sharper" in PROSE
    assert min(attention("zero-norm", "cosine_answer")) > max(attention("zero-norm", "cosine_noise"))
    recall = load_config("controls:recall-diff", {})
    assert (recall.data.synthetic.distractors, recall.data.sequence_length) == (15, 2 * 8 + 15 + 1)


@claim("the rotary base and the standard deviation of the embeddings (0.5). That search was not recorded")
def test_settings_of_recall():
    exploratory = " ".join((ROOT / "docs" / "exploratory.md").read_text().split())
    assert (
        "they were changed until `diff` or `transformer` learned the task. That search was not recorded" in exploratory
    )
    recall, books = (load_config(f"controls:{task}-diff", {}).model for task in ("recall", "novels"))
    assert recall.embedding_std == 0.5 != books.embedding_std
    assert recall.rope_theta != books.rope_theta


@claim("`diff` has less weight than `zero-norm` on the answer")
def test_weight_on_the_answer():
    assert max(attention("diff", "answer")) < min(attention("zero-norm", "answer"))


@claim("`diff` has less weight on both")
def test_signed_weight_on_answer_and_distractors():
    assert all(
        sum(interval([a - b for a, b in zip(attention("diff", name), attention("zero-norm", name), strict=True)])) < 0
        for name in ("answer_signed", "noise_signed")
    )


def test_ratio_of_signed_weights_on_answer_and_distractors():
    of_both = [
        [a / b for a, b in zip(attention(arm, "answer_signed"), attention(arm, "noise_signed"), strict=True)]
        for arm in ("diff", "zero-norm")
    ]
    differences = [own - other for own, other in zip(*of_both, strict=True)]
    assert f"does not have it, and is larger in `diff`: {shown(differences)}." in PROSE
    assert min(of_both[0]) > max(of_both[1])
    assert interval(differences)[0] > interval(differences)[1]


def of_shared_seeds(value):
    """Return the differences of `diff` and `transformer-wide-norm` in the four seeds that both solve."""
    by_seed = [
        {
            r["seed"]: value({name: r["numbers"][f"attention/{name}"] for name in SIGNED_OR_NOT})
            for r in COLLECTED[RECALL]
            if r["arm"] == arm and r["numbers"]["exact_match/retrieval"] >= 0.9
        }
        for arm in ("diff", "transformer-wide-norm")
    ]
    seeds = by_seed[0].keys() & by_seed[1].keys()
    assert len(seeds) == 4
    return [by_seed[0][seed] - by_seed[1][seed] for seed in sorted(seeds)]


@claim("in the four seeds that both solve, the interval of this difference contains zero")
def test_ratio_of_signed_weights_against_the_wide_transformer():
    mean, half = interval(of_shared_seeds(lambda of: of["answer_signed"] / of["noise_signed"]))
    assert abs(mean) < half


@claim(
    "the weight on the answer is smaller in `diff` by either count, than in `zero-norm` and than in "
    "`transformer-wide-norm`"
)
def test_weight_on_the_answer_by_either_count():
    for name in ("answer", "answer_signed"):
        assert sum(interval(of_shared_seeds(lambda of, name=name: of[name]))) < 0
        own, other = attention("diff", name), attention("zero-norm", name)
        assert sum(interval([a - b for a, b in zip(own, other, strict=True)])) < 0


@claim("As shares of |A1 − λ A2|, `diff` attends less to the answer than `zero-norm`, and more to distractors")
def test_shares_of_answer_and_distractors():
    for name, sign in (("answer", -1), ("noise", 1)):
        both = zip(attention("diff", name), attention("zero-norm", name), strict=True)
        mean, half = interval([sign * (own - other) for own, other in both])
        assert mean > half


@claim("The weights are less sparse")
def test_sparsity_of_the_weights():
    assert max(attention("diff", "gini")) < min(attention("zero-norm", "gini"))


@claim("these models have no sink, with or without a second map")
def test_no_attention_sink():
    assert all(
        share < 1 / 32 for arm in ("diff", "zero-norm", "transformer-wide-norm") for share in attention(arm, "first")
    )
