"""Sparse softmax attention."""

import functools

from difftx.config.checks import require_positive
from difftx.errors import UserError
from difftx.kernels import maps
from difftx.model.attention import MappedAttention


class TopKAttention(MappedAttention):
    """Softmax over the `top_k` largest logits of each query, zero elsewhere (explicit sparsity, arXiv 1912.11637)."""

    fields = ("top_k",)

    @classmethod
    def check(cls, config):
        """Raise `UserError` for unsupported values, including a missing `top_k` or one that is not positive."""
        super().check(config)
        if config.top_k is None:
            raise UserError("model.top_k=None: architecture 'top_k' requires it; an eighth of a row's length is common")
        require_positive("model", config, "top_k")

    @classmethod
    def configure(cls, c, heads):
        """Set `top_k` to an eighth of a row. The value is a starting point for tuning, as no source gives one."""
        super().configure(c, heads)
        c.model.top_k = c.data.sequence_length // 8

    def map_of(self) -> maps.Map:
        """Return softmax over the `top_k` largest logits."""
        assert self.config.top_k is not None
        return functools.partial(maps.top_k_softmax, k=self.config.top_k)
