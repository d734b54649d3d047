"""How logits become the map that multiplies V: softmax, its difference, and what else attention has been given.

A map is a function of the masked logits of each of its groups and perhaps of a number for each query, all float32; what
a query does not see has logits of minus infinity, or nearly. It needs whole rows of logits, wherever they are at hand:
in the chunks of `mapped.py`, in the oracle of `reference.py`, over a cache in `cached.py`.
"""
#   C = queries, S = keys; leading axes (batch, heads) are left out of names

from collections.abc import Callable

import jax
import jax.numpy as jnp

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
