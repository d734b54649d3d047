"""Functions that compute attention weights from logits: softmax, the difference of two softmaxes, and variants.

A weight function takes one array of logits per group and, in some cases, one number per query, all float32. The logits
of masked keys are minus infinity or `MASKED`. The logits must cover all keys of a query, so fused kernels with an
online softmax cannot call weight functions.
"""
# Axes: C = queries, S = keys. The names omit the leading axes (batch, heads).

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

MASKED = -1e30  # Logit of a masked key. With minus infinity, a query without visible keys would get NaN weights.

# Maps the logits [..., C, S] of each group, and optionally one number per query [..., C, 1], to attention weights
# [..., C, S].
type WeightFunction = Callable[..., jax.Array]


def softmax(logits_CS: jax.Array) -> jax.Array:
    """Return the softmax over keys."""
    return jax.nn.softmax(logits_CS, axis=-1)


def difference(logits1_CS: jax.Array, logits2_CS: jax.Array, lam_C1: jax.Array) -> jax.Array:
    """Return the differential attention weights A1 - λ A2, Eq. 1 of arXiv 2410.05258."""
    return softmax(logits1_CS) - lam_C1 * softmax(logits2_CS)


def softmax_with_sink(logits_CS: jax.Array, sink_C1: jax.Array) -> jax.Array:
    """Return exp(z) / (exp(s) + Σ exp(z)), the softmax with an attention sink of logit s.

    The sink acts as one more key with a value of zero, so the weights of a query sum to less than 1. s = 0 gives
    softmax-off-by-one (E. Miller, "Attention is off by one", 2023). gpt-oss learns one s per head.
    """
    largest_C1 = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits_CS, axis=-1, keepdims=True), sink_C1))
    weights_CS = jnp.exp(logits_CS - largest_C1)
    return weights_CS / (jnp.exp(sink_C1 - largest_C1) + jnp.sum(weights_CS, axis=-1, keepdims=True))


def top_k_softmax(logits_CS: jax.Array, *, k: int) -> jax.Array:
    """Return the softmax over the k largest logits of each query (explicit sparse attention, arXiv 1912.11637).

    Logits equal to the k-th largest are kept too. A query with fewer than k visible keys attends to all of them.
    """
    largest_Ck = jax.lax.top_k(jax.lax.stop_gradient(logits_CS), min(k, logits_CS.shape[-1]))[0]
    return softmax(jnp.where(logits_CS >= largest_Ck[..., -1:], logits_CS, -jnp.inf))


def signed_softmax(logits1_CS: jax.Array, logits2_CS: jax.Array) -> jax.Array:
    """Return softmax(logits1) ∘ tanh(logits2): softmax weights, each with a learned sign and scale."""
    return softmax(logits1_CS) * jnp.tanh(logits2_CS)


def quantized(
    *arguments: jax.Array,
    weight_function: WeightFunction,
    groups: int,
    bits: int,
    granularity: Literal["query", "token"],
    mesh_axes: tuple[str, ...] | str | None = None,
) -> jax.Array:
    """Quantise the logits to `bits` (at least 2) bits, then call `weight_function`.

    The quantisation is dynamic absmax: each logit z becomes z' = s round(z / s) with s = max|z| / (2^(bits-1) - 1), so
    |z' - z| <= s / 2. The backward pass treats z' as z (straight-through estimator, arXiv 1308.3432). The maximum is
    over the visible keys of one query, so it does not depend on later tokens, on chunks, on the batch or on a cache.

    The first `groups` arguments are logits. Other arguments reach `weight_function` unchanged. With `granularity` =
    "query", each head and group of a query has its own scale s. With "token", all heads and groups of a query share one
    scale. Inside `jax.shard_map`, "token" requires `mesh_axes`, the names of the mesh axes that shard the heads.
    """
    logits, others = arguments[:groups], arguments[groups:]
    largest = [jnp.max(jnp.where(z_CS > MASKED, jnp.abs(z_CS), 0), axis=-1, keepdims=True) for z_CS in logits]
    largest = [jax.lax.stop_gradient(largest_C1) for largest_C1 in largest]
    if granularity == "token":
        heads = tuple(range(1, logits[0].ndim - 2))
        of_token = functools.reduce(jnp.maximum, [jnp.max(x, axis=heads, keepdims=True) for x in largest])
        largest = [jax.lax.pmax(of_token, mesh_axes) if mesh_axes else of_token] * groups
    return weight_function(*(_rounded(*pair, bits) for pair in zip(logits, largest, strict=True)), *others)


def _rounded(logits_CS: jax.Array, largest_C1: jax.Array, bits: int) -> jax.Array:
    scale_C1 = largest_C1 / (2 ** (bits - 1) - 1)
    scale_C1 = jnp.where(scale_C1 > 0, scale_C1, 1)  # The scale is 0 if, for example, no key is visible.
    seen_CS = jnp.where(logits_CS > MASKED, logits_CS, 0)
    fixed_CS = jax.lax.stop_gradient(seen_CS)
    straight_through_CS = jnp.round(fixed_CS / scale_C1) * scale_C1 + (seen_CS - fixed_CS)
    return jnp.where(logits_CS > MASKED, straight_through_CS, logits_CS)
