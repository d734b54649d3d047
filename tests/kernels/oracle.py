"""Differential attention by Eq. 1 of arXiv 2410.05258: in float64 numpy with loops, by matrices, and for autodiff."""

import jax
import jax.numpy as jnp
import numpy as np


def softmax_row(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def diff_attention(q, k, v, lam, segment_ids=None, window=None) -> np.ndarray:
    """Return [B,T,H,2d] for q [B,T,H,2,d], k [B,T,K,2,d], v [B,T,K,2d] and lam, a scalar or [B,T,H]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    segment_ids = None if segment_ids is None else np.asarray(segment_ids)
    B, T, H, _, d = q.shape
    lam = np.broadcast_to(np.asarray(lam, np.float64), (B, T, H))
    out = np.zeros((B, T, H, 2 * d))
    for b in range(B):
        for n in range(H):
            kv = n // (H // k.shape[2])
            for t in range(T):
                keys = [
                    s
                    for s in range(t + 1)
                    if (segment_ids is None or segment_ids[b, s] == segment_ids[b, t])
                    and (window is None or t - s < window)
                ]
                row1, row2 = (softmax_row(k[b, keys, kv, g] @ q[b, t, n, g] / np.sqrt(d)) for g in (0, 1))
                out[b, t, n] = (row1 - lam[b, t, n] * row2) @ v[b, keys, kv]
    return out


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
