"""Scores of continuations, compared with float64 scores from a full pass over each item alone."""

import jax
import numpy as np
import pytest
from helpers.inference_models import CONTEXT, full_logits, language_model
from helpers.model_layers import MUP, OPTIONS

from difftx.config.model import CacheConfig
from difftx.inference import score
from difftx.inference.decode import model_of, padded
from difftx.inference.score import Item, Prompt, loglikelihoods, most_likely


def brute_force(lm, mesh, items):
    """Return each item's log-likelihood, whether it is greedy, and the greedy tokens, from logits of whole rows."""
    rows = [[*item.context, *item.between, *item.continuation] for item in items]
    logits_BTV = full_logits(lm, mesh, padded(rows, mesh, CacheConfig())[0])[: len(items)].astype(np.float64)
    expected = []
    for item, logits_TV in zip(items, logits_BTV, strict=True):
        logits_NV = logits_TV[len(item.context) + len(item.between) - 1 :][: len(item.continuation)]
        log_p = logits_NV - np.log(np.sum(np.exp(logits_NV), axis=1, keepdims=True))
        rows = np.arange(len(item.continuation))
        best = np.argmax(logits_NV, axis=1)
        expected.append((log_p[rows, item.continuation].sum(), (best == item.continuation).all(), best))
    return expected


def some_items(rng):
    """Return items whose contexts have one or several continuations, of one or many tokens, in mixed order."""

    def draw(n):
        return tuple(rng.integers(0, 256, n).tolist())

    many, one, short = draw(40), draw(33), draw(1)
    items = [Item(many, draw(n)) for n in (1, 5, 3, 9, 4, 70)]
    items += [Item(one, draw(20)), Item(short, draw(7)), Item(short, draw(2)), Item(draw(1), draw(100))]
    items += [Item(many, draw(3), draw(n)) for n in (5, 5, 30)] + [Item(draw(9), draw(4), draw(6))]
    return items


@pytest.mark.parametrize(
    ("architecture", "sizes", "rows", "branch_tokens", "options"),
    [
        pytest.param("diff", {}, 2, 12, {}, marks=pytest.mark.long),
        pytest.param("diff", {}, 4, 256, OPTIONS | {"model__logit_soft_cap": 0.1}, marks=pytest.mark.long),
        pytest.param("transformer", CONTEXT, 4, 256, {}, marks=pytest.mark.long),
    ],
)
def test_scores_equal_brute_force(config, mesh_of, monkeypatch, architecture, sizes, rows, branch_tokens, options):
    monkeypatch.setattr(score, "BRANCH_TOKENS", branch_tokens)  # 12 requires several passes, 256 one.
    lm = language_model(config, mesh_of(**sizes), architecture, model__num_heads=4, **options)
    items = some_items(np.random.default_rng(0))
    # Add an item whose continuation is the greedy one.
    best = brute_force(lm, mesh_of(), items[:1])[0][2]
    items.append(Item(items[0].context, tuple(best.tolist())))
    actual = loglikelihoods(lm, items, batch_rows=rows)
    for mine, (expected, is_greedy, _) in zip(actual, brute_force(lm, mesh_of(), items), strict=True):
        assert mine.loglikelihood == pytest.approx(expected, abs=2e-4)
        assert mine.is_greedy == is_greedy
    assert actual[-1].is_greedy
    assert not all(s.is_greedy for s in actual)


def test_few_short_items(config, mesh_of):
    """Contexts of one token need nothing in the cache."""
    lm = language_model(config, mesh_of())
    items = [Item((256,), (1, 2, 3)), Item((256,), (4,)), Item((7,), (4, 4)), Item((7,), (5,))]
    items += [Item((1, 2, 3, 4), (5, 6)), Item((1, 2, 3, 4), (7,), (8, 9))]
    expected = [score for score, _, _ in brute_force(lm, mesh_of(), items)]
    assert [s.loglikelihood for s in loglikelihoods(lm, items, batch_rows=4)] == pytest.approx(expected, abs=2e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "cache", [{}, {"model__cache__tokens": 64, "model__cache__chunk_tokens": 1}], ids=["whole", "kept"]
)
def test_the_context_axis_need_not_divide_a_chunk(config, mesh_of, cache):
    """A chunk of 32 tokens, or of one token, on three devices along `context`."""
    lm = language_model(config, mesh_of(context=3), mesh__context_method="gather", data__sequence_length=32, **cache)
    items = [Item((1, 2, 3), (4, 5)), Item((6, 7), (8, 9)), Item((6, 7), (5,))]
    expected = [score for score, _, _ in brute_force(lm, mesh_of(), items)]
    assert [s.loglikelihood for s in loglikelihoods(lm, items, batch_rows=4)] == pytest.approx(expected, abs=2e-4)


@pytest.mark.long
def test_the_most_likely_label_is_that_of_brute_force(config, mesh_of):
    lm = language_model(config, mesh_of())
    rng = np.random.default_rng(1)

    def draw(n):
        return tuple(rng.integers(0, 256, n).tolist())

    shared = draw(30)
    prompts = [Prompt(shared, draw(9)), Prompt(draw(7), ()), Prompt(shared, draw(25)), Prompt(shared, ())]
    # Labels share prefixes and have the same length, because shorter labels would be more likely.
    labels = [(int(a), int(b), 10) for a in rng.integers(0, 256, 5) for b in rng.integers(0, 256, 4)]
    items = [Item(p.context + p.question, label) for p in prompts for label in labels]
    expected = np.array([s[0] for s in brute_force(lm, mesh_of(), items)]).reshape(len(prompts), len(labels))
    chosen = most_likely(lm, prompts, labels, batch_rows=4)
    assert chosen == np.argmax(expected, axis=1).tolist()
    assert len(set(chosen)) > 1
    assert most_likely(lm, prompts, [labels[3], labels[3]], batch_rows=2) == [0] * 4


@pytest.mark.long
def test_bfloat16_does_not_round_the_factor_of_mup(config, mesh_of):
    """The factor, 1 / 3 here, is that of float32. Rounded to bfloat16, it would scale all logits alike."""
    fields = MUP | {"model__mup_base_width": 12, "model__d_model": 36, "model__compute_dtype": "bfloat16"}
    lm = language_model(config, mesh_of(), **fields)
    with jax.set_mesh(lm.mesh):
        model = model_of(lm.config, lm.weights)
        weight_VD = np.asarray(model.embedding_VD[...], np.float64)
        actual_VD = np.asarray(model.unembedding(), np.float64)
    np.testing.assert_allclose(actual_VD, weight_VD / 3, rtol=1e-6)
