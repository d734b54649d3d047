"""Attention through `jax.nn.dot_product_attention`, wherever XLA runs."""
#   B = batch, T = query tokens, S = key tokens, H = heads, K = key/value heads, R = H / K query heads a key/value head,
#   G = 2 groups (A1, A2), W = 2 halves of a value head, D = width of a sub-head, E = 2 D = width of a value head

import jax
import jax.numpy as jnp


def diff_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lam: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    window: int | None,
) -> jax.Array:
    """Eq. 1 of arXiv 2410.05258 as one library call; arguments as in `difftx.kernels.diff_attention`.

    The library wants values as wide as keys, so each group attends to each half of V: 4 H heads of width D.
    """
    B, T, H, G, D = q.shape
    K = k.shape[2]
    q_BTKGWRD = jnp.broadcast_to(
        q.reshape(B, T, K, H // K, G, D).transpose(0, 1, 2, 4, 3, 5)[:, :, :, :, None], (B, T, K, G, 2, H // K, D)
    )
    k_BSKGWD = jnp.broadcast_to(k[:, :, :, :, None], (B, T, K, G, 2, D))
    v_BSKGWD = jnp.broadcast_to(v.reshape(B, T, K, 1, 2, D), (B, T, K, G, 2, D))
    out_BTND = attention(
        q_BTKGWRD.reshape(B, T, 4 * H, D),
        k_BSKGWD.reshape(B, T, 4 * K, D),
        v_BSKGWD.reshape(B, T, 4 * K, D),
        segment_ids_BT,
        window=window,
    )
    out_BTGHE = (
        out_BTND.reshape(B, T, K, G, 2, H // K, D).transpose(0, 1, 3, 2, 5, 4, 6).reshape(B, T, G, H, 2 * D)
    ).astype(jnp.promote_types(v.dtype, jnp.float32))  # Subtract before rounding to bfloat16 once more.
    lam_BTH1 = lam if lam.ndim == 0 else lam[..., None]
    return (out_BTGHE[:, :, 0] - lam_BTH1 * out_BTGHE[:, :, 1]).astype(v.dtype)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    window: int | None,
) -> jax.Array:
    """Softmax attention; arguments as in `difftx.kernels.attention`."""
    mask_B1TS = None
    if segment_ids_BT is not None:
        mask_B1TS = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask_B1TS,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla",
    )
