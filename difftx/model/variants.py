"""What is compared with differential attention: its successors, and simpler ways to sharpen softmax attention.

Each is a formula and its source, on the parts of `attention.py`. A = softmax(Q Kᵀ/√d), causal, with rotary embedding; σ
is the sigmoid and x the layer's input. How each is made as large as the Transformer: configs/architectures.py.
"""
#   B = batch, T = tokens, D = model width, H = heads, K = key/value heads, N = noise heads, R = H / N signal heads of
#   each, Q = R + 1, G = 2 groups (A1 and A2), d = width of a query/key (sub-)head, E = width of a value head

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from difftx.config import ModelConfig
from difftx.kernels import maps
from difftx.model.attention import Angles, Attention, Depth, DiffAttention, SelfAttention, merge_heads
from difftx.model.layers import projection
from difftx.parallel.layout import Layout


class DiffAttentionV2(Attention):
    """Differential Transformer V2 (Microsoft, 2026-01-20; microsoft/unilm, Diff-Transformer/Diff-Transformer-V2).

    head_i = A_{2i} V - λ_i A_{2i+1} V, λ_i = σ(x W_λ)_i for each token and head; the output is Concat_i(head_i) W_O. Of
    2H query heads two neighbours make a head; they share their keys and values, as 2H / K is even. There is no λ_init,
    no head norm and no scale.
    """

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        super().__init__(config, layout, rngs=rngs)
        self.lambda_DH = projection(config, (config.d_model, config.num_heads), 1, layout.lambda_DH, rngs=rngs)

    def lam(self, x_BTD: jax.Array) -> jax.Array:
        """Return λ of each token and head, float32 `[B, T, H]`."""
        weight_DH, sharding = self.lambda_DH.astype(x_BTD.dtype), self.layout.act_BTH
        kind = {"preferred_element_type": jnp.float32, "out_sharding": sharding}
        return jax.nn.sigmoid(jnp.einsum("BTD,DH->BTH", x_BTD, weight_DH, **kind))

    def map(self, x_BTD: jax.Array, depth: Depth) -> tuple[maps.Map, jax.Array | None]:
        """A_2i - λ_i A_2i+1."""
        return maps.difference, self.lam(x_BTD)

    def map_operands(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return queries in pairs, `[B, T, H, 2, d]`, and the keys that both of a pair have."""
        B, T, H, d = q.shape
        q_BTHGd = jax.lax.reshape(q, (B, T, H // 2, 2, d), out_sharding=self.layout.attend_BTHGd)
        return q_BTHGd, jnp.stack([k, k], axis=3)

    def output(self, heads_BTHE: jax.Array, x_BTD: jax.Array, depth: Depth) -> jax.Array:
        """Subtract each pair's second head, and merge."""
        B, T, H, E = heads_BTHE.shape
        pairs_BTHGE = jax.lax.reshape(heads_BTHE, (B, T, H // 2, 2, E), out_sharding=self.layout.act_BTHGd)
        noise_BTHE = self.lam(x_BTD)[..., None] * pairs_BTHGE[:, :, :, 1]
        heads_BTHE = (pairs_BTHGE[:, :, :, 0] - noise_BTHE).astype(heads_BTHE.dtype)
        return merge_heads(heads_BTHE, self.output_HdD, self.layout)

    def statistics(self, x_BTD: jax.Array, depth: Depth) -> dict[str, jax.Array]:
        """Return `{"lambda": λ}`, its mean over tokens and heads."""
        return {"lambda": jnp.mean(self.lam(x_BTD))}


class GroupedDiffAttention(DiffAttention):
    """Grouped differential attention (arXiv 2510.06949), as Motif-2-12.7B has it.

    head_i = (A1_i - λ A2_{i // R}) V: R = `signal_heads` heads subtract one noise head's map; all else is differential
    attention, which it is at R = 1. Queries lie as [R signal, 1 noise] for each noise head, and those of a group share
    their keys and values, so that K divides N = H / R. On the device A2 is computed once for each signal head: fused
    kernels take as many queries of both kinds.
    """

    def project(self, x_BTD: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries `[B, T, H, 2, d]`, the noise head's repeated, keys and values."""
        q_BTNQd, k_BTKGd, v_BTKE = super().project(x_BTD, angles)
        signal_BTNRd, noise_BTN1d = q_BTNQd[..., :-1, :], q_BTNQd[..., -1:, :]
        q_BTNRGd = jnp.stack([signal_BTNRd, jnp.broadcast_to(noise_BTN1d, signal_BTNRd.shape)], axis=-2)
        B, T, N, R, G, d = q_BTNRGd.shape
        q_BTHGd = jax.lax.reshape(q_BTNRGd, (B, T, N * R, G, d), out_sharding=self.layout.act_BTHGd)
        return q_BTHGd, k_BTKGd, v_BTKE


class SignedMaskAttention(DiffAttention):
    """One softmax with a learned sign for each entry, (softmax(Q1 K1ᵀ/√d) ∘ tanh(Q2 K2ᵀ/√d)) V: no second softmax.

    What a reviewer of arXiv 2410.05258 asks for: is it cancelled noise, or are negative weights enough? So all else is
    DiffAttention's: its projections, the head norm, and the factor 1 - λ_init (or `post_scale`).
    """

    attend = SelfAttention.attend  # By the map: no fused kernel computes it.

    def map_of(self) -> maps.Map:
        """A1 ∘ tanh."""
        return maps.signed_softmax

    def per_query(self, depth: Depth) -> None:
        """There is no λ."""
        return None

    def statistics(self, x_BTD: jax.Array, depth: Depth) -> dict[str, jax.Array]:
        """Return nothing: there is no λ."""
        return {}


class GatedAttention(Attention):
    """Softmax attention with a gate on its output: head_i = σ(x W_i) ∘ A_i V, elementwise (arXiv 2505.06708, "G1")."""

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        super().__init__(config, layout, rngs=rngs)
        shape = (config.d_model, config.num_heads, config.d_head)
        self.gate_DHd = projection(config, shape, 1, layout.value_DKE, rngs=rngs)

    def output(self, heads_BTHE: jax.Array, x_BTD: jax.Array, depth: Depth) -> jax.Array:
        """Gate each head, and merge."""
        weight_DHd = self.gate_DHd.astype(x_BTD.dtype)
        gate_BTHE = jnp.einsum("BTD,DHd->BTHd", x_BTD, weight_DHd, out_sharding=self.layout.act_BTHE)
        return super().output(jax.nn.sigmoid(gate_BTHE) * heads_BTHE, x_BTD, depth)


class MappedAttention(Attention):
    """Softmax attention with another map in place of softmax."""

    attend = SelfAttention.attend  # By the map: no fused kernel computes it.


class OffByOneAttention(MappedAttention):
    """Softmax-off-by-one, exp(z_ij) / (1 + Σ_j exp(z_ij)) (E. Miller, "Attention is off by one", 2023)."""

    def map_of(self) -> maps.Map:
        """Softmax with a sink."""
        return maps.softmax_with_sink

    def per_query(self, depth: Depth) -> jax.Array:
        """The sink's logit, 0."""
        return jnp.float32(0)


class SinkAttention(MappedAttention):
    """Softmax with a learned sink a head, exp(z_ij) / (exp(s_h) + Σ_j exp(z_ij)) (gpt-oss, OpenAI 2025).

    s_h starts at 0, as softmax-off-by-one.
    """

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        super().__init__(config, layout, rngs=rngs)
        self.sink_H = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32, out_sharding=layout.vector))

    def map_of(self) -> maps.Map:
        """Softmax with a sink."""
        return maps.softmax_with_sink

    def per_query(self, depth: Depth) -> jax.Array:
        """The sink's logit, s_h."""
        return self.sink_H[...]


class TopKAttention(MappedAttention):
    """Softmax over the `top_k` largest logits of a row, zero elsewhere (explicit sparsity, arXiv 1912.11637)."""

    def map_of(self) -> maps.Map:
        """Softmax of the largest."""
        assert self.config.top_k is not None
        return functools.partial(maps.top_k_softmax, k=self.config.top_k)


VARIANTS = {
    "diff_v2": DiffAttentionV2,
    "gda": GroupedDiffAttention,
    "gated": GatedAttention,
    "off_by_one": OffByOneAttention,
    "sink": SinkAttention,
    "top_k": TopKAttention,
    "signed_mask": SignedMaskAttention,
}
