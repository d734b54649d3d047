"""Softmax attention with a learned sign per entry."""
#   B = batch, T = tokens, D = model width, H = heads, K = key/value heads, d = width of a query/key (sub-)head,
#   E = width of a value head

import jax

from difftx.kernels import maps
from difftx.model.attention import Depth, DiffAttention, SelfAttention


class SignedMaskAttention(DiffAttention):
    """One softmax with a learned sign for each entry, (softmax(Q1 K1ᵀ/√d) ∘ tanh(Q2 K2ᵀ/√d)) V: no second softmax.

    What a reviewer of arXiv 2410.05258 asks for: is it cancelled noise, or are negative weights enough? So all else is
    DiffAttention's: its projections, the head norm, and the factor 1 - λ_init (or `post_scale`).
    """

    kernel = "mapped_attention"
    fields = ("lambda_init", "post_scale")
    has_lambda_vectors = False

    attend = SelfAttention.attend

    def map_of(self) -> maps.Map:
        """A1 ∘ tanh."""
        return maps.signed_softmax

    def per_query(self, depth: Depth) -> None:
        """There is no λ."""
        return None

    def statistics(self, x_BTD: jax.Array, depth: Depth) -> dict[str, jax.Array]:
        """Return nothing: there is no λ."""
        return {}
