"""Gradients of the loss by the logits of both softmaxes of differential attention, for analysis.

Backends do not return these gradients, which have one number per pair of tokens. This module reduces them to sums over
keys, in chunks of queries, so its result is linear in the length of a row.
"""
# Axes: B = batch, T = query tokens, S = key tokens (= T), C = query tokens of a chunk, H = query heads,
#   K = key/value heads, R = H / K = query heads per key/value head, G = 2 groups of queries and keys,
#   d = width of a query/key sub-head, E = width of a value head

from typing import Any

import jax
import jax.numpy as jnp

from difftx.kernels import weight_functions, xla
from difftx.kernels.backend import broadcast_to_tokens, per_shard


def logit_gradient_products(
    q_BTHGd: jax.Array,
    k_BSKGd: jax.Array,
    v_BSKE: jax.Array,
    lam: jax.Array,
    dout_BTHE: jax.Array,
    *,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Return |dS1|², |dS2|² and dS1·dS2 of each query, summed over keys, for head = (A1 - λ A2) V.

    The result is float32 `[B, T, H, 3]`. S1 and S2 are the logits of A1 and A2 after the factor 1/√d. With dP = dO Vᵀ,
    dS1 = A1 ∘ (dP - rowsum(A1 ∘ dP)) and dS2 = -λ A2 ∘ (dP - rowsum(A2 ∘ dP)).

    Args:
        q_BTHGd, k_BSKGd, lam, segment_ids_BT, window: As in `difftx.kernels.diff_attention`.
        v_BSKE: Values of any width E.
        dout_BTHE: Gradient of the loss by the outputs of the heads.
    """
    lam_BTH = broadcast_to_tokens(lam, q_BTHGd)

    def on_device(q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, dout_BTHE, segment_ids_BT) -> jax.Array:
        B, T, H = q_BTHGd.shape[:3]
        K = k_BSKGd.shape[2]

        def chunk(arrays: dict[str, Any]) -> jax.Array:
            dp_BKRCS = xla.einsum("BSKE,BKRCE->BKRCS", v_BSKE, xla.split_heads(arrays["dout"], K))
            factors = 1, -xla.split_heads(arrays["lam"], K)[..., None]
            by_group, ds_BKRCS = xla.masked_logits(arrays, k_BSKGd, segment_ids_BT, window), []
            for factor, logits_BKRCS in zip(factors, by_group, strict=True):
                weights_BKRCS = weight_functions.softmax(logits_BKRCS)
                mean_BKRC1 = jnp.sum(weights_BKRCS * dp_BKRCS, axis=-1, keepdims=True)
                ds_BKRCS.append(factor * (weights_BKRCS * (dp_BKRCS - mean_BKRC1)))
            ds1_BKRCS, ds2_BKRCS = ds_BKRCS
            products = ds1_BKRCS**2, ds2_BKRCS**2, ds1_BKRCS * ds2_BKRCS
            return jnp.moveaxis(jnp.stack([jnp.sum(x, axis=-1) for x in products], axis=-1), 3, 1)

        all_chunks = xla.chunks(segment_ids_BT, None, q=q_BTHGd, lam=lam_BTH, dout=dout_BTHE)
        return xla.joined(jax.lax.map(chunk, all_chunks), T).reshape(B, T, H, 3)

    return per_shard(on_device, q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, dout_BTHE, segment_ids_BT)
