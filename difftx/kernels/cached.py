"""Attention of new tokens to cached ones and to each other, in XLA's own operations: prefill, decode, scoring.

The cache is only read here; what new tokens add to it is written for all layers at once (difftx/inference/cache.py).
Keys and values are cached with heads before tokens, as both products want them: nothing of the cache is transposed.
"""
#   B = batch, T = U = new tokens, S = slots of the cache, H = heads, K = key/value heads,
#   R = H / K query heads a key/value head, G = groups (2: A1 and A2; 1: softmax attention), D = width of a sub-head,
#   E = width of a value head

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from difftx.kernels import fused, target
from difftx.kernels.maps import Map

EMPTY = -1  # Segment of a slot, or of a filler token, that no token shall see.

# A layer's cache: keys [B, K, G, S, D], or [B, K, S, D] for softmax attention, and values [B, K, S, E].
type Past = tuple[jax.Array, ...]


class Ids(NamedTuple):
    """Which keys a token sees, int32: the cached ones of its segment, and new ones of its segment and branch up to it.

    Branches continue one cached context in several ways side by side, in one row.
    """

    segment_BT: jax.Array
    branch_BT: jax.Array
    cached_segment_BS: jax.Array


def mapped_attention(
    map_of: Map,
    q: jax.Array,
    k: jax.Array,
    v_BTKE: jax.Array,
    past: Past,
    ids: Ids,
    *,
    per_query: jax.Array | None = None,
) -> jax.Array:
    """Attention by a map of `difftx.kernels.maps` over cached and new tokens; see `difftx.kernels.mapped_attention`.

    The maps of groups are joined in float32, P1 - λ P2 say; then there is one product with V.
    """
    q_BTHGD, k_BTKGD = (x if x.ndim == 5 else x[:, :, :, None] for x in (q, k))
    per_query_BTH = None if per_query is None else fused.lam_per_token(per_query, q_BTHGD)
    operands = (q_BTHGD, k_BTKGD, v_BTKE, per_query_BTH, *ids, fused.Saved(by_head=past))
    return fused.per_shard(functools.partial(_attend, map_of), *operands, saves=False)


def _attend(
    map_of, q_BTHGD, k_BUKGD, v_BUKE, per_query_BTH, segment_BT, branch_BT, cached_segment_BS, saved: fused.Saved
):
    """On one device: its rows and heads."""
    keys, values_BKSE = saved.by_head
    B, T, H, G, D = q_BTHGD.shape
    K, E = v_BUKE.shape[2:]
    S = cached_segment_BS.shape[1]
    q_BTKRGD = q_BTHGD.reshape(B, T, K, H // K, G, D)
    same_BTU = (segment_BT[:, :, None] == segment_BT[:, None]) & (branch_BT[:, :, None] == branch_BT[:, None])
    seen_BTX = jnp.concatenate(
        [segment_BT[:, :, None] == cached_segment_BS[:, None], same_BTU & jnp.tri(T, dtype=bool)[None]], axis=2
    )
    keys_BKGSD = keys.reshape(B, K, G, S, D)
    logits_BKGRTX = jnp.concatenate(
        [
            einsum("BTKRGD,BKGSD->BKGRTS", q_BTKRGD, keys_BKGSD),
            einsum("BTKRGD,BUKGD->BKGRTU", q_BTKRGD, k_BUKGD),
        ],
        axis=-1,
    )
    # A token sees itself at least, so that no row is masked throughout.
    logits_BKGRTX = jnp.where(seen_BTX[:, None, None, None], logits_BKGRTX * D**-0.5, -jnp.inf)
    map_inputs = [logits_BKGRTX[:, :, g] for g in range(G)]
    if per_query_BTH is not None:
        map_inputs.append(jnp.moveaxis(per_query_BTH.reshape(B, T, K, H // K), 1, 3)[..., None])
    map_BKRTX = map_of(*map_inputs).astype(v_BUKE.dtype)
    out_BKRTE = einsum("BKRTS,BKSE->BKRTE", map_BKRTX[..., :S], values_BKSE)
    out_BKRTE += einsum("BKRTU,BUKE->BKRTE", map_BKRTX[..., S:], v_BUKE)
    return jnp.moveaxis(out_BKRTE.astype(v_BUKE.dtype), 3, 1).reshape(B, T, H, E)


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a product accumulated in float32."""
    if target.platform() == "cpu":  # XLA has not all products of bfloat16 there (jaxlib 0.12.0: "BF16 x BF16 = F32").
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
