"""Softmax attention for the baseline Transformer, from the best maintained library kernel of each platform.

The masks are those of differential attention.
"""
#   B = batch, T = query tokens, S = key tokens (= T, or the tokens of the whole row where rows are sharded),
#   X = S padded to whole tiles, Y = T padded to whole tiles, H = query heads, K = key/value heads,
#   R = H / K = query heads per key/value head, D = width of a head

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from difftx.kernels import mapped, maps, target
from difftx.kernels.context import SequenceSharding

SPLASH_TILE = 512
SPLASH_FUSED_TOKENS = 4096  # Splash's fused backward pass stores one dQ per key tile, T² / 512 rows in all.
XLA_MAP_TOKENS = 1024  # `jax.nn` on XLA stores T × T attention weights, so longer rows are split into query chunks.
DENSE_MASK_TOKENS = 16_384  # cuDNN takes segments only as a T × T bias: 0.5 GiB per row at this length.


def xla_attention(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    cut: SequenceSharding | None = None,
) -> jax.Array:
    """Compute softmax attention by XLA operations, in query chunks if rows are long or sharded.

    The arguments are those of `difftx.kernels.attention`.
    """
    if cut is None and q_BTHD.shape[1] <= XLA_MAP_TOKENS:
        return _library_attention(q_BTHD, k_BTKD, v_BTKD, segment_ids_BT, window=window, implementation="xla")
    options = {"window": window, "cut": cut}
    groups = (q_BTHD[:, :, :, None], k_BTKD[:, :, :, None])
    return mapped.attention(maps.softmax, *groups, v_BTKD, None, segment_ids_BT, **options)


def _library_attention(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    mask_B1TS = None
    if segment_ids_BT is not None:
        mask_B1TS = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BTHD,
        k_BTKD,
        v_BTKD,
        mask=mask_B1TS,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


cudnn_attention = functools.partial(_library_attention, implementation="cudnn")


def cudnn_unsupported(q_BTHD: jax.Array, segment_ids_BT: jax.Array | None) -> str | None:
    """Return the reason why cuDNN cannot serve a call, or None."""
    _, T, _, D = q_BTHD.shape
    if target.platform() != "gpu":
        return f"cuDNN runs on NVIDIA GPUs; this is {target.platform()}"
    if q_BTHD.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attends in bfloat16 or float16, not {q_BTHD.dtype}"
    if D % 8 or D > 256:
        return f"cuDNN wants a head width that is a multiple of 8 up to 256; got {D}"
    if segment_ids_BT is not None and (T % 2 or T > DENSE_MASK_TOKENS):
        return f"cuDNN takes segments as a dense bias: an even row of up to {DENSE_MASK_TOKENS} tokens; got {T}"
    return None


def splash_attention(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    cut: SequenceSharding | None = None,
) -> jax.Array:
    """Compute softmax attention by JAX's splash attention kernel for TPU.

    The arguments are those of `difftx.kernels.attention`. On other platforms the Pallas interpreter runs the kernel.
    """
    B, T, H, D = q_BTHD.shape
    S, K = k_BTKD.shape[1:3]
    tile = _splash_tile(S, cut)
    X = -(-S // tile) * tile
    Y = X if cut is None else T
    mask = splash_mask.CausalMask((X, X))
    if window is not None:
        mask = splash_mask.LocalMask((X, X), (window - 1, 0), offset=0)
    if cut is not None:  # The mask covers the queries of all devices, one device after the other.
        chunk = T // cut.chunks
        starts = [start for device in range(cut.devices) for start in cut.starts(device, chunk)]
        mask.q_sequence = np.concatenate([start + np.arange(chunk, dtype=np.int32) for start in starts])
    is_fused = S <= SPLASH_FUSED_TOKENS
    kernel = splash.make_splash_mqa(
        splash_mask.MultiHeadMask([mask] * (H // K)),
        head_shards=1,
        q_seq_shards=1 if cut is None else cut.devices,
        block_sizes=splash.BlockSizes(
            block_q=tile,
            block_kv=tile,
            block_kv_compute=tile,
            block_q_dkv=tile,
            block_kv_dkv=tile,
            block_kv_dkv_compute=tile,
            block_q_dq=None if is_fused else tile,
            block_kv_dq=None if is_fused else tile,
            use_fused_bwd_kernel=is_fused,
        ),
        interpret=target.platform() != "tpu",
    )
    if cut is not None:
        kernel = jax.tree.map(lambda x: _share_of(x, cut), kernel)

    def padded(x_BT: jax.Array, length: int) -> jax.Array:
        return jnp.pad(x_BT, [(0, 0), (0, length - x_BT.shape[1])] + [(0, 0)] * (x_BT.ndim - 2), mode="edge")

    q_BKRYD = (padded(q_BTHD, Y) * jnp.asarray(D**-0.5, q_BTHD.dtype)).reshape(B, Y, K, H // K, D)
    q_BKRYD = q_BKRYD.transpose(0, 2, 3, 1, 4)
    k_BKXD, v_BKXD = (jnp.moveaxis(padded(x, X), 1, 2) for x in (k_BTKD, v_BTKD))
    ids = None
    if segment_ids_BT is not None:
        ids_BX = padded(segment_ids_BT, X)
        ids = splash.SegmentIds(q=ids_BX if cut is None else segment_ids_BT[:, cut.positions(T)], kv=ids_BX)
    per_head = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    out_BKRYD = jax.vmap(per_head, in_axes=(0, 0, 0, None if ids is None else 0))(q_BKRYD, k_BKXD, v_BKXD, ids)
    return jnp.moveaxis(jnp.asarray(out_BKRYD), 3, 1).reshape(B, Y, H, D)[:, :T]


def _share_of(mask_info: jax.Array, cut: SequenceSharding) -> jax.Array:
    """Return this device's shard of an array of splash's `MaskInfo`: `[heads, query tiles, …]`, or `[queries]`."""
    axis = min(1, mask_info.ndim - 1)
    size = mask_info.shape[axis] // cut.devices
    return jax.lax.dynamic_slice_in_dim(mask_info, cut.device() * size, size, axis)


def _splash_tile(tokens: int, cut: SequenceSharding | None) -> int:
    """Return the side of a tile in tokens, a multiple of 128.

    If rows are sharded, the side divides a chunk. It is 0 if none of the supported sides does.
    """
    if cut is None:
        return min(SPLASH_TILE, -(-tokens // 128) * 128)
    chunk = tokens // (cut.devices * cut.chunks)
    return max((tile for tile in (128, 256, SPLASH_TILE) if chunk % tile == 0), default=0)


def splash_unsupported(q_BTHD: jax.Array, cut: SequenceSharding | None) -> str | None:
    """Return the reason why splash attention cannot serve a call, or None."""
    T = q_BTHD.shape[1]
    if cut is not None and not _splash_tile(T, cut):
        return f"rows of {T} tokens are cut in {cut.devices * cut.chunks}, which leaves no multiple of 128 tokens"
    if q_BTHD.dtype not in (jnp.bfloat16, jnp.float32):
        return f"splash attention takes bfloat16 or float32, not {q_BTHD.dtype}"
    return None
