"""Sparse softmax attention."""

import functools

from difftx.kernels import maps
from difftx.model.attention import Attention, require_field


class TopKAttention(Attention):
    """Softmax over the `top_k` largest logits of each query, zero elsewhere (explicit sparsity, arXiv 1912.11637)."""

    kernel = "mapped_attention"
    fields = ("top_k",)

    @classmethod
    def check(cls, config):
        super().check(config)
        require_field(config, "top_k", "an eighth of a row's length")

    @classmethod
    def configure(cls, c, heads):
        """Set `top_k` to an eighth of a row. The value is a starting point for tuning, as no source gives one."""
        super().configure(c, heads)
        c.model.top_k = c.data.sequence_length // 8

    def map_of(self):
        assert self.config.top_k is not None
        return functools.partial(maps.top_k_softmax, k=self.config.top_k)
