"""The cuDNN path: its algebra on the CPU, and what it lowers to for CUDA. cuDNN itself cannot run here."""

#   B = batch, T = S = length, H = query heads, K = key/value heads, G = 2 maps, D = width, E = 2·D

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from difftx.kernels import cudnn
from difftx.kernels.backend import AttentionCall

SHAPES = ((2, 100, 4, 2, 16), (2, 100, 2, 2, 16), (2, 100, 2, 32))


@dataclasses.dataclass
class Device:
    compute_capability: str
    platform: str = "gpu"
    device_kind: str = "a test's GPU"


def make_inputs(dtype=jnp.float32, shapes=SHAPES):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return q, k, v, jnp.asarray(rng.normal(size=shapes[0][:3]), jnp.float32)


def naive(q_BTHGD, k_BSKGD, v_BSKE, lam_BTH, *, window):
    length, group = q_BTHGD.shape[1], q_BTHGD.shape[2] // k_BSKGD.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k_BSKGD, v_BSKE))
    logits = jnp.einsum("bthgd,bshgd->bhgts", q_BTHGD, k) * q_BTHGD.shape[-1] ** -0.5
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    seen = jnp.asarray((j <= i) & (i - j < (window or length)))
    p = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bhgts,bshe->gbthe", p, v)
    return out[0] - lam_BTH[..., None] * out[1]


@pytest.fixture
def xla_instead(monkeypatch):
    """JAX's own attention under the same API; it wants K and V equally wide, like the cuDNN call."""
    public = jax.nn.dot_product_attention

    def call(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        return public(*args, implementation="xla", **kwargs)

    def private_call(q, k, v, *, scale, mask_type, sliding_window_length):
        assert mask_type == cudnn.private.MaskType.CAUSAL
        window = None if sliding_window_length is None else (sliding_window_length - 1, 0)
        call = functools.partial(public, q, k, scale=scale, is_causal=True, local_window_size=window)
        return jnp.concatenate([call(half) for half in jnp.split(v, 2, axis=-1)], axis=-1)

    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    monkeypatch.setattr(cudnn.private, "dot_product_attention", private_call)


@pytest.fixture
def h200_with_cudnn(monkeypatch):
    """JAX asks the local GPU whether cuDNN can serve the call; here nobody can answer."""
    monkeypatch.setattr(cudnn.private, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn.private, "check_compute_capability", lambda least: float(least) <= 9.0)


FUNCTIONS = [cudnn.diff_attention, cudnn.diff_attention_wide_values]


@pytest.mark.parametrize("attention", FUNCTIONS)
@pytest.mark.parametrize("window", [None, 1, 30])
def test_algebra_is_exact(attention, window, xla_instead):
    args = make_inputs()
    dout = jnp.asarray(np.random.default_rng(1).normal(size=(2, 100, 4, 32)), jnp.float32)
    with jax.default_matmul_precision("highest"):
        out, vjp = jax.vjp(functools.partial(attention, window=window), *args)
        expected, expected_vjp = jax.vjp(functools.partial(naive, window=window), *args)
        assert out.dtype == args[0].dtype
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
        for actual, reference in zip(vjp(dout), expected_vjp(dout), strict=True):
            np.testing.assert_allclose(actual, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("attention", "calls", "widths"),
    [(cudnn.diff_attention, 1, (256, 256)), (cudnn.diff_attention_wide_values, 2, (128, 256))],
)
@pytest.mark.parametrize("window", [None, 512])
def test_lowers_to_cudnn_and_nothing_quadratic(attention, calls, widths, window, h200_with_cudnn):
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
        return attention(*args, window=window).astype(jnp.float32).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    text = gradients.trace(q, k, v, lam).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == calls
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == calls
    heads = 8 // calls
    for width in widths:
        assert f"tensor<2x1024x{heads}x{width}xbf16>" in text
    assert "dot_general" not in text
    assert "1024x1024x" not in text.replace('"', "")


def test_wide_values_name_an_old_cudnn(h200_with_cudnn, monkeypatch):
    call = AttentionCall(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES))
    monkeypatch.setattr(jax, "devices", lambda: [Device("8.0")])
    assert "Hopper" in cudnn.wide_values_unsupported(call)
    monkeypatch.setattr(jax, "devices", lambda: [Device("9.0")])
    assert cudnn.wide_values_unsupported(call) is None
    monkeypatch.setattr(cudnn.private, "check_cudnn_version", lambda: 91001)
    assert "found 91001" in cudnn.wide_values_unsupported(call)
    monkeypatch.setattr(cudnn, "private", None)
    assert "no jax._src" in cudnn.wide_values_unsupported(call)


@pytest.mark.parametrize(
    ("width", "dtype", "segments", "device", "reason"),
    [
        (16, jnp.bfloat16, False, Device("9.0"), None),
        (16, jnp.float32, False, Device("9.0"), "not float32"),
        (16, jnp.bfloat16, True, Device("9.0"), "dense T x S mask"),
        (12, jnp.bfloat16, False, Device("9.0"), "not a multiple of 8"),
        (136, jnp.bfloat16, False, Device("9.0"), "up to 256 wide"),
        (128, jnp.bfloat16, False, Device("8.0"), "up to 128 wide"),
        (16, jnp.bfloat16, False, jax.devices("cpu")[0], "found cpu"),
    ],
)
def test_unsupported_names_the_reason(width, dtype, segments, device, reason, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [device])
    shapes = ((2, 100, 4, 2, width), (2, 100, 2, 2, width), (2, 100, 2, 2 * width))
    ids = jax.ShapeDtypeStruct((2, 100), jnp.int32) if segments else None
    answer = cudnn.unsupported(AttentionCall(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), ids))
    assert answer is None if reason is None else reason in answer
