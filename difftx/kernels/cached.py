"""Attention of new tokens to a key/value cache and to each other, for prefill, decoding and scoring.

This module uses XLA operations and only reads the cache. `difftx/inference/cache.py` writes the new keys and values of
all layers in one update. In the cache, the heads axis precedes the tokens axis, as both matrix products expect, so
neither transposes the cache.

A cache may hold quantised keys and values. If it keeps only some tokens of a row, `Slots` records which.
"""
# Axes: B = batch, T = new tokens, U = T in the role of keys, S = slots of the cache,
#   X = S + T = cached and new keys, H = query heads, K = key/value heads, R = H / K = query heads per key/value head,
#   G = groups (2 for A1 and A2, 1 for softmax attention), d = width of a query/key sub-head, E = width of a value head

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from difftx.kernels import target
from difftx.kernels.backend import ShardedArrays, broadcast_to_tokens, per_shard
from difftx.kernels.quantized import dequantized
from difftx.kernels.weight_functions import WeightFunction
from difftx.kernels.xla import split_heads

EMPTY = -1  # Segment id of empty cache slots and padding tokens. Real tokens never attend to them.

# Key/value cache of one layer: keys [B, K, G, S, d] and values [B, K, S, E], arrays or `Quantized`. A cache that evicts
# tokens also has `Slots`.
type KVCache = tuple[Any, ...]


class Slots(NamedTuple):
    """Records which token each slot of each key/value head holds, if a cache keeps only some tokens of a row."""

    position_BKS: jax.Array  # Position of the token in its row, int32, or `EMPTY`.
    mass_BKS: jax.Array  # Sum of all |attention weights| on the token so far, float32.


class SegmentMask(NamedTuple):
    """Segment, branch and position of each token (int32). They determine the attention mask.

    Branches are alternative continuations of the same cached context, in one row. A token attends to the cached keys of
    its segment, and to the new keys of its segment and branch up to itself. With a window, it attends only to keys at a
    distance below the window.
    """

    segment_BT: jax.Array
    branch_BT: jax.Array
    position_BT: jax.Array  # Position of each new token in its row. Without `Slots`, cache slot i holds position i.
    cached_segment_BS: jax.Array


def weighted_attention(
    weight_function: WeightFunction,
    q_BTHGd: jax.Array,
    k_BTKGd: jax.Array,
    v_BTKE: jax.Array,
    cache: KVCache,
    segments: SegmentMask,
    *,
    weight_argument: jax.Array | None = None,
    window: int | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Compute the attention of new tokens to cached and new tokens (see `difftx.kernels.weighted_attention`).

    If the cache has `Slots`, the second result is how much attention the new tokens pay, as a float32 sum of |attention
    weights|, to each new token, `[B, T, K]`, and to each slot, `[B, K, S]`. If not, the second result is empty.
    """
    weight_argument_BTH = None if weight_argument is None else broadcast_to_tokens(weight_argument, q_BTHGd)
    operands = (q_BTHGd, k_BTKGd, v_BTKE, weight_argument_BTH, *segments, ShardedArrays(by_head=cache))
    attend = functools.partial(_attend, weight_function, window)
    out_BTHE, mass = per_shard(attend, *operands, returns_more=True)
    return out_BTHE, (*mass.by_token, *mass.by_head)


def _attend(
    weight_function: WeightFunction,
    window: int | None,
    q_BTHGd: jax.Array,
    k_BUKGd: jax.Array,
    v_BUKE: jax.Array,
    weight_argument_BTH: jax.Array | None,
    segment_BT: jax.Array,
    branch_BT: jax.Array,
    position_BT: jax.Array,
    cached_segment_BS: jax.Array,
    cache: ShardedArrays,
) -> tuple[jax.Array, ShardedArrays]:
    """Compute the results of `weighted_attention` for the shard of one device."""
    segments = SegmentMask(segment_BT, branch_BT, position_BT, cached_segment_BS)
    keys_BKGSd, values_BKSE, *slots = cache.by_head
    keys_BKGSd, values_BKSE = dequantized(keys_BKGSd), dequantized(values_BKSE)
    B, T, H, G, d = q_BTHGd.shape
    K, E = v_BUKE.shape[2:]
    S = keys_BKGSd.shape[3]
    q_BTKRGd = q_BTHGd.reshape(B, T, K, H // K, G, d)
    cached_logits_BKGRTS = einsum("BTKRGd,BKGSd->BKGRTS", q_BTKRGd, keys_BKGSd)
    logits_BKGRTX = jnp.concatenate([cached_logits_BKGRTS, einsum("BTKRGd,BUKGd->BKGRTU", q_BTKRGd, k_BUKGd)], axis=-1)
    # Every token attends to itself, so no row is masked completely.
    seen_BKTX = _visible(segments, slots[0].position_BKS if slots else None, window)
    logits_BKGRTX = jnp.where(seen_BKTX[:, :, None, None], logits_BKGRTX * d**-0.5, -jnp.inf)
    arguments = [logits_BKGRTX[:, :, g] for g in range(G)]
    if weight_argument_BTH is not None:
        arguments.append(split_heads(weight_argument_BTH, K)[..., None])
    weights_BKRTX = weight_function(*arguments)
    mass = _mass(weights_BKRTX, segment_BT) if slots else ShardedArrays()
    weights_BKRTX = weights_BKRTX.astype(v_BUKE.dtype)
    out_BKRTE = einsum("BKRTS,BKSE->BKRTE", weights_BKRTX[..., :S], values_BKSE)
    out_BKRTE += einsum("BKRTU,BUKE->BKRTE", weights_BKRTX[..., S:], v_BUKE)
    return jnp.moveaxis(out_BKRTE.astype(v_BUKE.dtype), 3, 1).reshape(B, T, H, E), mass


def _visible(segments: SegmentMask, cached_position_BKS: jax.Array | None, window: int | None) -> jax.Array:
    """Return the attention mask of new tokens over cached and new tokens, bool `[B, K, T, X]`.

    If the cache has no `Slots`, `cached_position_BKS` is None, and the mask's axis K has size 1.
    """
    segment_BT, branch_BT, position_BT, cached_segment_BS = segments
    same_BTU = (segment_BT[:, :, None] == segment_BT[:, None]) & (branch_BT[:, :, None] == branch_BT[:, None])
    if cached_position_BKS is None:
        cached_position_BKS = jnp.arange(cached_segment_BS.shape[1])[None, None]
        seen_cached_BKTS = (segment_BT[:, :, None] == cached_segment_BS[:, None])[:, None]
    else:
        seen_cached_BKTS = (segment_BT != EMPTY)[:, None, :, None] & (cached_position_BKS != EMPTY)[:, :, None]
    if window is not None:
        same_BTU &= position_BT[:, :, None] - position_BT[:, None] < window
        seen_cached_BKTS &= position_BT[:, None, :, None] - cached_position_BKS[:, :, None] < window
    T = segment_BT.shape[1]
    new_B1TU = (same_BTU & jnp.tri(T, dtype=bool)[None])[:, None]
    new_BKTU = jnp.broadcast_to(new_B1TU, (*seen_cached_BKTS.shape[:3], T))
    return jnp.concatenate([seen_cached_BKTS, new_BKTU], axis=3)


def _mass(weights_BKRTX: jax.Array, segment_BT: jax.Array) -> ShardedArrays:
    """Sum the |attention weights| of the new tokens on each new token and on each slot."""
    slots = weights_BKRTX.shape[-1] - segment_BT.shape[1]
    is_token_B11T1 = (segment_BT != EMPTY)[:, None, None, :, None]
    mass_BKX = jnp.sum(jnp.where(is_token_B11T1, jnp.abs(weights_BKRTX), 0), axis=(2, 3))
    return ShardedArrays(by_token=(jnp.moveaxis(mass_BKX[..., slots:], 2, 1),), by_head=(mass_BKX[..., :slots],))


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute an einsum with float32 accumulation."""
    if target.platform() == "cpu":  # XLA on CPUs lacks some bfloat16 products (jaxlib 0.12.0: "BF16 x BF16 = F32").
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
