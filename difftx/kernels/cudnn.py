"""Differential attention on NVIDIA GPUs, as the difference of two softmax attentions by cuDNN.

JAX's public API requires keys and values of equal width, but in differential attention keys have width D and values 2D.
`diff_attention` therefore pads Q and K with zeros, which does not change the logits. `diff_attention_wide_values` calls
JAX's private binding, which accepts two widths (cuDNN >= 9.10.2 on Hopper). This saves a quarter of the FLOPs in matrix
products: 12·T²·D per head instead of 16·T²·D.
"""
# Axes: B = batch, T = query tokens, S = key tokens (= T), H = query heads, K = key/value heads, G = 2 groups (A1, A2),
#   D = query/key width, E = 2·D = value width, N = G·H = query heads of the cuDNN call

import jax
import jax.numpy as jnp

from difftx.kernels.backend import AttentionCall

try:
    from jax._src.cudnn import fused_attention_stablehlo as private
except ImportError:  # This JAX has moved the module, so only `diff_attention` works.
    private = None  # pyrefly: ignore[bad-assignment]

GROUPS = 2
# Rows are padded to a multiple of this number of tokens, because cuDNN has returned NaN gradients for odd lengths, and
# for odd multiples of 64 tokens (cudnn-frontend#160, pytorch#196678).
LENGTH_MULTIPLE = 128
# Largest head width of cuDNN's flash attention, by the lowest major compute capability that supports it.
HEAD_WIDTH_LIMITS = {9: 256, 8: 128}
WIDE_VALUES_VERSION = 91002  # cuDNN 9.10.0 and 9.10.1 accept wide values but return wrong gradients.


def unsupported(call: AttentionCall) -> str | None:
    """Return the reason why `diff_attention` cannot serve a call, or None."""
    width, dtype, device = call.q.shape[-1], call.q.dtype, jax.devices()[0]
    if width % 8:
        return f"head width {width} is not a multiple of 8"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention supports bfloat16 and float16, not {dtype}"
    if call.segment_ids_BT is not None:
        return "cuDNN would require the segments as a dense T x S mask"
    if device.platform not in ("gpu", "cuda"):
        return f"it requires an NVIDIA GPU, found {device.platform} ({device.device_kind})"
    limit = next((limit for major, limit in HEAD_WIDTH_LIMITS.items() if _compute_capability() >= major), 0)
    if 2 * width > limit:
        return f"cuDNN supports heads up to {limit} wide on {device.device_kind}, not {2 * width}"
    return None


def wide_values_unsupported(call: AttentionCall) -> str | None:
    """Return the reason why `diff_attention_wide_values` cannot serve a call, or None."""
    if reason := unsupported(call):
        return reason
    if private is None:
        return "this JAX has no jax._src.cudnn.fused_attention_stablehlo"
    if _compute_capability() < 9:
        return f"values wider than keys require Hopper or later, found {jax.devices()[0].device_kind}"
    version = private.check_cudnn_version()
    if version < WIDE_VALUES_VERSION:
        return f"values wider than keys require cuDNN {WIDE_VALUES_VERSION}, found {version}"
    return None


def diff_attention(q_BTHGD, k_BSKGD, v_BSKE, lam_BTH, segment_ids_BT=None, *, window):
    """Return causal (A1 - λ·A2)·V by one call of JAX's public API with 2H heads of width 2D."""
    assert segment_ids_BT is None
    length, heads, _, width = q_BTHGD.shape[1:]
    wide = v_BSKE.shape[-1] - width
    out_BTNE = jax.nn.dot_product_attention(
        _pad(_groups_first(q_BTHGD), widen=wide),
        _pad(_groups_first(k_BSKGD), widen=wide),
        _pad(jnp.concatenate([v_BSKE] * GROUPS, axis=2)),
        scale=width**-0.5,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return _subtract(out_BTNE[:, :length, :heads], out_BTNE[:, :length, heads:], lam_BTH)


def diff_attention_wide_values(q_BTHGD, k_BSKGD, v_BSKE, lam_BTH, segment_ids_BT=None, *, window):
    """Return causal (A1 - λ·A2)·V by two calls of JAX's private binding, one per group, without padded widths."""
    assert segment_ids_BT is None
    assert private is not None  # Otherwise, `wide_values_unsupported` rejects the call.
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
        for m in range(GROUPS)
    )
    return _subtract(out1_BTHE, out2_BTHE, lam_BTH)


def _groups_first(x_BTHGD):
    """Reshape [B, T, H, G, D] to [B, T, G·H, D], with all heads of group 0 before all heads of group 1."""
    batch, length, heads, groups, width = x_BTHGD.shape
    return x_BTHGD.swapaxes(2, 3).reshape(batch, length, groups * heads, width)


def _pad(x_BTND, *, widen=0):
    """Pad the length with zeros to a multiple of LENGTH_MULTIPLE, and the width with `widen` columns of zeros."""
    # The causal mask hides the padded keys from all real queries.
    missing = -x_BTND.shape[1] % LENGTH_MULTIPLE
    return jnp.pad(x_BTND, ((0, 0), (0, missing), (0, 0), (0, widen)))


def _subtract(out1_BTHE, out2_BTHE, lam_BTH):
    out_BTHE = out1_BTHE.astype(jnp.float32) - lam_BTH[..., None] * out2_BTHE.astype(jnp.float32)
    return out_BTHE.astype(out1_BTHE.dtype)


def _compute_capability() -> int:
    """Return the major compute capability of the first device, or 0 if it is unknown."""
    return int(str(getattr(jax.devices()[0], "compute_capability", "0")).split(".")[0])
