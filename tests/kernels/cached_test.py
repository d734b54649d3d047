"""Attention of new tokens to cached and new tokens, compared with the last rows of the oracle over all tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import marked
from helpers.kernels_checks import TOLERANCE, relative_error, split, split_segments

from difftx.kernels import cached
from kernels import oracle

# Name of the weight function, key/value heads, new tokens, whether its number is one per token, window.
CASES = [
    ("difference", 4, 1, False, None),
    ("difference", 2, 1, True, None),
    ("difference", 1, 3, False, None),
    ("difference", 2, 1, False, 3),  # The window covers one new and two cached tokens.
    ("difference", 1, 3, False, 1),
    *((name, 2, 5, True, window) for name in oracle.FUNCTIONS if name != "softmax" for window in (None, 3)),
]


@pytest.mark.parametrize("dtype", marked(TOLERANCE, fast=["float32"]))
@pytest.mark.parametrize(("name", "K", "new", "per_token", "window"), CASES)
def test_cached_attention_equals_the_oracle(name, K, new, per_token, window, dtype):
    B, S, H, d = 2, 14, 4, 8
    weight_function, G, takes_number, row = oracle.FUNCTIONS[name]
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    q, k, v = draw(B, S, H, G, d), draw(B, S, K, G, d), draw(B, S, K, 2 * d)
    number = np.float32(rng.normal(size=(B, S, H)) if per_token else 0.4) if takes_number else None
    segment_BS = np.array([[0] * 14, [0] * 6 + [1] * 8], np.int32)
    expected = oracle.attention(row, q, k, v, number, segment_BS, window)[:, -new:]

    (keys, k_new), (values, v_new) = split(k, 24, new), split(v, 24, new)
    ids = split_segments(segment_BS, 24, new)
    number = jnp.asarray(number[:, -new:] if per_token else number) if takes_number else None
    attend = jax.jit(functools.partial(cached.weighted_attention, weight_function, window=window))
    actual, _ = attend(q[:, -new:], k_new, v_new, (keys, values), ids, weight_argument=number)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < TOLERANCE[dtype]
