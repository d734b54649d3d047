"""Attention to cached and new tokens against the last rows of the oracle over all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from difftx.kernels import cached, maps
from difftx.kernels.cached import EMPTY, SegmentMask
from kernels import oracle

TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2}  # As in diff_attention_test.py.


def split(x_BS, slots, new):
    """Put all but the last tokens into a cache with empty slots between and behind, as `[B, K, …, S, width]`."""
    old = np.moveaxis(np.asarray(x_BS[:, :-new], np.float64), 1, -2)
    full = np.full((*old.shape[:-2], slots, old.shape[-1]), 7.0)  # What is in an empty slot must not matter.
    full[..., 2 : 2 + old.shape[-2], :] = old
    return jnp.asarray(full, x_BS.dtype), x_BS[:, -new:]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("K", "new", "lam"), [(4, 1, "scalar"), (2, 1, "per token"), (2, 5, "per token"), (1, 3, "scalar")]
)
def test_equals_the_oracle(K, new, lam, dtype):
    B, S, H, D = 2, 14, 4, 8
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v = draw(B, S, H, 2, D), draw(B, S, K, 2, D), draw(B, S, K, 2 * D)
    lam_BSH = (
        rng.normal(size=(B, S, H)).astype(np.float32) if lam == "per token" else np.full((B, S, H), 0.4, np.float32)
    )
    segment_BS = np.array([[0] * 14, [0] * 6 + [1] * 8], np.int32)
    expected = oracle.diff_attention(q, k, v, lam_BSH, segment_BS)[:, -new:]

    (keys, k_new), (values, v_new) = split(k, 24, new), split(v, 24, new)
    slots_BS = np.full((B, 24), EMPTY, np.int32)
    slots_BS[:, 2 : 2 + S - new] = segment_BS[:, :-new]
    ids = SegmentMask(jnp.asarray(segment_BS[:, -new:]), jnp.zeros((B, new), jnp.int32), jnp.asarray(slots_BS))
    lam = jnp.asarray(lam_BSH[:, -new:]) if lam == "per token" else jnp.float32(0.4)
    attend = jax.jit(functools.partial(cached.mapped_attention, maps.difference))
    actual = attend(q[:, -new:], k_new, v_new, (keys, values), ids, per_query=lam)
    assert actual.dtype == dtype
    error = np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE[dtype]
