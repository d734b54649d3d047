"""Differential Transformer V2."""
#   B = batch, T = tokens, D = model width, H = heads, K = key/value heads, d = width of a query/key (sub-)head,
#   E = width of a value head

import jax
import jax.numpy as jnp
from flax import nnx

from difftx.config import ModelConfig
from difftx.errors import UserError
from difftx.kernels import maps
from difftx.model.attention import Attention, Depth, merge_heads
from difftx.model.layers import projection
from difftx.parallel.layout import Layout


class DiffAttentionV2(Attention):
    """Differential Transformer V2 (Microsoft, 2026-01-20; microsoft/unilm, Diff-Transformer/Diff-Transformer-V2).

    head_i = A_{2i} V - λ_i A_{2i+1} V with λ_i = σ(x W_λ)_i per token and head. The output is Concat_i(head_i) W_O.

    Query heads 2i and 2i + 1 of the 2H query heads form head i. They share keys and values, because 2H / K is even. The
    architecture has no λ_init, head norm or post-norm scale.
    """

    @classmethod
    def check(cls, config):
        """Raise `UserError` for unsupported values, including any head norm."""
        super().check(config)
        if config.head_norm != "none":
            raise UserError(f"model.head_norm={config.head_norm!r}: Differential Transformer V2 has none; use 'none'")

    @classmethod
    def query_heads(cls, config: ModelConfig) -> int:
        """Return twice the number of heads."""
        return 2 * config.num_heads

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        super().__init__(config, layout, rngs=rngs)
        self.lambda_DH = projection(config, (config.d_model, config.num_heads), 1, layout.lambda_DH, rngs=rngs)

    @classmethod
    def matrices_by_group(cls, name: str, weight: jax.Array) -> dict[str, jax.Array]:
        """Split a stacked weight by groups; the query weight into the first and second heads of each pair."""
        if name == "query":
            L, D, heads, d = weight.shape
            sharding = jax.P(None, *Layout().query_DHGd)
            weight = jax.lax.reshape(weight, (L, D, heads // 2, 2, d), out_sharding=sharding)
        return super().matrices_by_group(name, weight)

    def lam(self, x_BTD: jax.Array) -> jax.Array:
        """Return λ per token and head, float32 `[B, T, H]`."""
        weight_DH, sharding = self.lambda_DH.astype(x_BTD.dtype), self.layout.act_BTH
        kind = {"preferred_element_type": jnp.float32, "out_sharding": sharding}
        return jax.nn.sigmoid(jnp.einsum("BTD,DH->BTH", x_BTD, weight_DH, **kind))

    def map(self, x_BTD: jax.Array, depth: Depth) -> tuple[maps.Map, jax.Array | None]:
        """Return the function A_2i - λ_i A_2i+1, and λ."""
        return maps.difference, self.lam(x_BTD)

    def map_operands(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the queries in pairs, `[B, T, H, 2, d]`, and the keys, repeated for both queries of a pair."""
        B, T, H, d = q.shape
        q_BTHGd = jax.lax.reshape(q, (B, T, H // 2, 2, d), out_sharding=self.layout.attend_BTHGd)
        return q_BTHGd, jnp.stack([k, k], axis=3)

    def output(self, heads_BTHE: jax.Array, x_BTD: jax.Array, depth: Depth) -> jax.Array:
        """Subtract λ times the second head of each pair from the first, then merge the heads."""
        B, T, H, E = heads_BTHE.shape
        pairs_BTHGE = jax.lax.reshape(heads_BTHE, (B, T, H // 2, 2, E), out_sharding=self.layout.act_BTHGd)
        noise_BTHE = self.lam(x_BTD)[..., None] * pairs_BTHGE[:, :, :, 1]
        heads_BTHE = (pairs_BTHGE[:, :, :, 0] - noise_BTHE).astype(heads_BTHE.dtype)
        return merge_heads(heads_BTHE, self.output_HdD, self.layout)

    def statistics(self, x_BTD: jax.Array, depth: Depth) -> dict[str, jax.Array]:
        """Return the statistic "lambda", the mean of λ over tokens and heads."""
        return {"lambda": jnp.mean(self.lam(x_BTD))}
