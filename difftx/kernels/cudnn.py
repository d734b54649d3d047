"""Differential attention on NVIDIA GPUs, as the difference of two softmax attentions by cuDNN.

Both functions take the arguments of the fused kernels, except segment ids, and are differentiable in
q, k, v and λ.

JAX's public API requires equal widths of keys and values, but differential attention has widths D and
2D. `diff_attention` therefore pads Q and K with zeros, which changes no logit.
`diff_attention_wide_values` calls JAX's private binding, which accepts both widths (cuDNN >= 9.10.2
on Hopper). This saves a quarter of the matrix multiplications: 12·T²·D instead of 16·T²·D.
"""

#   B = batch, T = query tokens, S = key tokens (= T), H = query heads,
#   K = key/value heads (query head h uses key/value head h // (H // K)),
#   G = 2 groups (group 0 gives the attention weights A1, group 1 gives A2),
#   D = query/key width, E = 2·D = value width, N = G·H = query heads of the cuDNN call

import jax
import jax.numpy as jnp

try:
    from jax._src.cudnn import fused_attention_stablehlo as private
except ImportError:  # this JAX has moved the module, so only `diff_attention` works
    private = None  # pyrefly: ignore[bad-assignment]

MAPS = 2
# Odd lengths and lengths of 64 modulo 128 have given NaN gradients (cudnn-frontend#160, pytorch#196678).
LENGTH_MULTIPLE = 128
HEAD_WIDTH_MULTIPLE = 8
# Minimal major compute capability → largest head width of cuDNN's flash attention.
HEAD_WIDTH_LIMITS = {9: 256, 8: 128}
WIDE_VALUES_VERSION = 91002  # 9.10.0 and 9.10.1 accept wide values but return wrong gradients


def unsupported(q_shape, k_shape, v_shape, dtype, *, segment_ids=None, device=None):
    """Return the reason why `diff_attention` cannot serve a call, or None.

    q_shape is [B, T, H, G, D], k_shape [B, S, K, G, D] and v_shape [B, S, K, E]. `device` is a
    jax.Device; None selects the first device.
    """
    if q_shape[-2] != MAPS or k_shape[-2] != MAPS:
        return f"q and k need {MAPS} maps in their second last axis, got {q_shape} and {k_shape}"
    if q_shape[1] != k_shape[1] or k_shape[1] != v_shape[1]:
        return f"queries and keys differ in length: {q_shape[1]}, {k_shape[1]} and {v_shape[1]}"
    if k_shape[2] != v_shape[2] or q_shape[2] % k_shape[2] != 0:
        return f"{q_shape[2]} query heads do not divide over {k_shape[2]} and {v_shape[2]} heads"
    if v_shape[-1] != 2 * q_shape[-1]:
        return f"values are {v_shape[-1]} wide, not twice the head width {q_shape[-1]}"
    if q_shape[-1] % HEAD_WIDTH_MULTIPLE != 0:
        return f"head width {q_shape[-1]} is no multiple of {HEAD_WIDTH_MULTIPLE}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention takes bfloat16 and float16, not {jnp.dtype(dtype).name}"
    if segment_ids is not None:
        return "cuDNN would need the segments as a dense T x S mask"
    return _unsupported_device(v_shape[-1], jax.devices()[0] if device is None else device)


def wide_values_unsupported(*arguments, device=None, **keywords):
    """Return the reason why `diff_attention_wide_values` cannot serve a call, or None.

    The arguments are those of `unsupported`.
    """
    device = jax.devices()[0] if device is None else device
    reason = unsupported(*arguments, device=device, **keywords)
    if reason is not None:
        return reason
    if private is None:
        return "this JAX has no jax._src.cudnn.fused_attention_stablehlo"
    if _major(device) < 9:
        return f"values wider than keys need Hopper or later, found {device.device_kind}"
    version = private.check_cudnn_version()
    if version < WIDE_VALUES_VERSION:
        return f"values wider than keys need cuDNN {WIDE_VALUES_VERSION}, found {version}"
    return None


def diff_attention(q_BTHGD, k_BSKGD, v_BSKE, lam_BTH, segment_ids_BT=None, *, window):
    """Return causal (A1 - λ·A2)·V, [B, T, H, E] in the dtype of q, by one public call with 2H heads of width 2D.

    lam_BTH is float32. A query attends to itself and to the window - 1 keys before it; window=None means all keys
    before it. segment_ids_BT must be None.
    """
    assert segment_ids_BT is None
    length, heads, _, width = q_BTHGD.shape[1:]
    wide = v_BSKE.shape[-1] - width
    out_BTNE = jax.nn.dot_product_attention(
        _pad(_maps_first(q_BTHGD), widen=wide),
        _pad(_maps_first(k_BSKGD), widen=wide),
        _pad(jnp.concatenate([v_BSKE] * MAPS, axis=2)),
        scale=width**-0.5,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return _subtract(out_BTNE[:, :length, :heads], out_BTNE[:, :length, heads:], lam_BTH)


def diff_attention_wide_values(q_BTHGD, k_BSKGD, v_BSKE, lam_BTH, segment_ids_BT=None, *, window):
    """Compute `diff_attention` by two private calls with H heads, of width D for Q and K and 2D for V."""
    assert segment_ids_BT is None
    assert private is not None  # See `wide_values_unsupported`.
    length, width = q_BTHGD.shape[1], q_BTHGD.shape[-1]
    out1_BTHE, out2_BTHE = (
        private.dot_product_attention(  # pyrefly: ignore[bad-index]
            _pad(q_BTHGD[..., m, :]),
            _pad(k_BSKGD[..., m, :]),
            _pad(v_BSKE),
            scale=width**-0.5,
            mask_type=private.MaskType.CAUSAL,
            sliding_window_length=window,
        )[:, :length]
        for m in range(MAPS)
    )
    return _subtract(out1_BTHE, out2_BTHE, lam_BTH)


def _maps_first(x_BTHGD):
    """Reshape [B, T, H, G, D] to [B, T, G·H, D], groups before heads.

    This order pairs query head h of group g with key/value head h // (H // K) of the same group, because
    (g·H + h) // (H // K) = g·K + h // (H // K).
    """
    batch, length, heads, maps, width = x_BTHGD.shape
    return x_BTHGD.swapaxes(2, 3).reshape(batch, length, maps * heads, width)


def _pad(x_BTND, *, widen=0):
    """Pad the length with zeros to a multiple of LENGTH_MULTIPLE, and the width with `widen` columns of zeros.

    The causal mask hides the padded keys from all real queries.
    """
    missing = -x_BTND.shape[1] % LENGTH_MULTIPLE
    return jnp.pad(x_BTND, ((0, 0), (0, missing), (0, 0), (0, widen)))


def _subtract(out1_BTHE, out2_BTHE, lam_BTH):
    out_BTHE = out1_BTHE.astype(jnp.float32) - lam_BTH[..., None] * out2_BTHE.astype(jnp.float32)
    return out_BTHE.astype(out1_BTHE.dtype)


def _major(device):
    return int(str(getattr(device, "compute_capability", "0")).split(".")[0])


def _unsupported_device(value_width, device):
    if device.platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU, found {device.platform} ({device.device_kind})"
    limit = next((w for major, w in HEAD_WIDTH_LIMITS.items() if _major(device) >= major), 0)
    if value_width > limit:
        return f"cuDNN takes heads up to {limit} wide on {device.device_kind}, not {value_width}"
    return None
