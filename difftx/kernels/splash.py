"""Attention by JAX's splash attention on TPUs. Differential attention is a difference of two softmax attentions.

Splash attention is flash attention that skips tiles that the mask hides. It accepts values wider than keys, so
differential attention needs one call per group, each with all of V.
"""
# Axes: B = batch, T = query tokens on one device, S = key tokens of a whole row (= T unless rows are
#   sharded along their tokens), X = S padded to whole tiles, Y = T padded to whole tiles, H = query heads,
#   K = key/value heads, R = H / K = query heads per key/value head, G = groups (A1, A2), d = query/key width,
#   E = value width (d, or 2 d in differential attention)

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from difftx.kernels import target
from difftx.kernels.backend import SAVED, AttentionCall, difference, pad_to
from difftx.kernels.pallas_tpu_kernels import tile_side

MAX_SIDE = 512  # Default for the largest side of a tile in tokens.
FUSED_TOKENS = 4096  # Longest row for the fused backward pass. It stores one copy of dQ per key tile.


def attention(
    q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, segment_ids_BT, *, window, sharding=None, max_side=MAX_SIDE
) -> jax.Array:
    """Compute softmax attention, or (A1 - λ A2) V by one call of splash per group. The output is `[B, T, H, E]`.

    On platforms other than TPU, the Pallas interpreter runs. `max_side` is the largest side of a tile in tokens.
    """
    call = functools.partial(_softmax_attention, window=window, sharding=sharding, max_side=max_side)
    outs_BTHE = [call(q_BTHGd[..., g, :], k_BSKGd[..., g, :], v_BSKE, segment_ids_BT) for g in range(q_BTHGd.shape[3])]
    return outs_BTHE[0] if lam_BTH is None else difference(outs_BTHE[0], outs_BTHE[1], lam_BTH)


def _softmax_attention(q_BTHd, k_BSKd, v_BSKE, segment_ids_BT, *, window, sharding, max_side) -> jax.Array:
    # Splash's kernel computes one key/value head with its R query heads, has no batch axis and does not scale by 1/√d.
    B, T, H, d = q_BTHd.shape
    S, K = k_BSKd.shape[1:3]
    side = tile_side(S, sharding, max_side)
    X = -(-S // side) * side
    Y = X if sharding is None else T
    kernel = _kernel(X, T, H // K, side, window=window, is_fused=S <= FUSED_TOKENS, sharding=sharding)

    # Pad the rows with copies of the last token. The causal mask hides the copies from all real queries.
    padded = functools.partial(pad_to, axis=1, mode="edge")
    q_BKRYd = (padded(q_BTHd, Y) * jnp.asarray(d**-0.5, q_BTHd.dtype)).reshape(B, Y, K, H // K, d)
    q_BKRYd = q_BKRYd.transpose(0, 2, 3, 1, 4)
    k_BKXd, v_BKXE = (jnp.moveaxis(padded(x, X), 1, 2) for x in (k_BSKd, v_BSKE))
    ids = None
    if segment_ids_BT is not None:
        ids_BX = padded(segment_ids_BT, X)
        ids = splash.SegmentIds(q=ids_BX if sharding is None else segment_ids_BT[:, sharding.positions(T)], kv=ids_BX)
    per_head = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    out_BKRYE = jax.vmap(per_head, in_axes=(0, 0, 0, None if ids is None else 0))(q_BKRYd, k_BKXd, v_BKXE, ids)
    return jnp.moveaxis(jnp.asarray(out_BKRYE), 3, 1).reshape(B, Y, H, -1)[:, :T]


def _kernel(X, T, R, side, *, window, is_fused, sharding) -> splash.SplashAttentionKernel:
    """Return splash's kernel for one key/value head. With `is_fused`, one kernel instead of two computes gradients."""
    mask = splash_mask.CausalMask((X, X))
    if window is not None:
        mask = splash_mask.LocalMask((X, X), (window - 1, 0), offset=0)
    if sharding is not None:  # List the query positions of all devices, in the order of their chunks.
        chunk = T // sharding.chunks
        starts = [start for device in range(sharding.devices) for start in sharding.starts(device, chunk)]
        mask.q_sequence = np.concatenate([start + np.arange(chunk, dtype=np.int32) for start in starts])
    sides = ["block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"]
    if not is_fused:
        sides += ["block_q_dq", "block_kv_dq"]
    kernel = splash.make_splash_mqa(
        splash_mask.MultiHeadMask([mask] * R),
        head_shards=1,
        q_seq_shards=1 if sharding is None else sharding.devices,
        block_sizes=splash.BlockSizes(**dict.fromkeys(sides, side), use_fused_bwd_kernel=is_fused),
        residual_checkpoint_name=SAVED,
        interpret=target.platform() != "tpu",
    )
    if sharding is None:
        return kernel

    # The kernel's mask arrays, [heads, query tiles, …] or [queries], cover the queries of all devices. Select this
    # device's slice.
    def of_this_device(mask_info: jax.Array) -> jax.Array:
        axis = min(1, mask_info.ndim - 1)
        size = mask_info.shape[axis] // sharding.devices
        return jax.lax.dynamic_slice_in_dim(mask_info, sharding.device() * size, size, axis)

    return jax.tree.map(of_this_device, kernel)


def unsupported(call: AttentionCall, max_side: int = MAX_SIDE) -> str | None:
    """Return why splash attention cannot serve a call, or None if it can."""
    T = call.q.shape[1]
    side = tile_side(T, call.sharding, max_side)
    if max_side != MAX_SIDE and side == tile_side(T, call.sharding, MAX_SIDE):
        return f"rows of {T} tokens get tiles of {side} tokens in any case"
    if call.sharding is not None and not side:
        return f"{T} tokens in {call.sharding.row_chunks} chunks per row leave no tile of a multiple of 128 tokens"
    if call.q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"splash attention supports bfloat16 and float32, not {call.q.dtype}"
    return None
