"""Attention weights of selected queries, compared with Eq. 1 of arXiv 2410.05258 and similar formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model.oracle import sink_row, top_k_row

from difftx.kernels import weight_functions
from difftx.kernels.rows import attention_rows
from difftx.kernels.weight_functions import difference
from kernels.oracle import softmax_row

B, T, H, K, d = 2, 23, 4, 2, 8
QUERIES = np.array([[0, 22, 9], [5, 4, 21]], np.int32)
# Name → (weight function, number of groups, shape of its number per query or None, formula of one row in numpy).
FUNCTIONS = {
    "softmax": (weight_functions.softmax, 1, None, softmax_row),
    "difference": (difference, 2, (B, T, H), lambda z1, z2, lam: softmax_row(z1) - lam * softmax_row(z2)),
    "one lambda": (difference, 2, (), lambda z1, z2, lam: softmax_row(z1) - lam * softmax_row(z2)),
    "sink": (weight_functions.softmax_with_sink, 1, (H,), sink_row),
    "top_k": (functools.partial(weight_functions.top_k_softmax, k=4), 1, None, lambda z: top_k_row(z, 4)),
    "signed": (weight_functions.signed_softmax, 2, None, lambda z1, z2: softmax_row(z1) * np.tanh(z2)),
}


def inputs(groups, extra, rng):
    q, k = (rng.normal(size=(B, T, heads, groups, d)).astype(np.float32) for heads in (H, K))
    number = None if extra is None else rng.random(extra).astype(np.float32)
    return q, k, number, np.sort(rng.integers(0, 3, (B, T))).astype(np.int32)


@pytest.mark.parametrize(("segments", "window"), [(False, None), (True, None), (True, 5)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_equal_the_formula(name, segments, window):
    weight_function, groups, extra, row = FUNCTIONS[name]
    q, k, number, ids = inputs(groups, extra, np.random.default_rng(0))
    if groups == 1:
        q, k = q[:, :, :, 0], k[:, :, :, 0]
    arrays = {"weight_argument": number, "segment_ids_BT": ids if segments else None}
    arrays = {n: None if x is None else jnp.asarray(x) for n, x in arrays.items()}
    found = attention_rows(weight_function, q, k, QUERIES, **arrays, window=window)
    q, k = (np.asarray(x, np.float64).reshape(B, T, -1, groups, d) for x in (q, k))
    numbers = None if number is None else np.broadcast_to(np.float64(number), (B, T, H))
    assert found.weights_BCHS.shape == (B, 3, H, T)
    assert found.weights_BCHS.dtype == jnp.float32
    for b, c, h in np.ndindex(B, 3, H):
        t = QUERIES[b, c]
        first = 0 if window is None else max(0, t - window + 1)
        keys = [s for s in range(first, t + 1) if not segments or ids[b, s] == ids[b, t]]
        logits = [k[b, keys, h // (H // K), g] @ q[b, t, h, g] / np.sqrt(d) for g in range(groups)]
        expected = np.zeros(T)
        expected[keys] = row(*logits, *([] if numbers is None else [numbers[b, t, h]]))
        np.testing.assert_allclose(found.weights_BCHS[b, c, h], expected, rtol=0, atol=1e-6)
        whole = np.full((groups, T), -np.inf)
        whole[:, keys] = logits
        np.testing.assert_allclose(found.logits_BCHGS[b, c, h], whole, atol=1e-5)
        if weight_function is difference:
            lam = numbers[b, t, h]
            assert float(found.lam_BCH[b, c, h]) == pytest.approx(lam, abs=1e-7)
            assert float(found.weights_BCHS[b, c, h].sum()) == pytest.approx(1 - lam, abs=1e-6)
    assert (found.lam_BCH is None) == (weight_function is not difference)


def test_memory_is_not_quadratic():
    """With 4,096 tokens, no array of the program has 4,096² elements. Memory is linear in the selected queries."""
    q, k = (jax.ShapeDtypeStruct((1, 4096, heads, 2, d), jnp.bfloat16) for heads in (H, K))
    queries = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    call = jax.jit(functools.partial(attention_rows, difference))
    lam = jax.ShapeDtypeStruct((), jnp.float32)
    memory = call.lower(q, k, queries, weight_argument=lam).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 4096 * 4096
