"""Variants of differential attention."""
# Axes: B = batch, T = tokens, D = model width, H = heads (if there are noise heads: signal heads), K = key/value heads,
#   N = noise heads, R = H / N = signal heads per noise head, Q = R + 1 = queries per noise head,
#   G = 2 groups (A1 and A2), d = width of a query/key (sub-)head, E = width of a value head

import jax
import jax.numpy as jnp

from difftx.config import ModelConfig, affects
from difftx.config.checks import largest_divisor_up_to
from difftx.config.fields import Group, Positive
from difftx.errors import UserError
from difftx.kernels import weight_functions
from difftx.kernels.backend import difference
from difftx.model.architectures import heads_of
from difftx.model.attention import Attention, DiffAttention, require_field, require_no_head_norm
from difftx.model.layers import projection
from difftx.model.variants.softmax import gate
from difftx.parallel.layout import Layout

# Default number of signal heads per noise head for `gda`. Motif-2-12.7B has 4, but fewer numbers of heads are divisible
# by 4 + 1 than by 3 + 1.
GDA_SIGNAL_HEADS = 3


class DiffAttentionV2(Attention):
    """Differential Transformer V2 (Microsoft, 2026-01-20; microsoft/unilm, Diff-Transformer/Diff-Transformer-V2).

    head_i = A_{2i} V - λ_i A_{2i+1} V with λ_i = σ(x W_λ)_i per token and head. The output is Concat_i(head_i) W_O.

    There are 2H query heads. Query heads 2i and 2i + 1 form head i. They share keys and values, because 2H / K is even.
    The architecture has no λ_init, head norm or post-norm scale. Attention has 5 D² + D H weights, so the MLP is
    (D + H) / 3 narrower than in a Transformer with equally many parameters.
    """

    subtracts = True

    @classmethod
    def check(cls, config):
        super().check(config)
        require_no_head_norm(config)

    @classmethod
    def noise_heads(cls, config: ModelConfig) -> int:
        """Return N, the number of noise heads, that is, of query heads with subtracted attention weights."""
        return config.num_heads

    @classmethod
    def query_heads(cls, config):
        return config.num_heads + cls.noise_heads(config)

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        self.lambda_DH = projection(config, (config.d_model, config.num_heads), 1, layout.lambda_DH, rngs=rngs)

    @classmethod
    def tensors(cls, config):
        return super().tensors(config) | {"lambda_proj.weight": ("H D", "lambda_DH", "D H")}

    @classmethod
    def matrices_by_group(cls, config, name, weight):
        """Split a weight by group. In the query weight, each noise query follows the signal queries that share it."""
        if name == "query":
            L, D, heads, d = weight.shape
            N, sharding = cls.noise_heads(config), jax.P(None, *Layout().query_DHGd)
            weight = jax.lax.reshape(weight, (L, D, N, heads // N, d), out_sharding=sharding)
        return super().matrices_by_group(config, name, weight)

    def lam(self, x_BTD: jax.Array) -> jax.Array:
        """Return λ per token and head, float32 `[B, T, H]`."""
        weight_DH, sharding = self.lambda_DH.astype(x_BTD.dtype), self.layout.act_BTH
        kind = {"preferred_element_type": jnp.float32, "out_sharding": sharding}
        return jax.nn.sigmoid(jnp.einsum("BTD,DH->BTH", x_BTD, weight_DH, **kind))

    def combine(self, heads_BTHE, x_BTD):
        heads_BTNQE, sharding = self._by_noise_head(heads_BTHE, self.layout.act_BTHGd), self.layout.act_BTHE
        B, T, N, Q, E = heads_BTNQE.shape
        lam_BTNR = jax.lax.reshape(self.lam(x_BTD), (B, T, N, Q - 1), out_sharding=sharding)
        heads_BTNRE = difference(heads_BTNQE[..., :-1, :], heads_BTNQE[..., -1:, :], lam_BTNR)
        return jax.lax.reshape(heads_BTNRE, (B, T, N * (Q - 1), E), out_sharding=sharding)

    def attention_weight_inputs(self, q, k, x_BTD, constants):
        sharding = self.layout.attend_BTHGd
        q_BTHGd = paired_queries(self._by_noise_head(q[:, :, :, 0], sharding), sharding)
        return weight_functions.difference, q_BTHGd, jnp.concatenate([k, k], axis=3), self.lam(x_BTD)

    def statistics(self, x_BTD, constants):
        return {"lambda": jnp.mean(self.lam(x_BTD))}

    def _by_noise_head(self, x_BTHE: jax.Array, sharding: jax.P) -> jax.Array:
        """Reshape the query heads to `[B, T, N, Q, E]`. Of each Q heads, the first R are signal, the last is noise."""
        B, T, heads, E = x_BTHE.shape
        N = self.noise_heads(self.config)
        return jax.lax.reshape(x_BTHE, (B, T, N, heads // N, E), out_sharding=sharding)


class GdaConfig(Group):
    """Settings of the architectures gda and motif."""

    signal_heads: affects.Shapes[Positive[int] | None] = None
    """Number of signal heads per noise head. `num_heads` counts the signal heads."""


class GdlaConfig(GdaConfig):
    """Settings of the architecture gdla."""

    output_gate: affects.Shapes[bool] = False
    """Whether the output of each head is multiplied by σ(x W_g), one factor per channel."""


class GroupedDiffAttentionV2(DiffAttentionV2):
    """Grouped differential attention with one λ per token and head: Motif-3's "GDLA" without latent keys and values.

    head_i = σ(x W_g)_i ∘ [A_i V - σ(x W_λ)_i A_noise(i // R) V]. Only with `output_gate`, there is the factor
    σ(x W_g)_i. R = `signal_heads` signal heads share one noise head. With R = 1 and no gate, this is `DiffAttentionV2`.

    No paper states this formula. It is derived from llama.cpp's implementation of Motif-3 (ggml-org/llama.cpp, pull
    request 26298). Motif-3 has R = 4, and projects keys and values from a low-rank vector. difftx does not.

    The queries of a noise head and of its signal heads share keys and values, so K must divide N = H / R. For R = 4 and
    K = N, attention has 2.75 D² + D H weights, and D² more with a gate.
    """

    own_config = GdlaConfig

    @classmethod
    def check(cls, config):
        super().check(config)
        check_signal_heads(config)

    @classmethod
    def noise_heads(cls, config):
        return config.num_heads // (config.own.signal_heads or 1)

    @classmethod
    def kv_heads(cls, config):
        return cls.noise_heads(config)

    @classmethod
    def configure(cls, c, heads):
        """Use four signal heads per noise head, as in Motif-3, or if 4 does not divide `heads`, the next divisor."""
        super().configure(c, heads)
        c.model[c.model.architecture] = {"signal_heads": max(n for n in (1, 2, 3, 4) if heads % n == 0)}

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        if config.own.output_gate:
            shape = (config.d_model, config.num_heads, heads_of(config).d_head)
            self.gate_DHd = projection(config, shape, 1, layout.value_DKE, rngs=rngs)

    @classmethod
    def tensors(cls, config):
        gate = {"gate_proj.weight": ("Hd D", "gate_DHd", "D H d")} if config.own.output_gate else {}
        return super().tensors(config) | gate

    def output(self, heads_BTHE, x_BTD, constants):
        if self.config.own.output_gate:
            heads_BTHE = gate(x_BTD, self.gate_DHd, self.layout) * heads_BTHE
        return super().output(heads_BTHE, x_BTD, constants)


class GroupedDiffAttention(DiffAttention):
    """Grouped differential attention (arXiv 2510.06949), the attention of Motif-2-12.7B.

    head_i = (A1_i - λ A2_{i // R}) V. R = `signal_heads` signal heads subtract the attention weights of one shared
    noise head. With R = 1, this is `DiffAttention`.

    A noise query and its R signal queries share keys and values, so K must divide N = H / R. Fused kernels require one
    noise query per signal query, so they compute A2 once per signal head. For R = 3, attention has 3.5 D² weights, so
    the MLP is D / 6 wider than in a Transformer with equally many parameters.
    """

    own_config = GdaConfig
    replaced_heads = 1

    @classmethod
    def check(cls, config):
        super().check(config)
        check_signal_heads(config)

    @classmethod
    def sub_heads(cls, config, num_heads):
        return num_heads + num_heads // (config.own.signal_heads or 1)

    @classmethod
    def kv_heads(cls, config):
        return config.num_heads // (config.own.signal_heads or 1)

    @classmethod
    def configure(cls, c, heads):
        """Divide the `heads` heads of the Transformer into groups of three signal heads and one noise head."""
        super().configure(c, heads)
        group = GDA_SIGNAL_HEADS + 1
        if heads % group:  # Rounding the number of heads would change the head width.
            raise UserError(
                f"architecture {c.model.architecture!r}: groups of {GDA_SIGNAL_HEADS} signal heads and a noise head do "
                f"not divide the {heads} heads of the Transformer; use a multiple of {group}"
            )
        c.model.num_heads = GDA_SIGNAL_HEADS * (heads // group)
        c.model[c.model.architecture] = {"signal_heads": GDA_SIGNAL_HEADS}

    @classmethod
    def query_shape(cls, config):
        """Return the number of noise heads, and the number of queries per noise head."""
        noise_heads = cls.kv_heads(config)
        return noise_heads, cls.query_heads(config) // noise_heads

    @classmethod
    def query_factors(cls, config, factor_LHG):
        """Return the factors `[L, N, Q]`. The kernel repeats each noise query R times, so use its first factor."""
        factor_LNRG = factor_LHG.reshape(len(factor_LHG), cls.kv_heads(config), -1, 2)
        return jnp.concatenate([factor_LNRG[..., 0], factor_LNRG[:, :, :1, 1]], axis=-1)

    def project(self, x_BTD, angles):
        """Return queries `[B, T, H, 2, d]` (each signal query with its noise query), keys and values."""
        q_BTNQd, k_BTKGd, v_BTKE = super().project(x_BTD, angles)
        return paired_queries(q_BTNQd, self.layout.act_BTHGd), k_BTKGd, v_BTKE


class SignedMaskAttention(DiffAttention):
    """Softmax attention with a learned sign and scale for each weight, (softmax(Q1 K1ᵀ/√d) ∘ tanh(Q2 K2ᵀ/√d)) V.

    A reviewer of arXiv 2410.05258 asked whether differential attention is better because of negative weights and not
    because it cancels noise. This variant has negative weights but no λ. Projections, head norm and factor 1 - λ_init
    (or `post_scale`) are the same as in `DiffAttention`.
    """

    kernel = "weighted_attention"
    subtracts = False
    fields = ("lambda_init", "post_scale")
    has_lambda_vectors = False

    def weight_function(self):
        return weight_functions.signed_softmax

    def weight_argument(self, constants, x_BTD):
        return None


def paired_queries(q_BTNQd: jax.Array, sharding: jax.P) -> jax.Array:
    """Pair each signal query with its noise query, which is at index Q - 1. The result is `[B, T, H, 2, d]`."""
    signal_BTNRd, noise_BTN1d = q_BTNQd[..., :-1, :], q_BTNQd[..., -1:, :]
    q_BTNRGd = jnp.stack([signal_BTNRd, jnp.broadcast_to(noise_BTN1d, signal_BTNRd.shape)], axis=-2)
    B, T, N, R, G, d = q_BTNRGd.shape
    return jax.lax.reshape(q_BTNRGd, (B, T, N * R, G, d), out_sharding=sharding)


def check_signal_heads(config: ModelConfig) -> None:
    """Raise `UserError` if `signal_heads` is not set or does not divide `num_heads`."""
    require_field(config, "signal_heads", f"{GDA_SIGNAL_HEADS}")
    signal_heads = config.own.signal_heads
    if config.num_heads % signal_heads:
        raise UserError(
            f"model.{config.architecture}.signal_heads={signal_heads} does not divide num_heads={config.num_heads}, "
            f"which counts all signal heads; use {largest_divisor_up_to(signal_heads, config.num_heads)}, or other "
            "num_heads"
        )
