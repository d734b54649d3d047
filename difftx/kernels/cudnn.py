"""Attention by cuDNN on NVIDIA GPUs. Differential attention is computed as a difference of two softmax attentions.

JAX's public API requires keys and values of equal width, but in differential attention keys have width d and values 2d.
`attention` therefore pads Q and K with zeros, which does not change the logits. Where cuDNN does not support heads
of width 2d, `attention` splits V into two halves of width d.
"""
# Axes: B = batch, T = query tokens, S = key tokens (= T), H = query heads, K = key/value heads, G = groups (A1, A2),
#   d = query/key width, E = value width (2·d in differential attention), W = width of a cuDNN head (d or E),
#   N = query or key heads of the cuDNN call: H or K, times G, and times 2 if V is split

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as private

from difftx.kernels import target
from difftx.kernels.backend import AttentionCall, difference

# Pad rows to a multiple of this number of tokens. cuDNN has returned NaN gradients for odd lengths and for odd
# multiples of 64 tokens (cudnn-frontend#160, pytorch#196678).
LENGTH_MULTIPLE = 128
DENSE_MASK_TOKENS = 16_384  # Longest row with segments: `jax.nn` passes a T × T mask, 0.5 GiB at this length.


def attention(q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, segment_ids_BT=None, *, window) -> jax.Array:
    """Compute causal softmax attention, or (A1 - λ·A2)·V for two groups, by one call of JAX's public API.

    The call has G·H heads of the values' width. If cuDNN does not support that width, it has twice as many heads of
    half the width.
    """
    B, T, H, G, d = q_BTHGd.shape
    parts = jnp.split(v_BSKE, 1 if v_BSKE.shape[-1] <= _widest_head() else 2, axis=-1)
    # Order the heads by group: all of group 0, then all of group 1.
    grouped = (x.swapaxes(2, 3).reshape(*x.shape[:2], -1, d) for x in (q_BTHGd, k_BSKGd))
    widen = parts[0].shape[-1] - d
    q_BTNW, k_BSNW = (_pad(jnp.concatenate([x] * len(parts), axis=2), widen=widen) for x in grouped)
    v_BSNW = _pad(jnp.concatenate([part for part in parts for _ in range(G)], axis=2))
    mask_B1TS = None
    if segment_ids_BT is not None:
        segment_ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, -T % LENGTH_MULTIPLE)), mode="edge")
        mask_B1TS = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    out_BTNW = jax.nn.dot_product_attention(
        *(q_BTNW, k_BSNW, v_BSNW),
        mask=mask_B1TS,
        scale=d**-0.5,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )[:, :T]
    out_BTGHPW = jnp.moveaxis(out_BTNW.reshape(B, T, len(parts), G, H, -1), 2, 4)
    out_BTGHE = out_BTGHPW.reshape(B, T, G, H, -1)
    return out_BTGHE[:, :, 0] if G == 1 else difference(out_BTGHE[:, :, 0], out_BTGHE[:, :, 1], lam_BTH)


def unsupported(call: AttentionCall) -> str | None:
    """Return why `attention` cannot serve a call, or None if it can."""
    T, width, widest = call.q.shape[1], call.q.shape[-1], _widest_head()
    if target.platform() != "gpu":
        return f"cuDNN requires an NVIDIA GPU, and JAX runs on {target.platform()}"
    if call.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention supports bfloat16 and float16, not {call.q.dtype}"
    if target.compute_capability() < (8, 0):
        return f"cuDNN's attention requires Ampere (compute capability 8.0) or later, found {target.device_kind()}"
    if width % 8 or width > widest:
        return f"cuDNN requires a head width that is a multiple of 8 up to {widest}; got {width}"
    if call.segment_ids_BT is not None and T > DENSE_MASK_TOKENS:
        return f"cuDNN would require the segments as a dense T × T mask; got {T} tokens, over {DENSE_MASK_TOKENS}"
    return None


@contextlib.contextmanager
def checked_for_target(version: int) -> Iterator[None]:
    """Make JAX check cuDNN calls against the target device and cuDNN `version`, such as 91900.

    By default, JAX checks against this machine's GPU and cuDNN, even when it compiles for another GPU.
    """

    def asked(capability: str) -> tuple[int, ...]:
        return tuple(map(int, capability.split(".")))

    answers = {
        "check_cudnn_version": lambda: version,
        "check_compute_capability": lambda capability: target.compute_capability() >= asked(capability),
        "is_cuda_compute_capability_equal": lambda capability: target.compute_capability() == asked(capability),
    }
    with mock.patch.multiple(private, **answers):
        yield


def _widest_head() -> int:
    """Return the largest head width that cuDNN's backward pass supports (docs.nvidia.com/cudnn, Attention, 9.18)."""
    return 256 if target.compute_capability()[0] == target.HOPPER else 128


def _pad(x_BTNd, *, widen=0):
    """Pad the length with zeros to a multiple of LENGTH_MULTIPLE, and the width with `widen` columns of zeros."""
    # The causal mask hides the padded keys from all real queries.
    missing = -x_BTNd.shape[1] % LENGTH_MULTIPLE
    return jnp.pad(x_BTNd, ((0, 0), (0, missing), (0, 0), (0, widen)))
