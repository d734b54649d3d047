"""Reference attention, computed with the formulas in `weight_functions.py` in float32 or wider, with O(T²) memory.

Tests compare all other backends with this module.
"""
# Axes: B = batch, T = query tokens, S = key tokens, H = query heads, K = key/value heads,
#   G = groups (2 for A1 and A2, 1 for softmax attention), d = width of a query/key sub-head, E = width of a value head

import jax
import jax.numpy as jnp
import numpy as np

from difftx.kernels.context import SequenceSharding
from difftx.kernels.weight_functions import WeightFunction


def weighted_attention(
    weight_function: WeightFunction, q_BTHGd, k_BSKGd, v_BSKE, weight_argument_BTH, segment_ids_BS=None, **options
) -> jax.Array:
    """Compute attention with `weight_function`. `difftx.kernels.weighted_attention` documents the arguments."""
    arguments = [*jnp.moveaxis(_logits(q_BTHGd, k_BSKGd, segment_ids_BS, **options), 2, 0)]
    if weight_argument_BTH is not None:
        arguments.append(jnp.moveaxis(weight_argument_BTH, 2, 1)[..., None])
    weights_BHTS = weight_function(*arguments)
    v_BSHE = jnp.repeat(v_BSKE, weights_BHTS.shape[1] // v_BSKE.shape[2], axis=2).astype(weights_BHTS.dtype)
    return jnp.einsum("BHTS,BSHE->BTHE", weights_BHTS, v_BSHE).astype(v_BSKE.dtype)


def _logits(
    q_BTHGd: jax.Array,
    k_BSKGd: jax.Array,
    segment_ids_BS: jax.Array | None,
    *,
    window: int | None,
    sharding: SequenceSharding | None = None,
) -> jax.Array:
    """Return the logits Q Kᵀ / √d of each group, `[B, H, G, T, S]`, minus infinity for masked keys."""
    dtype = np.promote_types(q_BTHGd.dtype, jnp.float32)
    k_BSHGd = jnp.repeat(k_BSKGd, q_BTHGd.shape[2] // k_BSKGd.shape[2], axis=2).astype(dtype)
    logits_BHGTS = jnp.einsum("BTHGd,BSHGd->BHGTS", q_BTHGd.astype(dtype), k_BSHGd) * q_BTHGd.shape[-1] ** -0.5
    query_S1, key_1S = jnp.arange(k_BSKGd.shape[1])[:, None], jnp.arange(k_BSKGd.shape[1])[None, :]
    seen_BTS = (key_1S <= query_S1)[None]
    if window is not None:
        seen_BTS &= (query_S1 - key_1S < window)[None]
    if segment_ids_BS is not None:
        seen_BTS = seen_BTS & (segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :])
    if sharding is not None:
        seen_BTS = seen_BTS[:, sharding.positions(q_BTHGd.shape[1])]
    return jnp.where(seen_BTS[:, None, None], logits_BHGTS, -jnp.inf)
