"""Attention with any weight function of `maps.py`, by XLA operations, for cases that fused kernels do not support.

Memory is linear in the length of a row: the queries are processed in chunks, as in `xla.py`, and the backward pass
recomputes each chunk's attention weights. JAX derives the gradient.
"""
#   B = batch, T = query tokens, S = key tokens, C = query tokens of a chunk, H = query heads, K = key/value heads,
#   R = H / K = query heads per key/value head, G = groups of queries and keys, D = width of a query/key sub-head,
#   E = width of a value head

from typing import Any

import jax
import jax.numpy as jnp

from difftx.kernels import xla
from difftx.kernels.context import SequenceSharding
from difftx.kernels.maps import Map


def attention(
    map_of: Map,
    q_BTHGD: jax.Array,
    k_BSKGD: jax.Array,
    v_BSKE: jax.Array,
    per_query_BTH: jax.Array | None,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    cut: SequenceSharding | None = None,
) -> jax.Array:
    """Compute attention in chunks of queries and return `[B, T, H, E]`.

    The arguments are those of `difftx.kernels.mapped_attention`.
    """
    B, T, H, G, _ = q_BTHGD.shape
    K, dtype = k_BSKGD.shape[2], v_BSKE.dtype
    # The gradients of keys and values are sums over chunks. They accumulate in float32 because the loop's inputs do.
    wide = jnp.promote_types(dtype, jnp.float32)
    k_BSKGD, v_BSKE = k_BSKGD.astype(wide), v_BSKE.astype(wide)

    @jax.checkpoint
    def chunk(rows: dict[str, Any]) -> jax.Array:
        logits_BKRGCS = xla.masked_logits(rows, k_BSKGD.astype(dtype), segment_ids_BT, window)
        map_inputs = [logits_BKRGCS[:, :, :, g] for g in range(G)]
        if per_query_BTH is not None:
            map_inputs.append(xla.per_query(rows["per_query"], K))
        map_BKRCS = map_of(*map_inputs)
        out_BCKRE = xla.einsum("BKRCS,BSKE->BCKRE", map_BKRCS.astype(dtype), v_BSKE.astype(dtype))
        return out_BCKRE.astype(dtype)

    per_query = {} if per_query_BTH is None else {"per_query": per_query_BTH}
    out = jax.lax.map(chunk, xla.chunks(segment_ids_BT, cut, q=q_BTHGD, **per_query))
    return xla.joined(out, T).reshape(B, T, H, -1)
