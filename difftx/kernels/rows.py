"""Attention weights of a few selected queries, for analysis.

Attention backends do not return attention weights, so this module computes them for selected queries. The result
`[B, C, H, S]` covers all heads but only C queries, so its size is linear in the length of a row.
"""
# Axes: B = batch, T = query tokens, S = key tokens (= T), C = selected queries, H = query heads,
#   K = key/value heads, R = H / K = query heads per key/value head,
#   G = groups (2 for A1 and A2, 1 for softmax attention), d = width of a query/key sub-head

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from difftx.kernels.backend import broadcast_to_tokens, per_shard
from difftx.kernels.cached import einsum
from difftx.kernels.weight_functions import WeightFunction, difference


class AttentionRows(NamedTuple):
    """Attention weights and logits of selected queries in one layer, float32."""

    weights_BCHS: jax.Array  # The weights that multiply V, such as A1 - λ A2.
    logits_BCHGS: jax.Array  # Logits of each group, scaled by 1/√d. They are minus infinity for masked keys.
    lam_BCH: jax.Array | None  # λ per query for weights A1 - λ A2 with A_g = softmax(logits_g). Other weights: None.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionWeights:
    """Attention weights of one layer, float32 `[H, T, T]` or `[B, H, T, T]` (heads, queries, keys).

    For architectures without a second attention, `a1` equals `difference`, and `a2` and `lam` are None.
    """

    a1: Any
    a2: Any | None
    lam: Any | None  # λ of each head and query, `[…, H, T, 1]`. `difference` is `a1 - lam * a2`.
    difference: Any  # The weights that multiply the values.

    @classmethod
    def of(cls, rows: AttentionRows) -> "AttentionWeights":
        """Convert `AttentionRows` to attention weights `[B, H, C, S]`."""
        difference_BHCS = jnp.moveaxis(rows.weights_BCHS, 1, 2)
        if rows.lam_BCH is None:
            return cls(difference_BHCS, None, None, difference_BHCS)
        a_BHGCS = jax.nn.softmax(jnp.moveaxis(rows.logits_BCHGS, 1, 3), axis=-1)
        lam_BHC1 = jnp.moveaxis(rows.lam_BCH, 1, 2)[..., None]
        return cls(a_BHGCS[:, :, 0], a_BHGCS[:, :, 1], lam_BHC1, difference_BHCS)


def attention_rows(
    weight_function: WeightFunction,
    q_BTHGd: jax.Array,
    k_BSKGd: jax.Array,
    queries_BC: jax.Array,
    *,
    weight_argument: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
) -> AttentionRows:
    """Return the causal attention weights of the queries at the int32 row positions `queries_BC`.

    `difftx.kernels.weighted_attention` documents the other arguments. Each device must hold whole rows.
    """
    weight_argument_BTH = None if weight_argument is None else broadcast_to_tokens(weight_argument, q_BTHGd)
    operands = (q_BTHGd, k_BSKGd, weight_argument_BTH, queries_BC, segment_ids_BT)
    weights_BCHS, logits_BCHGS, *argument_BCH = per_shard(functools.partial(_rows, weight_function, window), *operands)
    return AttentionRows(weights_BCHS, logits_BCHGS, argument_BCH[0] if weight_function is difference else None)


def _rows(
    weight_function, window, q_BTHGd, k_BSKGd, weight_argument_BTH, queries_BC, segment_ids_BT
) -> tuple[jax.Array, ...]:
    B, C = queries_BC.shape
    S, K, G, d = k_BSKGd.shape[1:]
    H = q_BTHGd.shape[2]
    q_BCHGd = jnp.take_along_axis(q_BTHGd, queries_BC[:, :, None, None, None], axis=1)
    logits_BCKRGS = einsum("BCKRGd,BSKGd->BCKRGS", q_BCHGd.reshape(B, C, K, H // K, G, d), k_BSKGd) * d**-0.5
    distance_BCS = queries_BC[:, :, None] - jnp.arange(S)[None, None]
    seen_BCS = distance_BCS >= 0
    if window is not None:
        seen_BCS &= distance_BCS < window
    if segment_ids_BT is not None:
        seen_BCS &= jnp.take_along_axis(segment_ids_BT, queries_BC, axis=1)[:, :, None] == segment_ids_BT[:, None]
    logits_BCHGS = jnp.where(seen_BCS[:, :, None, None], logits_BCKRGS.reshape(B, C, H, G, S), -jnp.inf)
    arguments = [logits_BCHGS[:, :, :, g] for g in range(G)]
    if weight_argument_BTH is None:
        return weight_function(*arguments), logits_BCHGS
    weight_argument_BCH = jnp.take_along_axis(weight_argument_BTH, queries_BC[:, :, None], axis=1)
    return weight_function(*arguments, weight_argument_BCH[..., None]), logits_BCHGS, weight_argument_BCH
