"""Differential Transformer V2."""
#   B = batch, T = tokens, D = model width, H = heads, G = 2 query heads of a pair, d = width of a query/key head,
#   E = width of a value head

import jax
import jax.numpy as jnp

from difftx.errors import UserError
from difftx.kernels import maps
from difftx.kernels.rows import map_rows
from difftx.model.attention import Attention, merge_heads
from difftx.model.layers import projection
from difftx.parallel.layout import Layout


class DiffAttentionV2(Attention):
    """Differential Transformer V2 (Microsoft, 2026-01-20; microsoft/unilm, Diff-Transformer/Diff-Transformer-V2).

    head_i = A_{2i} V - λ_i A_{2i+1} V with λ_i = σ(x W_λ)_i per token and head. The output is Concat_i(head_i) W_O.

    Query heads 2i and 2i + 1 of the 2H query heads form head i. They share keys and values, because 2H / K is even. The
    architecture has no λ_init, head norm or post-norm scale. Attention has 5 D² + D H weights, so the MLP of a matched
    model is (D + H) / 3 narrower than the Transformer's.
    """

    @classmethod
    def check(cls, config):
        super().check(config)
        if config.head_norm != "none":
            raise UserError(f"model.head_norm={config.head_norm!r}: Differential Transformer V2 has none; use 'none'")

    @classmethod
    def query_heads(cls, config):
        return 2 * config.num_heads

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        self.lambda_DH = projection(config, (config.d_model, config.num_heads), 1, layout.lambda_DH, rngs=rngs)

    @classmethod
    def matrices_by_group(cls, name, weight):
        """Return a stacked weight by groups. The groups of queries are the first and the second heads of the pairs."""
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

    def weight_rows(self, q, k, x_BTD, depth, segment_ids_BT, queries_BC):
        """Return the rows of A_2i - λ_i A_2i+1. Both queries of a pair use the same keys."""
        B, T, H, d = q.shape
        q_BTHGd = jax.lax.reshape(q, (B, T, H // 2, 2, d), out_sharding=self.layout.attend_BTHGd)
        k_BTKGd, lam_BTH = jnp.stack([k, k], axis=3), self.lam(x_BTD)
        options = {"per_query": lam_BTH, "segment_ids_BT": segment_ids_BT}
        return map_rows(maps.difference, q_BTHGd, k_BTKGd, queries_BC, **options)

    def output(self, heads_BTHE, x_BTD, depth):
        B, T, H, E = heads_BTHE.shape
        pairs_BTHGE = jax.lax.reshape(heads_BTHE, (B, T, H // 2, 2, E), out_sharding=self.layout.act_BTHGd)
        noise_BTHE = self.lam(x_BTD)[..., None] * pairs_BTHGE[:, :, :, 1]
        heads_BTHE = (pairs_BTHGE[:, :, :, 0] - noise_BTHE).astype(heads_BTHE.dtype)
        return merge_heads(heads_BTHE, self.output_HdD, self.layout)

    def statistics(self, x_BTD, depth):
        return {"lambda": jnp.mean(self.lam(x_BTD))}
