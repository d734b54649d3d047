"""Variants of softmax attention."""
# Axes: B = batch, T = tokens, D = model width, H = heads, d = width of a head, E = d

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from difftx.config import affects
from difftx.config.fields import Group, Positive
from difftx.errors import UserError
from difftx.kernels import weight_functions
from difftx.model.architectures import heads_of
from difftx.model.attention import Attention, require_field
from difftx.model.layers import linear, projection, vector
from difftx.parallel.layout import Layout


class GatedAttention(Attention):
    """Softmax attention with an elementwise gate on its output, head_i = σ(x W_i) ∘ A_i V (arXiv 2505.06708, "G1").

    The gate has D² weights, so the MLP is D / 3 narrower than in a Transformer with equally many parameters.
    """

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        shape = (config.d_model, config.num_heads, heads_of(config).d_head)
        self.gate_DHd = projection(config, shape, 1, layout.value_DKE, rngs=rngs)

    @classmethod
    def tensors(cls, config):
        return super().tensors(config) | {"gate_proj.weight": ("Hd D", "gate_DHd", "D H d")}

    def output(self, heads_BTHE, x_BTD, constants):
        return super().output(gate(x_BTD, self.gate_DHd, self.layout) * heads_BTHE, x_BTD, constants)


class OffByOneAttention(Attention):
    """Softmax-off-by-one weights, exp(z_ij) / (1 + Σ_j exp(z_ij)) (E. Miller, "Attention is off by one", 2023)."""

    kernel = "weighted_attention"

    def weight_function(self):
        return weight_functions.softmax_with_sink

    def weight_argument(self, constants, x_BTD):
        return jnp.float32(0)  # Logit of the sink.


class SinkAttention(OffByOneAttention):
    """Softmax with a learned sink per head, exp(z_ij) / (exp(s_h) + Σ_j exp(z_ij)) (gpt-oss, OpenAI 2025).

    s_h is initially 0, as in softmax-off-by-one.
    """

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        self.sink_H = vector(jnp.zeros((config.num_heads,), jnp.float32, out_sharding=layout.vector))

    @classmethod
    def tensors(cls, config):
        return super().tensors(config) | {"sinks": ("H", "sink_H", "H")}

    def weight_argument(self, constants, x_BTD):
        return self.sink_H[...]


class TopKConfig(Group):
    """Settings of the architecture top_k."""

    k: affects.Function[Positive[int] | None] = None
    """Number of keys that a query attends to."""


class TopKAttention(Attention):
    """Softmax over the `k` largest logits of each query, zero elsewhere (explicit sparsity, arXiv 1912.11637)."""

    kernel = "weighted_attention"
    own_config = TopKConfig

    @classmethod
    def check(cls, config):
        super().check(config)
        require_field(config, "k", "an eighth of a row's length")

    @classmethod
    def check_rows(cls, config, tokens):
        if config.own.k > tokens:
            raise UserError(
                f"model.{config.architecture}.k={config.own.k} exceeds data.sequence_length={tokens}, so it would keep "
                "every key; use a smaller number"
            )

    @classmethod
    def configure(cls, c, heads):
        """Set `k` to an eighth of the row length. No source gives a value, so this is a starting point for tuning."""
        super().configure(c, heads)
        c.model[c.model.architecture] = {"k": c.data.sequence_length // 8}

    def weight_function(self):
        return functools.partial(weight_functions.top_k_softmax, k=self.config.own.k)


def gate(x_BTD: jax.Array, gate_DHd: nnx.Param, layout: Layout) -> jax.Array:
    """Return σ(x W_g), `[B, T, H, d]`: one factor per channel of each head's output."""
    return jax.nn.sigmoid(linear("BTD,DHd->BTHd", x_BTD, gate_DHd, layout.act_BTHE))
