"""Softmax attention with a learned sign for each attention weight."""
#   B = batch, T = tokens, D = model width, H = heads, K = key/value heads, d = width of a query/key (sub-)head,
#   E = width of a value head

import jax

from difftx.kernels import maps
from difftx.model.attention import Depth, DiffAttention, SelfAttention


class SignedMaskAttention(DiffAttention):
    """Softmax attention with a learned sign and scale for each weight, (softmax(Q1 K1ᵀ/√d) ∘ tanh(Q2 K2ᵀ/√d)) V.

    A reviewer of arXiv 2410.05258 asked whether negative weights alone explain the gains of differential attention,
    without cancelled noise. To test this, everything else is as in `DiffAttention`: projections, head norm and the
    factor 1 - λ_init (or `post_scale`).
    """

    kernel = "mapped_attention"
    fields = ("lambda_init", "post_scale")
    has_lambda_vectors = False

    attend = SelfAttention.attend

    def map_of(self) -> maps.Map:
        """Return the function softmax(Z1) ∘ tanh(Z2) of the logits of both groups."""
        return maps.signed_softmax

    def per_query(self, depth: Depth) -> None:
        """Return None, because there is no λ."""
        return None

    def statistics(self, x_BTD: jax.Array, depth: Depth) -> dict[str, jax.Array]:
        """Return no statistics, because there is no λ."""
        return {}
