"""Differential attention by Eq. 1 of arXiv 2410.05258, in float64 numpy with loops."""

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
