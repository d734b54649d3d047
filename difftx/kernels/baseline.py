"""Softmax attention for the matched Transformer: the best kept library kernel of each platform, with the same masks."""
#   B = batch, T = tokens, X = T padded to whole tiles, H = heads, K = key/value heads,
#   R = H / K query heads a key/value head, D = width of a head

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from difftx.kernels import target

SPLASH_TILE = 512
DENSE_MASK_TOKENS = 16_384  # cuDNN takes segments only as a T × T bias, 0.5 GiB a row at this length.


def xla_attention(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    implementation: Literal["xla", "cudnn"] = "xla",
) -> jax.Array:
    """`jax.nn.dot_product_attention`; arguments as in `difftx.kernels.attention`."""
    mask_B1TS = None
    if segment_ids_BT is not None:
        mask_B1TS = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BTHD,
        k_BTKD,
        v_BTKD,
        mask=mask_B1TS,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


cudnn_attention = functools.partial(xla_attention, implementation="cudnn")


def cudnn_unsupported(q_BTHD: jax.Array, segment_ids_BT: jax.Array | None) -> str | None:
    """Return why cuDNN cannot serve a call, or None."""
    _, T, _, D = q_BTHD.shape
    if target.platform() != "gpu":
        return f"cuDNN runs on NVIDIA GPUs; this is {target.platform()}"
    if q_BTHD.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attends in bfloat16 or float16, not {q_BTHD.dtype}"
    if D % 8 or D > 256:
        return f"cuDNN wants a head width that is a multiple of 8 up to 256; got {D}"
    if segment_ids_BT is not None and (T % 2 or T > DENSE_MASK_TOKENS):
        return f"cuDNN takes segments as a dense bias: an even row of up to {DENSE_MASK_TOKENS} tokens; got {T}"
    return None


def splash_attention(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
) -> jax.Array:
    """Splash attention, from jax, interpreted without a TPU. Arguments as in `difftx.kernels.attention`."""
    B, T, H, D = q_BTHD.shape
    K = k_BTKD.shape[2]
    tile = min(SPLASH_TILE, -(-T // 128) * 128)
    X = -(-T // tile) * tile
    mask = splash_mask.CausalMask((X, X))
    if window is not None:
        mask = splash_mask.LocalMask((X, X), (window - 1, 0), offset=0)
    kernel = splash.make_splash_mqa_single_device(
        splash_mask.MultiHeadMask([mask] * (H // K)),
        block_sizes=splash.BlockSizes(
            block_q=tile,
            block_kv=tile,
            block_kv_compute=tile,
            block_q_dkv=tile,
            block_kv_dkv=tile,
            block_kv_dkv_compute=tile,
            use_fused_bwd_kernel=True,
        ),
        interpret=target.platform() != "tpu",
    )

    def padded(x_BT: jax.Array) -> jax.Array:
        return jnp.pad(x_BT, [(0, 0), (0, X - T)] + [(0, 0)] * (x_BT.ndim - 2), mode="edge")

    q_BKRXD = (padded(q_BTHD) * jnp.asarray(D**-0.5, q_BTHD.dtype)).reshape(B, X, K, H // K, D)
    q_BKRXD = q_BKRXD.transpose(0, 2, 3, 1, 4)
    k_BKXD, v_BKXD = (jnp.moveaxis(padded(x), 1, 2) for x in (k_BTKD, v_BTKD))
    ids = None
    if segment_ids_BT is not None:
        ids_BX = padded(segment_ids_BT)
        ids = splash.SegmentIds(q=ids_BX, kv=ids_BX)
    per_head = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    out_BKRXD = jax.vmap(per_head, in_axes=(0, 0, 0, None if ids is None else 0))(q_BKRXD, k_BKXD, v_BKXD, ids)
    return jnp.moveaxis(jnp.asarray(out_BKRXD), 3, 1).reshape(B, X, H, D)[:, :T]


def splash_unsupported(q_BTHD: jax.Array) -> str | None:
    """Return why splash attention cannot serve a call, or None."""
    if q_BTHD.dtype not in (jnp.bfloat16, jnp.float32):
        return f"splash attention takes bfloat16 or float32, not {q_BTHD.dtype}"
    return None
