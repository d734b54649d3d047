"""QK-Clip: limit the attention logits of each sub-head (Kimi K2, arXiv 2507.20534, §2.1)."""
# Axes: L = layers, H = query heads of the kernel, K = key/value heads, R = H / K, G = groups (2 for A1 and A2)

from typing import Any

import jax
import jax.numpy as jnp

from difftx.config import Config, ModelConfig
from difftx.errors import UserError
from difftx.model.architectures import ARCHITECTURES, heads_of


def check_qk_clip(config: Config) -> None:
    """Raise `UserError` if the query and key weights do not train, or do not determine the size of the logits."""
    field, model = f"optimizer.qk_clip={config.optimizer.qk_clip}", config.model
    if model.qk_norm:
        raise UserError(f"{field}: model.qk_norm already bounds the logits, whatever the weights are; use one of them")
    if config.train.trainable or config.train.lora_rank is not None:
        raise UserError(f"{field} scales weights, but train.trainable or train.lora_rank freezes some; use one of them")
    if not ARCHITECTURES[model.architecture].project.__module__.startswith("difftx."):
        raise UserError(
            f"{field}: architecture {model.architecture!r} has its own `project`, so it is not known which weights to "
            "scale; leave it at None"
        )


def clipped(model: ModelConfig, params: Any, largest_LHG: jax.Array, limit: float) -> Any:
    """Scale down the query and key weights of sub-heads with logits above τ = `limit`, and return the parameters.

    `largest_LHG` has the largest logits m before the update. The logits of a sub-head are multiplied by γ = min(1, τ /
    m), so its query weight and key weight (and their biases) are each multiplied by √γ. If several query heads share a
    key, the key's factor is the largest √γ among them, and each query head gets the rest of its γ. Heads with logits
    below τ do not change, not even by rounding.
    """
    L, H, G = largest_LHG.shape
    factor_LHG = jnp.where(largest_LHG > limit, limit / largest_LHG, 1.0)
    factor_LKRG = factor_LHG.reshape(L, -1, H // heads_of(model).kv_heads, G)
    key_LK1G = jnp.sqrt(jnp.max(factor_LKRG, axis=2, keepdims=True))
    query_LHG = (factor_LKRG / key_LK1G).reshape(L, H, G)
    factors = {"query": ARCHITECTURES[model.architecture].query_factors(model, query_LHG), "key": key_LK1G}

    def scaled(name: str, x: jax.Array) -> jax.Array:
        if (factor := factors.get(name.partition("_")[0])) is None:
            return x
        inputs = () if name.endswith("_bias") else (1,)  # The shape of a weight is [L, D, heads…, d].
        return x * factor.reshape(L, *inputs, *x.shape[1 + len(inputs) : -1], 1)

    attention = {name: scaled(name, x) for name, x in params["blocks"]["attention"].items()}
    return params | {"blocks": params["blocks"] | {"attention": attention}}
