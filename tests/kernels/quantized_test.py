"""Quantised attention logits, compared with the nearest level of a search over all levels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels_checks import relative_error, split, split_segments

from difftx import kernels
from difftx.kernels import cached, weight_functions, xla
from difftx.kernels.weight_functions import difference
from kernels.oracle import softmax_row

BITS = (2, 4, 6, 8)


def nearest_level(logits, largest, bits):
    """Return the nearest of 2^bits - 1 equally spaced numbers from -largest to largest."""
    levels = np.linspace(-largest, largest, 2**bits - 1)
    return levels[np.argmin(np.abs(logits[..., None] - levels), axis=-1)]


def rounded(logits, bits, granularity):
    """Return the logits that the weight function receives. `logits` has one float32 array [B, H, C, S] per group."""
    quantized = functools.partial(
        weight_functions.quantized, weight_function=lambda *x: x, groups=len(logits), bits=bits, granularity=granularity
    )
    return [np.asarray(x) for x in quantized(*logits)]


def some_logits(hidden):
    rng = np.random.default_rng(0)
    logits = [np.float32(rng.normal(size=(2, 3, 5, 7)) * np.exp(rng.normal(size=(2, 3, 5, 1)))) for _ in range(2)]
    seen = rng.random((2, 1, 5, 7)) < 0.7
    seen[0, :, 0] = False  # A filler query has no visible keys.
    logits[1][1, 2, 3] = 0
    return [np.where(seen, x, np.float32(hidden)) for x in logits], np.broadcast_to(seen, logits[0].shape)


@pytest.mark.parametrize("hidden", [-np.inf, xla.MASKED])
@pytest.mark.parametrize("granularity", ["query", "token"])
def test_each_logit_becomes_its_nearest_level(granularity, hidden):
    logits, seen = some_logits(hidden)
    size = [np.where(seen, np.abs(x), 0) for x in logits]
    axes = -1 if granularity == "query" else (1, 3)
    largest = [np.max(x, axis=axes, keepdims=True) for x in size]
    if granularity == "token":
        largest = [np.maximum(*largest)] * 2
    for bits in BITS:
        for x, m, actual in zip(logits, largest, rounded(logits, bits, granularity), strict=True):
            m = np.broadcast_to(m, x.shape)
            np.testing.assert_array_equal(actual[~seen], x[~seen])
            for place in np.argwhere(seen):
                i = tuple(place)
                expected = nearest_level(np.float64(x[i]), np.float64(m[i]), bits) if m[i] else 0.0
                assert actual[i] == pytest.approx(expected, rel=1e-5, abs=1e-5 * float(m[i]))


@pytest.mark.parametrize("bits", [4, 16])
def test_the_error_is_within_half_a_step(bits):
    """Errors are at most 1/14 of the largest logit with 4 bits. With 16 bits, they are 1/65534, almost a no-op."""
    x = np.float32(np.random.default_rng(1).normal(size=(1, 1, 64, 4096)))
    (actual,) = rounded([x], bits, "query")
    largest = np.abs(x).max(axis=-1, keepdims=True)
    bound = {4: 1 / 14, 16: 1 / 65534}[bits] * largest
    assert (np.abs(actual.astype(np.float64) - x) <= bound * 1.01).all()  # float32 itself has 24 bits.
    assert np.abs(actual - x).max() > 0.9 * bound.min()
    assert max(len(np.unique(row)) for row in actual[0, 0]) <= 2**bits - 1
    np.testing.assert_allclose(np.abs(actual).max(axis=-1, keepdims=True), largest, rtol=1e-6)


def test_the_gradient_is_taken_at_the_rounded_logits():
    logits, _ = some_logits(-np.inf)
    logits = [x[1] for x in logits]
    number = np.full((3, 5, 1), 0.7, np.float32)
    quantized = functools.partial(
        weight_functions.quantized, weight_function=difference, groups=2, bits=4, granularity="query"
    )
    out, pullback = jax.vjp(jax.jit(quantized), *logits, number)
    at = rounded([x[None] for x in logits], 4, "query")
    expected, expected_pullback = jax.vjp(jax.jit(difference), *(jnp.asarray(x[0]) for x in at), number)
    weights = np.random.default_rng(2).normal(size=out.shape).astype(np.float32)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    for a, e in zip(pullback(weights), expected_pullback(weights), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-6)
        assert np.abs(a).max() > 0.01


def by_hand(q, k, v, lam, ids, window, bits, granularity):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, H, _, d = q.shape
    out = np.zeros((B, T, H, v.shape[3]))
    for b, t in np.ndindex(B, T):
        keys = [s for s in range(t + 1) if ids[b, s] == ids[b, t] and (window is None or t - s < window)]
        rows = [[k[b, keys, n * k.shape[2] // H, g] @ q[b, t, n, g] / np.sqrt(d) for g in range(2)] for n in range(H)]
        for n, row in enumerate(rows):
            largest = [np.abs(z).max() if granularity == "query" else np.abs(rows).max() for z in row]
            weights1, weights2 = (softmax_row(nearest_level(z, m, bits)) for z, m in zip(row, largest, strict=True))
            out[b, t, n] = (weights1 - lam * weights2) @ v[b, keys, n * k.shape[2] // H]
    return out


@pytest.mark.parametrize("granularity", [pytest.param("query", marks=pytest.mark.long), "token"])
def test_chunked_and_cached_attention_equal_brute_force(granularity, monkeypatch):
    B, T, H, K, d, new = 2, 14, 4, 2, 8, 5
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((B, T, H, 2, d), (B, T, K, 2, d), (B, T, K, 2 * d))
    )
    segment_BT, lam = np.array([[0] * 14, [0] * 6 + [1] * 8], np.int32), jnp.float32(0.7)
    quantized = functools.partial(
        weight_functions.quantized, weight_function=difference, groups=2, bits=4, granularity=granularity
    )
    monkeypatch.setattr(xla, "CHUNK_WEIGHTS", 60)
    windows, backends = (None, 9), ("xla", "reference")

    @jax.jit
    def of_each(q, k, v):
        options = {"weight_argument": lam, "segment_ids_BT": jnp.asarray(segment_BT)}
        calls = [{"window": window, "implementation": backend} for window in windows for backend in backends]
        return [kernels.weighted_attention(quantized, q, k, v, **options, **call) for call in calls]

    actual = of_each(q, k, v)
    for window, pair in zip(windows, (actual[:2], actual[2:]), strict=True):
        expected = by_hand(q, k, v, 0.7, segment_BT, window, 4, granularity)
        for out in pair:
            assert relative_error(out, expected) < 2e-6

    (keys, k_new), (values, v_new) = split(k, 24, new), split(v, 24, new)
    ids = split_segments(segment_BT, 24, new)
    for window in windows:
        attend = jax.jit(functools.partial(cached.weighted_attention, quantized, window=window))
        actual, _ = attend(q[:, -new:], k_new, v_new, (keys, values), ids, weight_argument=lam)
        expected = by_hand(q, k, v, 0.7, segment_BT, window, 4, granularity)[:, -new:]
        assert relative_error(actual, expected) < 2e-6
