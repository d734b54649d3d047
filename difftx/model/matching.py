"""Configs of different architectures with equal numbers of parameters, for fair comparisons."""

from ml_collections import ConfigDict

from difftx.config import ModelConfig
from difftx.config.architectures import ARCHITECTURES
from difftx.config.build import build_group
from difftx.model.abstract import count_parameters

MULTIPLE = 4  # The width of the MLP is a multiple of 4, so that four devices can share it.


def match(c: ConfigDict, architecture: str, *, heads: int) -> None:
    """Convert a Transformer's config to another architecture with the same number of parameters.

    `SelfAttention.configure` sets the heads. If attention then has more or fewer weights than the Transformer's,
    `model.mlp_dim` compensates: SwiGLU has 3 d_model weights per unit of its width.

    Args:
        c: Config with the sizes of the Transformer, changed in place.
        architecture: Name of the new architecture.
        heads: Number of heads of the Transformer.
    """
    c.model.architecture, c.model.num_heads, c.model.head_norm = "transformer", heads, "none"
    expected = _layer_weights(c)
    c.model.architecture = architecture
    ARCHITECTURES[architecture].configure(c, heads)
    if extra := _layer_weights(c) - expected:
        width = c.model.mlp_dim - extra / (3 * c.model.d_model)
        c.model.mlp_dim = MULTIPLE * round(width / MULTIPLE)


def _layer_weights(c: ConfigDict) -> float:
    """Return the number of weights in the matrices of one layer."""
    model = build_group(ModelConfig, c.model.to_dict(), "model")
    return count_parameters(model).projections / model.num_layers
