"""Attention weights of selected queries, compared with Eq. 1 of arXiv 2410.05258 and similar formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from difftx.kernels.rows import attention_rows
from difftx.kernels.weight_functions import difference
from kernels import oracle

B, T, H, K, d = 2, 23, 4, 2, 8
QUERIES = np.array([[0, 22, 9], [5, 4, 21]], np.int32)
NUMBER_SHAPES = {"difference": (B, T, H), "one lambda": (), "sink": (H,)}


@pytest.mark.parametrize(("segments", "window"), [(False, None), (True, None), (True, 5)])
@pytest.mark.parametrize("name", [*oracle.FUNCTIONS, "one lambda"])
def test_rows_equal_the_formula(name, segments, window):
    weight_function, groups, takes_number, row = oracle.FUNCTIONS["difference" if name == "one lambda" else name]
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(B, T, heads, groups, d)).astype(np.float32) for heads in (H, K))
    number = jnp.asarray(rng.random(NUMBER_SHAPES[name]), jnp.float32) if takes_number else None
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (B, T))), jnp.int32) if segments else None
    found = attention_rows(weight_function, q, k, QUERIES, weight_argument=number, segment_ids_BT=ids, window=window)

    def selected(row, number=None):
        weights_BTHS = oracle.attention_weights(row, q, k, number, ids, window)
        return np.take_along_axis(weights_BTHS, QUERIES[..., None, None], axis=1)

    assert found.weights_BCHS.shape == (B, 3, H, T)
    assert found.weights_BCHS.dtype == jnp.float32
    np.testing.assert_allclose(found.weights_BCHS, selected(row, number), rtol=0, atol=1e-6)
    is_seen_BCHS = selected(lambda *logits: 1) > 0
    for g in range(groups):
        logits_BCHS = np.where(is_seen_BCHS, selected(lambda *logits, g=g: logits[g]), -np.inf)
        np.testing.assert_allclose(found.logits_BCHGS[:, :, :, g], logits_BCHS, atol=1e-5)
    assert (found.lam_BCH is None) == (weight_function is not difference)
    if weight_function is difference:
        lam_BTH = np.broadcast_to(number, (B, T, H))
        np.testing.assert_allclose(found.lam_BCH, np.take_along_axis(lam_BTH, QUERIES[..., None], axis=1), atol=1e-7)


def test_memory_is_not_quadratic():
    """With 4,096 tokens, no array of the program has 4,096² elements. Memory is linear in the selected queries."""
    q, k = (jax.ShapeDtypeStruct((1, 4096, heads, 2, d), jnp.bfloat16) for heads in (H, K))
    queries = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    call = jax.jit(functools.partial(attention_rows, difference))
    lam = jax.ShapeDtypeStruct((), jnp.float32)
    memory = call.lower(q, k, queries, weight_argument=lam).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 4096 * 4096
