"""Softmax attention with an output gate."""
#   B = batch, T = tokens, D = model width, H = heads, K = key/value heads, d = width of a query/key (sub-)head,
#   E = width of a value head

import jax
import jax.numpy as jnp
from flax import nnx

from difftx.config import ModelConfig
from difftx.model.attention import Attention, Depth
from difftx.model.layers import projection
from difftx.parallel.layout import Layout


class GatedAttention(Attention):
    """Softmax attention with a gate on its output: head_i = σ(x W_i) ∘ A_i V, elementwise (arXiv 2505.06708, "G1")."""

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        super().__init__(config, layout, rngs=rngs)
        shape = (config.d_model, config.num_heads, config.d_head)
        self.gate_DHd = projection(config, shape, 1, layout.value_DKE, rngs=rngs)

    def output(self, heads_BTHE: jax.Array, x_BTD: jax.Array, depth: Depth) -> jax.Array:
        """Multiply each head by its gate, then merge the heads."""
        weight_DHd = self.gate_DHd.astype(x_BTD.dtype)
        gate_BTHE = jnp.einsum("BTD,DHd->BTHd", x_BTD, weight_DHd, out_sharding=self.layout.act_BTHE)
        return super().output(jax.nn.sigmoid(gate_BTHE) * heads_BTHE, x_BTD, depth)
