"""Reference attention, written as in the paper, in float32 or wider, with O(T²) memory.

All other backends are checked against this module.
"""
#   B = batch, T = query tokens, S = key tokens, H = query heads, K = key/value heads, G = groups (2: A1 and A2),
#   D = width of a query/key sub-head, E = width of a value head

import jax
import jax.numpy as jnp

from difftx.kernels.context import SequenceSharding
from difftx.kernels.maps import Map


def diff_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lam_BTH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    window: int | None,
    cut: SequenceSharding | None = None,
) -> jax.Array:
    """Compute differential attention, Eq. 1 of arXiv 2410.05258, with λ `[B, T, H]`.

    The other arguments are those of `difftx.kernels.diff_attention`.
    """
    maps_BHGTS = attention_maps(q, k, segment_ids_BT, window=window, cut=cut)
    map_BHTS = maps_BHGTS[:, :, 0] - jnp.moveaxis(lam_BTH, 2, 1)[..., None] * maps_BHGTS[:, :, 1]
    v_BSHE = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2).astype(map_BHTS.dtype)
    return jnp.einsum("BHTS,BSHE->BTHE", map_BHTS, v_BSHE).astype(v.dtype)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    window: int | None,
    cut: SequenceSharding | None = None,
) -> jax.Array:
    """Compute softmax attention with the arguments of `difftx.kernels.attention`."""
    maps_BHGTS = attention_maps(q[:, :, :, None], k[:, :, :, None], segment_ids_BT, window=window, cut=cut)
    v_BSHD = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2).astype(maps_BHGTS.dtype)
    return jnp.einsum("BHTS,BSHD->BTHD", maps_BHGTS[:, :, 0], v_BSHD).astype(v.dtype)


def attention_maps(
    q_BTHGD: jax.Array,
    k_BSKGD: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    window: int | None = None,
    cut: SequenceSharding | None = None,
) -> jax.Array:
    """Return the attention weights softmax(Q Kᵀ / √D) of each group, `[B, H, G, T, S]`.

    The dtype is float32, or float64 for float64 inputs.
    """
    return jax.nn.softmax(_logits(q_BTHGD, k_BSKGD, segment_ids_BT, window, cut), axis=-1)


def mapped_attention(
    map_of: Map,
    q_BTHGD: jax.Array,
    k_BSKGD: jax.Array,
    v: jax.Array,
    per_query_BTH: jax.Array | None,
    segment_ids_BT: jax.Array | None = None,
    *,
    window: int | None,
    cut: SequenceSharding | None = None,
) -> jax.Array:
    """Compute attention with the weight function `map_of`.

    The other arguments are those of `difftx.kernels.mapped_attention`.
    """
    map_inputs = [*jnp.moveaxis(_logits(q_BTHGD, k_BSKGD, segment_ids_BT, window, cut), 2, 0)]
    if per_query_BTH is not None:
        map_inputs.append(jnp.moveaxis(per_query_BTH, 2, 1)[..., None])
    map_BHTS = map_of(*map_inputs)
    v_BSHE = jnp.repeat(v, q_BTHGD.shape[2] // v.shape[2], axis=2).astype(map_BHTS.dtype)
    return jnp.einsum("BHTS,BSHE->BTHE", map_BHTS, v_BSHE).astype(v.dtype)


def _logits(
    q_BTHGD: jax.Array,
    k_BSKGD: jax.Array,
    segment_ids_BS: jax.Array | None,
    window: int | None,
    cut: SequenceSharding | None,
) -> jax.Array:
    """Return the logits Q Kᵀ / √D of each group, `[B, H, G, T, S]`, minus infinity for masked keys."""
    dtype = jnp.promote_types(q_BTHGD.dtype, jnp.float32)
    k_BSHGD = jnp.repeat(k_BSKGD, q_BTHGD.shape[2] // k_BSKGD.shape[2], axis=2).astype(dtype)
    logits_BHGTS = jnp.einsum("BTHGD,BSHGD->BHGTS", q_BTHGD.astype(dtype), k_BSHGD) * q_BTHGD.shape[-1] ** -0.5
    seen_BTS = visible(k_BSKGD.shape[1], segment_ids_BS, window=window)
    if cut is not None:
        seen_BTS = seen_BTS[:, cut.positions(q_BTHGD.shape[1])]
    return jnp.where(seen_BTS[:, None, None], logits_BHGTS, -jnp.inf)


def visible(tokens: int, segment_ids_BT: jax.Array | None, *, window: int | None) -> jax.Array:
    """Return the attention mask, bool `[B or 1, T, S]`, True for keys that a query attends to.

    The mask is causal and limited to the query's segment and window.
    """
    query_T1 = jnp.arange(tokens)[:, None]
    key_1S = jnp.arange(tokens)[None, :]
    seen_BTS = (key_1S <= query_T1)[None]
    if window is not None:
        seen_BTS &= (query_T1 - key_1S < window)[None]
    if segment_ids_BT is not None:
        seen_BTS = seen_BTS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])
    return seen_BTS
