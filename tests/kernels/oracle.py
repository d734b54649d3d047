"""Attention by its formula: in float64 numpy with loops, by matrices, and for autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from difftx.kernels import weight_functions


def softmax_row(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def difference_row(logits1, logits2, lam):
    return softmax_row(logits1) - lam * softmax_row(logits2)


def sink_row(logits: np.ndarray, sink: float) -> np.ndarray:
    return np.exp(logits) / (np.exp(sink) + np.exp(logits).sum())


def top_k_row(logits: np.ndarray, k: int) -> np.ndarray:
    kept = np.sort(logits)[-k:]
    return np.where(np.isin(logits, kept), np.exp(logits), 0) / np.exp(kept).sum()


# Name → (weight function, number of groups, whether it takes a number per query, formula of one row in numpy).
K_KEPT = 4
FUNCTIONS = {
    "softmax": (weight_functions.softmax, 1, False, softmax_row),
    "difference": (weight_functions.difference, 2, True, difference_row),
    "sink": (weight_functions.softmax_with_sink, 1, True, sink_row),
    "top_k": (functools.partial(weight_functions.top_k_softmax, k=K_KEPT), 1, False, lambda z: top_k_row(z, K_KEPT)),
    "signed": (weight_functions.signed_softmax, 2, False, lambda z1, z2: softmax_row(z1) * np.tanh(z2)),
}


def attention_weights(row, q, k, number=None, segment_ids=None, window=None) -> np.ndarray:
    """Return [B,T,H,S] for q [B,T,H,G,d] and k [B,T,K,G,d].

    `row` maps the logits of one query in each group, and its `number` if given, to the weights of the visible keys.
    """
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    segment_ids = None if segment_ids is None else np.asarray(segment_ids)
    B, T, H, G, d = q.shape
    number = None if number is None else np.broadcast_to(np.asarray(number, np.float64), (B, T, H))
    weights = np.zeros((B, T, H, T))
    for b, t, n in np.ndindex(B, T, H):
        keys = [
            s
            for s in range(t + 1)
            if (segment_ids is None or segment_ids[b, s] == segment_ids[b, t]) and (window is None or t - s < window)
        ]
        arguments = [k[b, keys, n * k.shape[2] // H, g] @ q[b, t, n, g] / np.sqrt(d) for g in range(G)]
        weights[b, t, n, keys] = row(*arguments, *(() if number is None else (number[b, t, n],)))
    return weights


def attention(row, q, k, v, number=None, segment_ids=None, window=None) -> np.ndarray:
    """Return [B,T,H,E] for the weights of `attention_weights` and v [B,T,K,E]."""
    v = np.repeat(np.asarray(v, np.float64), q.shape[2] // v.shape[2], axis=2)
    return np.einsum("bths,bshe->bthe", attention_weights(row, q, k, number, segment_ids, window), v)


diff_attention = functools.partial(attention, difference_row)


def visible_keys(rows, tokens, segment_ids=None, window=None):
    """Return whether a query sees a key, [rows, queries, keys], with the kind of array of the segment ids."""
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    seen = (j <= i) & (i - j < (window or tokens))
    if segment_ids is None:
        return np.broadcast_to(seen, (rows, tokens, tokens))
    return seen[None] & (segment_ids[:, :, None] == segment_ids[:, None, :])


def outputs(q, k, v, lam, seen_BTS):
    """Return O, O2 and the log-sum-exps, in float64 numpy."""
    q, k, v, lam = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, lam))
    k, v = (x.repeat(q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = np.einsum("bthgd,bshgd->bhgts", q, k) / np.sqrt(q.shape[-1])
    logits = np.where(seen_BTS[:, None, None], logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    out1, out2 = np.einsum("bhgts,bshe->gbthe", np.exp(logits - lse), v)
    return out1 - lam[..., None] * out2, out2, lse[..., 0]


def naive(q, k, v, lam, seen_BTS):
    """Return differential attention by its definition in float32 JAX, for autodiff."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("bthgd,bshgd->bhgts", q, k, precision="highest") / np.sqrt(q.shape[-1])
    p = jax.nn.softmax(jnp.where(jnp.asarray(seen_BTS)[:, None, None], logits, -jnp.inf), axis=-1)
    out1, out2 = jnp.einsum("bhgts,bshe->gbthe", p, v, precision="highest")
    return out1 - lam[..., None] * out2
