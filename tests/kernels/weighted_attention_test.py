"""Attention with other weight functions, compared with their formulas and reference gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels_checks import TOLERANCE, relative_error

from difftx import kernels
from difftx.kernels import weight_functions, xla
from kernels import oracle

FUNCTIONS = {name: oracle.FUNCTIONS[name] for name in ("sink", "top_k", "signed")}
CASES = {
    "one token": {"T": 1},
    "window, segments, groups": {"window": 7, "segments": True, "K": 2, "T": 40},
    "large logits, a number a head": {"scale": 8.0, "extra": "H"},
}
RUNS = [(name, case, "float32") for name in FUNCTIONS for case in CASES]
RUNS += [("sink", "window, segments, groups", "bfloat16")]
LARGE_TOLERANCE = 2e-5  # As in diff_attention_test.py.


def inputs(name, B=2, T=21, H=4, K=4, d=8, E=6, extra="BTH", segments=False, scale=1.0, dtype="float32"):
    _, G, takes_number, _ = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    shapes = [((B, T, H, G, d), scale), ((B, T, K, G, d), scale), ((B, T, K, E), 1.0)]
    q, k, v = (jnp.asarray(rng.normal(size=shape) * m, dtype) for shape, m in shapes)
    number = jnp.asarray(rng.normal(size=(B, T, H) if extra == "BTH" else (H,)), jnp.float32) if takes_number else None
    ids = jnp.asarray(np.sort(rng.integers(0, 4, (B, T))), jnp.int32) if segments else None
    return q, k, v, number, ids


def by_hand(name, *arrays):
    return oracle.attention(FUNCTIONS[name][3], *arrays)


def loss_weights(q, v):
    return np.random.default_rng(9).normal(size=(*q.shape[:3], v.shape[3])).astype(np.float32)


def outputs_and_gradients(name, backends, q, k, v, number, ids, window):
    """Return the output and gradients of each backend, from one jitted function. The reference gets float32 inputs."""
    weights = loss_weights(q, v)
    arrays = (q, k, v) if number is None else (q, k, v, number)

    def gradients(backend, *arrays):
        def loss(*arrays):
            out = kernels.weighted_attention(
                FUNCTIONS[name][0],
                *arrays[:3],
                weight_argument=arrays[3] if len(arrays) == 4 else None,
                segment_ids_BT=ids,
                window=window,
                implementation=backend,
            )
            return jnp.sum(out.astype(jnp.float32) * weights), out

        grads, out = jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)
        return out, *grads

    def of_all(*arrays):
        wide = [x.astype(jnp.float32) for x in arrays]
        return [gradients(backend, *(wide if backend == "reference" else arrays)) for backend in backends]

    return jax.jit(of_all)(*arrays)


@pytest.mark.parametrize(("name", "case", "dtype"), RUNS)
def test_output_and_gradients_equal_the_reference(name, case, dtype):
    options = CASES[case] | {"dtype": dtype}
    window = options.pop("window", None)
    tolerance = LARGE_TOLERANCE if "scale" in options else TOLERANCE[dtype]
    q, k, v, number, ids = inputs(name, **options)
    actual, expected = outputs_and_gradients(name, ("xla", "reference"), q, k, v, number, ids, window)
    assert actual[0].dtype == v.dtype
    for out in (actual[0], expected[0]):
        assert relative_error(out, by_hand(name, q, k, v, number, ids, window)) < tolerance
    for part, a, e in zip(("out", "dq", "dk", "dv", "dnumber"), actual, expected, strict=False):
        if np.abs(e).max() > 1e-6:
            assert relative_error(a, e) < tolerance, part


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_chunked_gradients_equal_reference_and_central_differences(name, monkeypatch):
    """Compare gradients with the reference and with central differences of a float64 loss in numpy.

    The reference alone is not an independent check, because JAX differentiates the same weight function for it.
    """
    monkeypatch.setattr(xla, "CHUNK_WEIGHTS", 40)
    *arrays, ids = inputs(name, segments=True, K=2)
    chunked, whole = outputs_and_gradients(name, ("xla", "reference"), *arrays, ids, 9)
    for a, b in zip(chunked, whole, strict=True):
        assert relative_error(a, b) < TOLERANCE["float32"]

    rng, step = np.random.default_rng(1), 1e-5
    for i, grad in enumerate(chunked[1:]):
        direction = rng.normal(size=grad.shape)
        ends = []
        for sign in (1, -1):
            moved = [*arrays]
            moved[i] = np.asarray(arrays[i], np.float64) + sign * step * direction
            ends.append(np.sum(by_hand(name, *moved, ids, 9) * loss_weights(arrays[0], arrays[2])))
        assert np.sum(grad * direction) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4), i


def test_invalid_calls_raise():
    q, k, v, _, _ = inputs("signed")
    with pytest.raises(ValueError, match=r"query \[B, T, H, G, d\]"):
        kernels.weighted_attention(weight_functions.signed_softmax, q, k[:, :, :, :1], v)
    with pytest.raises(ValueError, match=r"requires a real weight_argument: a scalar, .*; got float32\[3\]"):
        kernels.weighted_attention(weight_functions.difference, q, k, v, weight_argument=jnp.ones(3))
    with pytest.raises(ValueError, match="'splash' is not one of auto, reference, xla"):
        kernels.weighted_attention(weight_functions.signed_softmax, q, k, v, implementation="splash")
