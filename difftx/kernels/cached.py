"""Attention of new tokens to a key/value cache and to each other, for prefill, decoding and scoring.

This module uses XLA operations and only reads the cache. `difftx/inference/cache.py` writes the new keys and values of
all layers in one update. The heads axis of the cache precedes the tokens axis. Both matrix products expect this order,
so neither transposes the cache.
"""
# Axes: B = batch, T = new tokens, U = T in the role of keys, S = slots of the cache,
#   X = S + T = cached and new keys, H = query heads, K = key/value heads, R = H / K = query heads per key/value head,
#   G = groups (2 for A1 and A2, 1 for softmax attention), D = width of a query/key sub-head, E = width of a value head

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from difftx.kernels import target
from difftx.kernels.backend import Saved, lam_per_token, per_shard
from difftx.kernels.maps import Map
from difftx.kernels.xla import split_heads

EMPTY = -1  # Segment id of empty cache slots and padding tokens, to which real tokens never attend.

# Key/value cache of one layer: keys [B, K, G, S, D], or [B, K, S, D] for softmax attention, and values [B, K, S, E].
type KVCache = tuple[jax.Array, ...]


class SegmentMask(NamedTuple):
    """Segment, branch and position of each token, int32, which define the attention mask.

    A token attends to the cached keys of its segment, and to the new keys of its segment and branch up to itself.
    Branches are alternative continuations of one cached context that share a row. With a window, a token attends only
    to keys at a distance below the window.
    """

    segment_BT: jax.Array
    branch_BT: jax.Array
    position_BT: jax.Array  # Position of each new token in its row. The key in slot i of the cache has position i.
    cached_segment_BS: jax.Array


def mapped_attention(
    map_of: Map,
    q: jax.Array,
    k: jax.Array,
    v_BTKE: jax.Array,
    past: KVCache,
    ids: SegmentMask,
    *,
    per_query: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Compute the attention of new tokens to cached and new tokens (see `difftx.kernels.mapped_attention`)."""
    q_BTHGD, k_BTKGD = (x if x.ndim == 5 else x[:, :, :, None] for x in (q, k))
    per_query_BTH = None if per_query is None else lam_per_token(per_query, q_BTHGD)
    operands = (q_BTHGD, k_BTKGD, v_BTKE, per_query_BTH, *ids, Saved(by_head=past))
    return per_shard(functools.partial(_attend, map_of, window), *operands)


def _attend(map_of, window, q_BTHGD, k_BUKGD, v_BUKE, per_query_BTH, *ids_and_cache):
    segment_BT, branch_BT, position_BT, cached_segment_BS, saved = ids_and_cache
    keys, values_BKSE = saved.by_head
    B, T, H, G, D = q_BTHGD.shape
    K, E = v_BUKE.shape[2:]
    S = cached_segment_BS.shape[1]
    q_BTKRGD = q_BTHGD.reshape(B, T, K, H // K, G, D)
    same_BTU = (segment_BT[:, :, None] == segment_BT[:, None]) & (branch_BT[:, :, None] == branch_BT[:, None])
    cached_BTS = segment_BT[:, :, None] == cached_segment_BS[:, None]
    if window is not None:
        same_BTU &= position_BT[:, :, None] - position_BT[:, None] < window
        cached_BTS &= position_BT[:, :, None] - jnp.arange(S)[None, None] < window
    seen_BTX = jnp.concatenate([cached_BTS, same_BTU & jnp.tri(T, dtype=bool)[None]], axis=2)
    keys_BKGSD = keys.reshape(B, K, G, S, D)
    cached_BKGRTS = einsum("BTKRGD,BKGSD->BKGRTS", q_BTKRGD, keys_BKGSD)
    logits_BKGRTX = jnp.concatenate([cached_BKGRTS, einsum("BTKRGD,BUKGD->BKGRTU", q_BTKRGD, k_BUKGD)], axis=-1)
    # Every token attends to itself, so no row is masked completely.
    logits_BKGRTX = jnp.where(seen_BTX[:, None, None, None], logits_BKGRTX * D**-0.5, -jnp.inf)
    map_inputs = [logits_BKGRTX[:, :, g] for g in range(G)]
    if per_query_BTH is not None:
        map_inputs.append(split_heads(per_query_BTH, K)[..., None])
    map_BKRTX = map_of(*map_inputs).astype(v_BUKE.dtype)
    out_BKRTE = einsum("BKRTS,BKSE->BKRTE", map_BKRTX[..., :S], values_BKSE)
    out_BKRTE += einsum("BKRTU,BUKE->BKRTE", map_BKRTX[..., S:], v_BUKE)
    return jnp.moveaxis(out_BKRTE.astype(v_BUKE.dtype), 3, 1).reshape(B, T, H, E)


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product of two arrays, accumulated in float32."""
    if target.platform() == "cpu":  # XLA lacks some bfloat16 products on CPUs (jaxlib 0.12.0: "BF16 x BF16 = F32").
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
