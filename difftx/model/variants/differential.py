"""Variants of differential attention."""
# Axes: B = batch, T = tokens, D = model width, H = heads (if there are noise heads: signal heads), K = key/value heads,
#   N = noise heads, R = H / N = signal heads per noise head, Q = R + 1 = queries per noise head,
#   G = 2 groups (A1 and A2), d = width of a query/key (sub-)head, E = width of a value head

import jax
import jax.numpy as jnp

from difftx.config.checks import divisor_below
from difftx.errors import UserError
from difftx.kernels import maps
from difftx.kernels.rows import map_rows
from difftx.model.attention import Attention, DiffAttention, merge_heads, require_field
from difftx.model.layers import projection
from difftx.parallel.layout import Layout

SIGNAL_HEADS = (
    3  # Signal heads per noise head. Motif-2-12.7B has 4, but 4 + 1 divides fewer numbers of heads than 3 + 1.
)


class DiffAttentionV2(Attention):
    """Differential Transformer V2 (Microsoft, 2026-01-20; microsoft/unilm, Diff-Transformer/Diff-Transformer-V2).

    head_i = A_{2i} V - λ_i A_{2i+1} V with λ_i = σ(x W_λ)_i per token and head. The output is Concat_i(head_i) W_O.

    Query heads 2i and 2i + 1 of the 2H query heads form head i. They share keys and values, because 2H / K is even. The
    architecture has no λ_init, head norm or post-norm scale. Attention has 5 D² + D H weights, so the MLP is
    (D + H) / 3 narrower than that of a Transformer with as many parameters.
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
        """Return the parts of a weight by group. Even query heads are in the first group, odd ones in the second."""
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
        B, T, H, d = q.shape
        q_BTHGd = jax.lax.reshape(q, (B, T, H // 2, 2, d), out_sharding=self.layout.attend_BTHGd)
        k_BTKGd, lam_BTH = jnp.stack([k, k], axis=3), self.lam(x_BTD)
        options = {"per_query": lam_BTH, "segment_ids_BT": segment_ids_BT, "window": depth.window}
        return map_rows(maps.difference, q_BTHGd, k_BTKGd, queries_BC, **options)

    def output(self, heads_BTHE, x_BTD, depth):
        B, T, H, E = heads_BTHE.shape
        pairs_BTHGE = jax.lax.reshape(heads_BTHE, (B, T, H // 2, 2, E), out_sharding=self.layout.act_BTHGd)
        noise_BTHE = self.lam(x_BTD)[..., None] * pairs_BTHGE[:, :, :, 1]
        heads_BTHE = (pairs_BTHGE[:, :, :, 0] - noise_BTHE).astype(heads_BTHE.dtype)
        return merge_heads(heads_BTHE, self.output_HdD, self.layout)

    def statistics(self, x_BTD, depth):
        return {"lambda": jnp.mean(self.lam(x_BTD))}


class GroupedDiffAttention(DiffAttention):
    """Grouped differential attention (arXiv 2510.06949), the attention of Motif-2-12.7B.

    head_i = (A1_i - λ A2_{i // R}) V. R = `signal_heads` signal heads subtract the attention weights of one shared
    noise head. Everything else is as in differential attention, which is the case R = 1.

    The R signal queries and the noise query of a noise head share keys and values, so K must divide N = H / R. Fused
    kernels require as many noise queries as signal queries, so they compute A2 once per signal head. For R = 3,
    attention has 3.5 D² weights, so the MLP is D / 6 wider than that of a Transformer with as many parameters.
    """

    fields = ("signal_heads", *DiffAttention.fields)

    @classmethod
    def check(cls, config):
        super().check(config)
        require_field(config, "signal_heads", "3")
        if config.num_heads % config.signal_heads:
            raise UserError(
                f"model.signal_heads={config.signal_heads} does not divide num_heads={config.num_heads}, which counts "
                f"all signal heads; use {divisor_below(config.signal_heads, config.num_heads)}, or other num_heads"
            )

    @classmethod
    def sub_heads(cls, config, num_heads):
        return num_heads + num_heads // (config.signal_heads or 1)

    @classmethod
    def kv_heads(cls, config):
        return config.num_heads // (config.signal_heads or 1)

    @classmethod
    def configure(cls, c, heads):
        """Divide the `heads` heads of the Transformer into groups of three signal heads and one noise head."""
        super().configure(c, heads)
        c.model.num_heads = SIGNAL_HEADS * (heads // (SIGNAL_HEADS + 1))
        c.model.signal_heads = SIGNAL_HEADS

    @classmethod
    def query_shape(cls, config):
        """Return the number of noise heads and of queries per noise head."""
        noise_heads = cls.kv_heads(config)
        return noise_heads, cls.query_heads(config) // noise_heads

    def project(self, x_BTD, angles):
        """Return queries, keys and values. Queries `[B, T, H, 2, d]` pair each signal query with its noise query."""
        q_BTNQd, k_BTKGd, v_BTKE = super().project(x_BTD, angles)
        signal_BTNRd, noise_BTN1d = q_BTNQd[..., :-1, :], q_BTNQd[..., -1:, :]
        q_BTNRGd = jnp.stack([signal_BTNRd, jnp.broadcast_to(noise_BTN1d, signal_BTNRd.shape)], axis=-2)
        B, T, N, R, G, d = q_BTNRGd.shape
        q_BTHGd = jax.lax.reshape(q_BTNRGd, (B, T, N * R, G, d), out_sharding=self.layout.act_BTHGd)
        return q_BTHGd, k_BTKGd, v_BTKE


class SignedMaskAttention(DiffAttention):
    """Softmax attention with a learned sign and scale for each weight, (softmax(Q1 K1ᵀ/√d) ∘ tanh(Q2 K2ᵀ/√d)) V.

    A reviewer of arXiv 2410.05258 asked whether negative weights explain the gains of differential attention, rather
    than the cancellation of noise. This variant has negative weights but no λ. Its projections, head norm and factor
    1 - λ_init (or `post_scale`) are those of `DiffAttention`.
    """

    kernel = "mapped_attention"
    fields = ("lambda_init", "post_scale")
    has_lambda_vectors = False

    def map_of(self):
        return maps.signed_softmax

    def per_query(self, depth):
        return None

    def statistics(self, x_BTD, depth):
        return {}
