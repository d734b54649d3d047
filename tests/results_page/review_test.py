"""The review's questions: explicit sparsity, a signed mask, and alignment in noise."""

from difftx.config.recipes import load_config
from results_page.page import PROSE, claim, row_of, section, shown, shows_p
from results_page.review import REVIEW_FAMILY, from_review
from results_page.runs import COLLECTED, best_of_tuning, solved, step_time
from results_page.significance import corrected, interval, two_sided


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
    assert "explicit top-k is better than `diff`, and marginally better than the Transformer. A signed mask" in PROSE
    assert "most of its runs fail" in PROSE
    assert solved("review-recall", "top_k", "recall-31")[0] < 3
    assert "solves every run" in PROSE
    assert solved("review-recall", "signed_mask", "recall-31") == (6, 6)
    keys = {task: load_config(f"controls:{task}-top_k", {}).model.own.k for task in ("novels", "recall-31")}
    assert keys == {"novels": 16, "recall-31": 6}


def test_the_preregistered_rule_of_alignment_fails():
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
    sharper = "the measure cannot tell: the cosine of two attention weights falls if they only get sharper"
    assert f"{sharper}. After the first tenth of training, it changes by {shown(own)}" in PROSE
    assert "All of these runs solve recall" in PROSE
    assert all(r["numbers"]["exact_match/retrieval"] >= 0.9 for r in runs)


def test_time_of_top_k():
    time = step_time("top_k")
    assert f"A training step of `top_k` takes {time} times as long as one of the Transformer" in PROSE
    assert f"A training step takes {time} times as long as one of the Transformer. On recall" in PROSE


@claim("No rate lets it solve the task on the tuned seed")
def test_no_rate_of_top_k_solves_31_distractors():
    assert best_of_tuning("review-recall", "top_k", "recall-31") < 0.9


@claim("no arm here halves the width of the Transformer's heads")
def test_no_arm_has_finer_heads():
    """All Transformers of the page have heads of at least the width of `transformer`."""
    widths = {
        arm: load_config(f"controls:novels-{arm}", {}).model.head_dim
        for arm in ("transformer", "transformer-gain", "transformer-wide-norm")
    }
    assert min(widths.values()) == widths["transformer"] == widths["transformer-wide-norm"] / 2
    by_heads = {
        heads: min(
            r["numbers"]["loss/bits_per_byte"]
            for r in COLLECTED["settings"]
            if r["arm"] == "transformer"
            and {n: v for n, v in r["changes"].items() if n != "optimizer.learning_rate"} == changes
        )
        for heads, changes in ((16, {"model.num_heads": "16"}), (8, {}))
    }
    difference = f"{by_heads[16] - by_heads[8]:+.3f}"
    assert f"heads of half the width change the loss by {difference} with one seed" in PROSE
