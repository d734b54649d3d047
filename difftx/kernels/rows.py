"""A few rows of the maps that multiply V, to be looked at: what attends computes them in chunks, or not at all.

Rows of all heads at once, `[B, C, H, S]`, but of few queries: memory is linear in the length of a row.
"""
#   B = batch, T = query tokens, S = key tokens (= T), C = queries that are looked at, H = heads, K = key/value heads,
#   R = H / K query heads a key/value head, G = groups (2: A1 and A2; 1: softmax attention), D = width of a sub-head

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from difftx.kernels import fused, maps
from difftx.kernels.cached import einsum
from difftx.kernels.maps import Map


class MapRows(NamedTuple):
    """What some queries of a layer attend to, float32."""

    map_BCHS: jax.Array  # What multiplies V: A, or A1 - λ A2.
    logits_BCHGS: jax.Array  # Of each group, scaled; minus infinity where the query does not see the key.
    lam_BCH: jax.Array | None  # λ of each query, where the map is A1 - λ A2 with A_g = softmax(logits of g).


def map_rows(
    map_of: Map,
    q: jax.Array,
    k: jax.Array,
    queries_BC: jax.Array,
    *,
    per_query: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
) -> MapRows:
    """Return rows of causal maps.

    Args:
        map_of: how logits become the map.
        q: queries `[B, T, H, D]`, or `[B, T, H, G, D]` in groups, as many as the map takes; whole rows on each device.
        k: keys `[B, S, K, D]` or `[B, S, K, G, D]`.
        queries_BC: int32: the tokens whose rows to return.
        per_query: what the map takes besides: a scalar, one for each head, `[H]`, or `[B, T, H]`.
        segment_ids_BT: int32; a token sees only its own segment. None: one segment a row.
    """
    q_BTHGD, k_BSKGD = (x if x.ndim == 5 else x[:, :, :, None] for x in (q, k))
    per_query_BTH = None if per_query is None else fused.lam_per_token(per_query, q_BTHGD)
    call = functools.partial(_rows, map_of)
    map_BCHS, logits_BCHGS, *per_query_BCH = fused.per_shard(
        call, q_BTHGD, k_BSKGD, per_query_BTH, queries_BC, segment_ids_BT, saves=False
    )
    return MapRows(map_BCHS, logits_BCHGS, per_query_BCH[0] if map_of is maps.difference else None)


def _rows(map_of, q_BTHGD, k_BSKGD, per_query_BTH, queries_BC, segment_ids_BT) -> tuple[jax.Array, ...]:
    """On one device: its rows and heads."""
    B, C = queries_BC.shape
    S, K, G, D = k_BSKGD.shape[1:]
    H = q_BTHGD.shape[2]
    q_BCHGD = jnp.take_along_axis(q_BTHGD, queries_BC[:, :, None, None, None], axis=1)
    logits_BCKRGS = einsum("BCKRGD,BSKGD->BCKRGS", q_BCHGD.reshape(B, C, K, H // K, G, D), k_BSKGD) * D**-0.5
    seen_BCS = jnp.arange(S)[None, None] <= queries_BC[:, :, None]
    if segment_ids_BT is not None:
        seen_BCS &= jnp.take_along_axis(segment_ids_BT, queries_BC, axis=1)[:, :, None] == segment_ids_BT[:, None]
    logits_BCHGS = jnp.where(seen_BCS[:, :, None, None], logits_BCKRGS.reshape(B, C, H, G, S), -jnp.inf)
    map_inputs = [logits_BCHGS[:, :, :, g] for g in range(G)]
    if per_query_BTH is None:
        return map_of(*map_inputs), logits_BCHGS
    per_query_BCH = jnp.take_along_axis(per_query_BTH, queries_BC[:, :, None], axis=1)
    return map_of(*map_inputs, per_query_BCH[..., None]), logits_BCHGS, per_query_BCH
