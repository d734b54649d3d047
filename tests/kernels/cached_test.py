"""Attention of new tokens to cached and new tokens, compared with the last rows of the oracle over all tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import marked
from helpers.kernels_checks import TOLERANCE, relative_error, split, split_segments

from difftx.kernels import cached, weight_functions
from kernels import oracle


@pytest.mark.parametrize("dtype", marked(TOLERANCE, fast=["float32"]))
@pytest.mark.parametrize(
    ("K", "new", "lam", "window"),
    [
        (4, 1, "scalar", None),
        (2, 1, "per token", None),
        (2, 5, "per token", None),
        (1, 3, "scalar", None),
        (2, 1, "scalar", 3),  # The window covers one new and two cached tokens.
        (2, 5, "per token", 3),
        (1, 3, "scalar", 1),
    ],
)
def test_cached_attention_equals_the_oracle(K, new, lam, window, dtype):
    B, S, H, d = 2, 14, 4, 8
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v = draw(B, S, H, 2, d), draw(B, S, K, 2, d), draw(B, S, K, 2 * d)
    lam_BSH = (
        rng.normal(size=(B, S, H)).astype(np.float32) if lam == "per token" else np.full((B, S, H), 0.4, np.float32)
    )
    segment_BS = np.array([[0] * 14, [0] * 6 + [1] * 8], np.int32)
    expected = oracle.diff_attention(q, k, v, lam_BSH, segment_BS, window)[:, -new:]

    (keys, k_new), (values, v_new) = split(k, 24, new), split(v, 24, new)
    ids = split_segments(segment_BS, 24, new)
    lam = jnp.asarray(lam_BSH[:, -new:]) if lam == "per token" else jnp.float32(0.4)
    attend = jax.jit(functools.partial(cached.weighted_attention, weight_functions.difference, window=window))
    actual, _ = attend(q[:, -new:], k_new, v_new, (keys, values), ids, weight_argument=lam)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < TOLERANCE[dtype]
