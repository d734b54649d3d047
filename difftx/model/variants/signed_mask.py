"""Softmax attention with a learned sign for each attention weight."""

from difftx.kernels import maps
from difftx.model.attention import DiffAttention


class SignedMaskAttention(DiffAttention):
    """Softmax attention with a learned sign and scale for each weight, (softmax(Q1 K1ᵀ/√d) ∘ tanh(Q2 K2ᵀ/√d)) V.

    A reviewer of arXiv 2410.05258 asked whether negative weights alone explain the gains of differential attention,
    without cancelled noise. To test this, everything else is as in `DiffAttention`: projections, head norm and the
    factor 1 - λ_init (or `post_scale`). There is no λ.
    """

    kernel = "mapped_attention"
    fields = ("lambda_init", "post_scale")
    has_lambda_vectors = False

    def map_of(self):
        return maps.signed_softmax

    def per_query(self, depth):
        return None

    def statistics(self, x_BTD, depth):
        return {}
