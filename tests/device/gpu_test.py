"""The compiled GPU kernels on a GPU, compared with the float32 reference. Skipped without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from difftx import kernels
from difftx.kernels import target
from difftx.kernels.backend import AttentionCall

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU here; see benchmarks/gpu_pending.md")

BACKENDS = ["pallas_gpu", "cudnn_wide", "cudnn", "xla"]
TOLERANCE = 1.2e-2  # Relative to the tensor's norm, bfloat16 against float32.
CASES = {
    "smallest": {"T": 64, "B": 1, "H": 1, "K": 1, "d": 64},
    "one token": {"T": 1},
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


def gradients(name, q, k, v, lam, ids, window, weights):
    def loss(q, k, v, lam):
        out = kernels.diff_attention(q, k, v, lam, segment_ids_BT=ids, window=window, implementation=name)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, lam)
    return out, *grads


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
    arguments = (lam, ids, options["window"], weights)
    actual = gradients(backend, q, k, v, *arguments)
    again = gradients(backend, q, k, v, *arguments)
    with jax.default_matmul_precision("highest"):
        expected = gradients("reference", *(x.astype(jnp.float32) for x in (q, k, v)), *arguments)
    for name, a, b, e in zip(("out", "dq", "dk", "dv", "dlam"), actual, again, expected, strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.isfinite(a).all(), name
        scale = max(np.linalg.norm(e), 1e-3 * np.sqrt(e.size))  # With one visible key, dq and dk are 0.
        assert np.linalg.norm(a - e) < TOLERANCE * scale, name
        if backend != "cudnn" and backend != "cudnn_wide":  # cuDNN's backward pass may use atomics.
            np.testing.assert_array_equal(a, np.asarray(b, np.float64), err_msg=name)
