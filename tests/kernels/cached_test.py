"""Attention to cached and new tokens against the last rows of the oracle over all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels_checks import TOLERANCE, relative_error, split

from difftx.kernels import cached, maps
from difftx.kernels.cached import EMPTY, SegmentMask
from kernels import oracle


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
    assert relative_error(actual, expected) < TOLERANCE[dtype]
