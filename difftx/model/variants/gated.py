"""Softmax attention with an output gate."""
#   B = batch, T = tokens, D = model width, H = heads, d = width of a head, E = d

import jax
import jax.numpy as jnp

from difftx.model.attention import Attention
from difftx.model.layers import projection


class GatedAttention(Attention):
    """Softmax attention with a gate on its output: head_i = σ(x W_i) ∘ A_i V, elementwise (arXiv 2505.06708, "G1").

    The gate has D² weights, so the MLP of a matched model is D / 3 narrower than the Transformer's.
    """

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        shape = (config.d_model, config.num_heads, config.d_head)
        self.gate_DHd = projection(config, shape, 1, layout.value_DKE, rngs=rngs)

    def output(self, heads_BTHE, x_BTD, depth):
        weight_DHd = self.gate_DHd.astype(x_BTD.dtype)
        gate_BTHE = jnp.einsum("BTD,DHd->BTHd", x_BTD, weight_DHd, out_sharding=self.layout.act_BTHE)
        return super().output(jax.nn.sigmoid(gate_BTHE) * heads_BTHE, x_BTD, depth)
