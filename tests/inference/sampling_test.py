"""Candidates and samples, compared with distributions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from difftx.errors import UserError
from difftx.inference.sampling import GREEDY, Sampling, candidates, choose, derived_seed


def settings(temperature=1.0, top_k=None, top_p=None, repetition_penalty=None):
    return Sampling(repetition_penalty=repetition_penalty, temperature=temperature, top_k=top_k, top_p=top_p)


def oracle(logits_V, sampling, seen=()):
    """Return probabilities `[V]`, computed in float64 step by step."""
    z = np.asarray(logits_V, np.float64).copy()
    for token in seen if sampling.repetition_penalty else ():
        z[token] = z[token] / sampling.repetition_penalty if z[token] > 0 else z[token] * sampling.repetition_penalty
    z = z / sampling.temperature
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))[: sampling.top_k]
    p = np.exp(z[order] - z[order[0]])
    p /= p.sum()
    if sampling.top_p is not None:
        kept, total = [], 0.0
        for token, probability in zip(order, p, strict=True):
            kept.append(token)
            total += probability
            if total >= sampling.top_p:
                break
        order, p = kept, p[: len(kept)] / p[: len(kept)].sum()
    full = np.zeros(len(z))
    full[order] = p
    return full


def distribution(logits_BV, sampling):
    """Return the probabilities `[B, V]` of the candidates."""
    logits_BN, token_BN = map(np.asarray, candidates(jnp.asarray(logits_BV), sampling))
    p_BN = np.asarray(jax.nn.softmax(logits_BN, axis=-1))
    full = np.zeros(np.shape(logits_BV))
    np.put_along_axis(full, token_BN, p_BN, axis=1)
    return full


CASES = [
    settings(0.3),
    settings(0.7, top_p=0.81),
    settings(1.3, top_k=20, top_p=0.6),
    settings(top_k=1000),
    settings(top_p=1e-6),
]


def test_top_p_of_one_keeps_every_token_and_sorts_nothing():
    rng = np.random.default_rng(0)
    # In float32, the sum of the probabilities exceeds 1 before the last token.
    logits_BV = rng.normal(size=(4, 50_000)).astype(np.float32)
    p_BV = np.exp(logits_BV.astype(np.float64))
    p_BV /= p_BV.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(distribution(logits_BV, settings(top_p=1.0)), p_BV, rtol=2e-5)
    text = jax.make_jaxpr(lambda x: candidates(x, settings(top_p=1.0)))(logits_BV).pretty_print()
    assert "top_k" not in text
    assert "sort" not in text


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_candidates_equal_the_oracle(sampling):
    logits_BV = np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32) * 3
    logits_BV[0] = 0.0  # Equal logits: the lower ids are kept.
    logits_BV[1, 10:] = -np.inf  # Excluded tokens.
    expected = np.stack([oracle(row, sampling) for row in logits_BV])
    np.testing.assert_allclose(distribution(logits_BV, sampling), expected, atol=2e-6)


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(settings(0.9), marks=pytest.mark.long), settings(1.2, top_k=4, top_p=0.85, repetition_penalty=1.7)],
    ids=str,
)
def test_draws_have_the_oracles_frequencies(sampling):
    rows = 20_000
    logits_V = np.random.default_rng(1).normal(size=8).astype(np.float32) * 2
    seen_V = np.arange(8) % 3 == 0
    same = {"logits_BV": np.tile(logits_V, (rows, 1)), "seen_BV": np.tile(seen_V, (rows, 1))}
    seed_B = np.arange(rows, dtype=np.uint32)
    tokens = np.asarray(jax.jit(choose)(sampling=sampling, seed_B=seed_B, count_B=seed_B.astype(np.int32) % 5, **same))
    expected = oracle(logits_V, sampling, np.nonzero(seen_V)[0])
    frequency = np.bincount(tokens, minlength=8) / rows
    deviation = np.sqrt(expected * (1 - expected) / rows)
    assert (np.abs(frequency - expected) <= 5 * deviation).all()


def test_greedy_is_the_most_likely_and_ignores_the_seed():
    logits_BV = jnp.asarray([[0.0, 3.0, 3.0, -1.0], [-2.0, -1.0, -3.0, -4.0]])
    for seed in (0, 1):
        seeds, counts = jnp.full(2, seed, jnp.uint32), jnp.zeros(2, jnp.int32)
        tokens = choose(logits_BV, GREEDY, seen_BV=jnp.zeros((2, 4), bool), seed_B=seeds, count_B=counts)
        assert tokens.tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-14, 1.2e-38, 5e-324])
def test_low_temperatures_choose_the_most_likely_token(temperature):
    """The temperature is an argument of the compiled program, as in generation, where devices flush small numbers."""
    logits_BV = jnp.asarray([[30.0, 70.0, 71.0, -jnp.inf], [-900.0, -901.0, -jnp.inf, -902.0]])
    seeds, counts = jnp.arange(2, dtype=jnp.uint32), jnp.zeros(2, jnp.int32)
    draw = jax.jit(lambda s: choose(logits_BV, s, seen_BV=jnp.zeros((2, 4), bool), seed_B=seeds, count_B=counts))
    assert draw(settings(temperature, top_k=3, top_p=0.9)).tolist() == [2, 0]


def test_no_two_seeds_and_indices_share_samples():
    seeds = {derived_seed(seed, index) for seed in (*range(100), 2**32 - 1) for index in range(50)}
    assert len(seeds) == 101 * 50
    assert max(seeds) < 2**32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1e39}, r"temperature=1e\+39 must be 0"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty=1e-39 must lie in"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
    ],
)
def test_bad_numbers_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        settings(**changes)
