"""The compiled GPU kernels on a GPU, compared with the float32 reference. Skipped without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from difftx import kernels
from difftx.kernels import target
from difftx.kernels.backend import AttentionCall

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU here; see benchmarks/gpu_pending.md")

BACKENDS = ["pallas_gpu", "cudnn", "xla"]
TOLERANCE = 1.2e-2  # Relative to the tensor's norm, bfloat16 against float32.
ROUNDING = 2**-8  # Distance of neighbouring bfloat16 numbers, at most, relative to the numbers.
CASES = {
    "smallest": {"T": 64, "B": 1, "H": 1, "K": 1, "d": 64},
    "one token": {"T": 1},
    "four tiles": {"T": 256, "B": 1, "H": 1, "K": 1, "d": 64},  # The smallest in which buffers are filled again.
    "T=130": {"T": 130},
    "T=1000, d=96": {"T": 1000, "d": 96},
    "T=2048, d=128": {"T": 2048, "d": 128, "B": 4},
    "grouped queries": {"T": 600, "K": 2},
    "window": {"T": 600, "window": 100},
    # Rows begin with a fully masked tile. With FMA, the running maximum could overflow, which no interpreter shows.
    "window of one": {"T": 300, "window": 1},
    "packed segments": {"T": 600, "segments": True},
    "everything": {"T": 700, "K": 1, "window": 90, "segments": True, "d": 128},
    "large logits": {"T": 512, "scale": 4.0},
}


def with_gradients(name, ids, window, weights):
    """Return the compiled function of (q, k, v, λ) that returns the output and the gradients of its weighted sum."""

    def loss(q, k, v, lam):
        out = kernels.diff_attention(q, k, v, lam, segment_ids_BT=ids, window=window, implementation=name)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    def call(q, k, v, lam):
        grads, out = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, lam)
        return dict(zip(("out", "dq", "dk", "dv", "dlam"), (out, *grads), strict=True))

    return jax.jit(call)


def cancelling_terms(q, k, v, lam, weights):
    """Return |dO·V| |W| |K| / √d and the same with |Q|, for queries that see only their own key.

    dQ = P (dP - delta) W K / √d is 0 there, as the difference of two terms of this size, which bfloat16 rounds.
    """
    q, k, v, lam = (np.asarray(x, np.float64) for x in (q, k, v, lam))
    factors = np.stack([np.ones_like(lam), lam], axis=-1) * np.sum(weights * v, axis=-1)[..., None]
    terms = [factors[..., None] * x / np.sqrt(q.shape[-1]) for x in (k, q)]
    return {name: np.linalg.norm(x) for name, x in zip(("dq", "dk"), terms, strict=True)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_and_gradients_equal_the_reference(backend, case):
    options = {"B": 2, "H": 4, "K": 4, "d": 64, "window": None, "segments": False, "scale": 1.0} | CASES[case]
    B, T, H, K, d = (options[n] for n in "BTHKd")
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(options["scale"] * rng.normal(size=(B, T, n, 2, d)), jnp.bfloat16) for n in (H, K))
    v = jnp.asarray(rng.normal(size=(B, T, K, 2 * d)), jnp.bfloat16)
    lam = jnp.asarray(rng.normal(size=(B, T, H)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(B, T, H, 2 * d)), jnp.float32)
    ids = jnp.asarray(np.sort(rng.integers(0, 5, (B, T))), jnp.int32) if options["segments"] else None
    if reason := kernels.BACKENDS["diff_attention"][backend].why_unsupported(AttentionCall(q, k, v, ids)):
        pytest.skip(f"{backend} on {target.device_kind()}: {reason}")
    arguments = (ids, options["window"], weights)
    attention = with_gradients(backend, *arguments)
    actual, again = (jax.device_get(attention(q, k, v, lam)) for _ in range(2))
    with jax.default_device(jax.devices("cpu")[0]):
        copies = [jnp.asarray(np.asarray(x, np.float32)) for x in (q, k, v, lam)]
        expected = jax.device_get(with_gradients("reference", *jax.device_get(arguments))(*copies))
    sees_one_key = T == 1 or options["window"] == 1
    terms = cancelling_terms(q, k, v, lam, weights) if sees_one_key else {}
    errors = {}
    for name, e in expected.items():
        a, e = np.asarray(actual[name], np.float64), np.asarray(e, np.float64)
        errors[name] = np.linalg.norm(a - e) / terms.get(name, np.linalg.norm(e))
    print(f"relative errors of {backend}, {case}: {errors}")
    for name, error in errors.items():
        assert error < (ROUNDING if name in terms else TOLERANCE), errors  # NaN is not less.
    if backend != "cudnn":  # cuDNN's backward pass may use atomics.
        jax.tree.map(np.testing.assert_array_equal, actual, again)
