"""Models of equal size: the honest comparison needs as many parameters in every architecture."""

from ml_collections import ConfigDict

from difftx.config import ModelConfig
from difftx.config.architectures import ARCHITECTURES
from difftx.config.build import build_group
from difftx.model.abstract import count_parameters

MULTIPLE = 4  # Of the MLP's width, so that four devices can share it.


def match(c: ConfigDict, architecture: str, *, heads: int) -> None:
    """Turn a Transformer's config into another architecture's with as many parameters.

    The architecture's `configure` sets its heads. Where the weights of attention then differ from the Transformer's,
    `model.mlp_dim` makes up for it: SwiGLU has 3 d_model weights per unit of its width.

    Args:
        c: config with the sizes of the Transformer; changed in place.
        architecture: name.
        heads: number of heads of the Transformer.
    """
    c.model.architecture, c.model.num_heads, c.model.head_norm = "transformer", heads, "none"
    expected = _layer_weights(c)
    c.model.architecture = architecture
    ARCHITECTURES[architecture].configure(c, heads)
    if extra := _layer_weights(c) - expected:
        width = c.model.mlp_dim - extra / (3 * c.model.d_model)
        c.model.mlp_dim = MULTIPLE * round(width / MULTIPLE)


def _layer_weights(c: ConfigDict) -> float:
    """Return the weights of a layer's matrices."""
    model = build_group(ModelConfig, c.model.to_dict(), "model")
    return count_parameters(model).projections / model.num_layers
