"""How logits become the map that multiplies V: softmax, its difference, and what else attention has been given.

A map is a function of the masked logits of each of its groups and perhaps of a number for each query, all float32; what
a query does not see has logits of minus infinity, or nearly. It needs whole rows of logits, wherever they are at hand:
in the chunks of `mapped.py`, in the oracle of `reference.py`, over a cache in `cached.py`.
"""
#   C = queries, S = keys; leading axes (batch, heads) are left out of names

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from difftx.kernels.xla import MASKED

# Logits [..., C, S], an array for each group, and for some maps a number for each query, [..., C, 1] → map [..., C, S].
type Map = Callable[..., jax.Array]


def softmax(logits_CS: jax.Array) -> jax.Array:
    """Softmax over keys."""
    return jax.nn.softmax(logits_CS, axis=-1)


def difference(logits1_CS: jax.Array, logits2_CS: jax.Array, lam_C1: jax.Array) -> jax.Array:
    """A1 - λ A2, Eq. 1 of arXiv 2410.05258."""
    return softmax(logits1_CS) - lam_C1 * softmax(logits2_CS)


def softmax_with_sink(logits_CS: jax.Array, sink_C1: jax.Array) -> jax.Array:
    """exp(z) / (exp(s) + Σ exp(z)): a key of logit s whose value is zero, so that a row may sum to less than 1.

    s = 0 is softmax-off-by-one (E. Miller, "Attention is off by one", 2023); gpt-oss learns an s for each head.
    """
    largest_C1 = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits_CS, axis=-1, keepdims=True), sink_C1))
    weights_CS = jnp.exp(logits_CS - largest_C1)
    return weights_CS / (jnp.exp(sink_C1 - largest_C1) + jnp.sum(weights_CS, axis=-1, keepdims=True))


def top_k_softmax(logits_CS: jax.Array, *, k: int) -> jax.Array:
    """Softmax over a row's k largest logits and what equals the k-th: explicit sparse attention, arXiv 1912.11637.

    A query that sees fewer than k keys attends to them all.
    """
    largest_Ck = jax.lax.top_k(jax.lax.stop_gradient(logits_CS), min(k, logits_CS.shape[-1]))[0]
    return softmax(jnp.where(logits_CS >= largest_Ck[..., -1:], logits_CS, -jnp.inf))


def signed_softmax(logits1_CS: jax.Array, logits2_CS: jax.Array) -> jax.Array:
    """Softmax of the first group × tanh of the second's logits: one map with a learned sign and size for each entry."""
    return softmax(logits1_CS) * jnp.tanh(logits2_CS)


def quantized(
    *map_inputs: jax.Array,
    map_of: Map,
    groups: int,
    bits: int,
    granularity: Literal["query", "token"],
    mesh_axes: tuple[str, ...] = (),
) -> jax.Array:
    """Another map of logits that are rounded to signed integers of so many bits and back: dynamic absmax quantisation.

    z' = s round(z / s), s = max|z| / (2^(bits-1) - 1), so that |z' - z| <= s / 2; in the backward pass z' counts as z
    (arXiv 1308.3432). The maximum is over keys that the query sees, in "query" of its head and group alone, in "token"
    of all its heads and groups: neither depends on later tokens, chunks or the batch, and a cache changes nothing.

    Args:
        map_inputs: those of `map_of`; its logits come first, what follows them is left as it is.
        map_of: the other map.
        groups: how many arrays of logits it takes.
        bits: 2 at least.
        granularity: what has a scale of its own.
        mesh_axes: over which heads are cut, inside a `shard_map`.
    """
    logits, others = map_inputs[:groups], map_inputs[groups:]
    largest = [jnp.max(jnp.where(z_CS > MASKED, jnp.abs(z_CS), 0), axis=-1, keepdims=True) for z_CS in logits]
    largest = [jax.lax.stop_gradient(largest_C1) for largest_C1 in largest]
    if granularity == "token":
        heads = tuple(range(1, logits[0].ndim - 2))
        of_token = functools.reduce(jnp.maximum, [jnp.max(x, axis=heads, keepdims=True) for x in largest])
        largest = [jax.lax.pmax(of_token, mesh_axes) if mesh_axes else of_token] * groups
    return map_of(*(_rounded(*pair, bits) for pair in zip(logits, largest, strict=True)), *others)


def _rounded(logits_CS: jax.Array, largest_C1: jax.Array, bits: int) -> jax.Array:
    scale_C1 = largest_C1 / (2 ** (bits - 1) - 1)
    scale_C1 = jnp.where(scale_C1 > 0, scale_C1, 1)  # A row of zeros, or of nothing.
    seen_CS = jnp.where(logits_CS > MASKED, logits_CS, 0)
    fixed_CS = jax.lax.stop_gradient(seen_CS)
    straight_through_CS = jnp.round(fixed_CS / scale_C1) * scale_C1 + (seen_CS - fixed_CS)
    return jnp.where(logits_CS > MASKED, straight_through_CS, logits_CS)
