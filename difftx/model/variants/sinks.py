"""Softmax attention whose weights may sum to less than 1."""
#   B = batch, T = tokens, D = model width, H = heads, K = key/value heads, d = width of a query/key (sub-)head,
#   E = width of a value head

import jax
import jax.numpy as jnp
from flax import nnx

from difftx.config import ModelConfig
from difftx.kernels import maps
from difftx.model.attention import Depth, MappedAttention
from difftx.model.layers import vector
from difftx.parallel.layout import Layout


class OffByOneAttention(MappedAttention):
    """Softmax-off-by-one, exp(z_ij) / (1 + Σ_j exp(z_ij)) (E. Miller, "Attention is off by one", 2023)."""

    def map_of(self) -> maps.Map:
        """Return softmax with a sink."""
        return maps.softmax_with_sink

    def per_query(self, depth: Depth) -> jax.Array:
        """Return the logit of the sink, 0."""
        return jnp.float32(0)


class SinkAttention(MappedAttention):
    """Softmax with a learned sink per head, exp(z_ij) / (exp(s_h) + Σ_j exp(z_ij)) (gpt-oss, OpenAI 2025).

    s_h starts at 0, which equals softmax-off-by-one.
    """

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        super().__init__(config, layout, rngs=rngs)
        self.sink_H = vector(jnp.zeros((config.num_heads,), jnp.float32, out_sharding=layout.vector))

    def map_of(self) -> maps.Map:
        """Return softmax with a sink."""
        return maps.softmax_with_sink

    def per_query(self, depth: Depth) -> jax.Array:
        """Return the logits s_h of the sinks."""
        return self.sink_H[...]
