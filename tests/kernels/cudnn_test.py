"""The cuDNN backends: their algebra on the CPU, and their lowering for CUDA. cuDNN itself cannot run here."""

#   B = batch, T = S = length, H = query heads, K = key/value heads, G = 2 groups, d = width, E = 2·d

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels_checks import targeting

from difftx.kernels import cudnn, target
from difftx.kernels.backend import AttentionCall
from kernels import oracle

SHAPES = ((2, 100, 4, 2, 16), (2, 100, 2, 2, 16), (2, 100, 2, 32))


def make_inputs(dtype=jnp.float32, shapes=SHAPES):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return q, k, v, jnp.asarray(rng.normal(size=shapes[0][:3]), jnp.float32)


def naive(q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, ids_BT=None, *, window):
    seen_BTS = oracle.visible_keys(*q_BTHGd.shape[:2], ids_BT, window)
    return oracle.naive(q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, seen_BTS)


def output_and_gradients(attention, args, ids_BT, dout_BTHE):
    out_BTHE, vjp = jax.vjp(lambda *args: attention(*args, ids_BT), *args)
    return out_BTHE, *vjp(dout_BTHE)


@pytest.fixture
def xla_instead(monkeypatch):
    """Replace cuDNN by XLA in `jax.nn.dot_product_attention`, which requires K and V of equal width with both."""
    public = jax.nn.dot_product_attention

    def call(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        return public(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", call)


@pytest.fixture
def on_hopper():
    """Let JAX check calls against an H200 and cuDNN 9.19, instead of the local GPU and its cuDNN."""
    with targeting("NVIDIA H200"), cudnn.checked_for_target(91900):
        yield


@pytest.mark.parametrize("window", [None, 1, 30])
@pytest.mark.parametrize(
    ("widest", "segments"),
    [
        (32, True),
        (32, False),
        (16, True),  # V is split.
    ],
)
def test_algebra_is_exact(widest, segments, window, xla_instead, monkeypatch):
    monkeypatch.setattr(cudnn, "_widest_head", lambda: widest)
    args = make_inputs()
    ids_BT = jnp.asarray(np.sort(np.random.default_rng(2).integers(0, 4, (2, 100)))) if segments else None
    dout = jnp.asarray(np.random.default_rng(1).normal(size=(2, 100, 4, 32)), jnp.float32)
    with jax.default_matmul_precision("highest"):
        (out, *grads), (expected, *expected_grads) = (
            jax.jit(functools.partial(output_and_gradients, functools.partial(f, window=window)))(args, ids_BT, dout)
            for f in (cudnn.attention, naive)
        )
    assert out.dtype == args[0].dtype
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for actual, reference in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "heads", "width"),
    [("NVIDIA H200", 8, 256), ("NVIDIA A100-SXM4-80GB", 16, 128), ("NVIDIA B200", 16, 128)],
)
@pytest.mark.parametrize("window", [None, 512])
def test_lowers_to_cudnn_and_nothing_quadratic(kind, heads, width, window, monkeypatch):
    q, k, v, lam = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((2, 1000, 4, 2, 128), jnp.bfloat16),
            ((2, 1000, 2, 2, 128), jnp.bfloat16),
            ((2, 1000, 2, 256), jnp.bfloat16),
            ((2, 1000, 4), jnp.float32),
        )
    )

    def loss(*args):
        return cudnn.attention(*args, window=window).astype(jnp.float32).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    capability = target.compute_capability(kind)  # cuDNN's calls cannot be lowered under an abstract mesh.
    monkeypatch.setattr(target, "compute_capability", lambda: capability)
    with cudnn.checked_for_target(91900):
        text = gradients.trace(q, k, v, lam).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert f"tensor<2x1024x{heads}x{width}xbf16>" in text
    assert "dot_general" not in text
    assert "1024x1024x" not in text.replace('"', "")


def diff_call(width=128, dtype=jnp.bfloat16, *, segments=False, tokens=100):
    shapes = ((2, tokens, 4, 2, width), (2, tokens, 2, 2, width), (2, tokens, 2, 2 * width))
    ids = jax.ShapeDtypeStruct((2, tokens), jnp.int32) if segments else None
    return AttentionCall(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), ids)


@pytest.mark.parametrize(
    ("call", "kind", "reason"),
    [
        (diff_call(16), "NVIDIA H200", None),
        (diff_call(256), "NVIDIA H200", None),
        (diff_call(128), "NVIDIA A100-SXM4-80GB", None),
        (diff_call(128, segments=True), "NVIDIA GeForce RTX 4090", None),
        (diff_call(16, jnp.float32), "NVIDIA H200", "not float32"),
        (diff_call(16, segments=True, tokens=20_000), "NVIDIA H200", "dense T × T mask; got 20000 tokens"),
        (diff_call(12), "NVIDIA H200", "a multiple of 8 up to 256; got 12"),
        (diff_call(136), "NVIDIA L4", "a multiple of 8 up to 128; got 136"),
        (diff_call(136), "NVIDIA B200", "a multiple of 8 up to 128; got 136"),
        (diff_call(16), "Tesla V100-SXM2-16GB", "requires Ampere"),
    ],
)
def test_unsupported_names_the_reason(call, kind, reason):
    with targeting(kind):
        answer = cudnn.unsupported(call)
    assert answer is None if reason is None else reason in answer


def test_without_a_gpu_the_reason_is_the_platform():
    assert "requires an NVIDIA GPU, and JAX runs on cpu" in cudnn.unsupported(diff_call())
