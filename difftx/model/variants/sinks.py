"""Softmax attention whose weights may sum to less than 1."""

import jax.numpy as jnp

from difftx.kernels import maps
from difftx.model.attention import Attention
from difftx.model.layers import vector


class OffByOneAttention(Attention):
    """Softmax-off-by-one, exp(z_ij) / (1 + Σ_j exp(z_ij)) (E. Miller, "Attention is off by one", 2023)."""

    kernel = "mapped_attention"

    def map_of(self):
        return maps.softmax_with_sink

    def per_query(self, depth):
        return jnp.float32(0)  # Logit of the sink.


class SinkAttention(OffByOneAttention):
    """Softmax with a learned sink per head, exp(z_ij) / (exp(s_h) + Σ_j exp(z_ij)) (gpt-oss, OpenAI 2025).

    s_h starts at 0, which equals softmax-off-by-one.
    """

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        self.sink_H = vector(jnp.zeros((config.num_heads,), jnp.float32, out_sharding=layout.vector))

    def per_query(self, depth):
        return self.sink_H[...]
