"""µP across width (arXiv 2203.03466) and CompleteP across depth (arXiv 2505.01618): one learning rate for all sizes.

A model takes over the learning rate η, the weight decay w and the initial variances of a base model, whose width,
number of layers and head width are `model.mup_base_…`. With m = `model.width_ratio` and k = `model.depth_ratio`:

| | base model | this model | where |
|---|---|---|---|
| initial variance of projections | σ² | σ² / m; "fan_in" contains this factor | `layers.projection` |
| update of projections by AdamW | η | η / m | `rate_factors` |
| update of projections by Muon | η | η / √m | `rate_factors` |
| update of embeddings, gains and λ vectors | η | η | |
| decay per update of projections and embeddings | η w | η w | `rate_factors` does not scale it |
| Adam's ε | ε | ε / (m k) | `adam_eps` |
| residual branches | 1 | 1 / k | `decoder.Block` |
| logits | 1 | 1 / m | `Decoder.unembedding` |
| λ_init and post-norm scale of layer l | f(l - 1) | f((l - 1) / k) | `attention.layer_constants` |

The widths of heads are equal, so factors of logits in attention, head norms and λ vectors do not change.
"""

import operator

import jax
import optax

from difftx.config import Config
from difftx.errors import UserError
from difftx.model.abstract import parameter_metadata, vector_mask
from difftx.training.trainable import split

SUPPORTED_OPTIMIZERS = ("adamw", "muon")  # Optimizers that apply `rate_factors`.


def check_parametrization(config: Config) -> None:
    """Raise `UserError` if a base model is set, but the rules above do not cover the config."""
    if config.model.mup_base_width is None:
        return
    if config.optimizer.name not in SUPPORTED_OPTIMIZERS:
        known = " and ".join(SUPPORTED_OPTIMIZERS)
        raise UserError(f"optimizer.name={config.optimizer.name!r}: model.mup_base_width has rules for {known} only")
    if hasattr(config.model.own, "anneal_steps"):  # The fan-in of DEX's matrix does not grow.
        raise UserError(
            f"model.architecture={config.model.architecture!r} continues the training of a Transformer, at a learning "
            "rate of its own; leave model.mup_base_width at None"
        )
    if config.train.lora_rank is not None:
        raise UserError(
            f"train.lora_rank={config.train.lora_rank}: model.mup_base_width has no rule for adapters; leave one of "
            "them at None"
        )
    is_vector, is_projection = vector_mask(config.model)["blocks"], _projections(config)["blocks"]
    for path, is_known in jax.tree.leaves_with_path(jax.tree.map(operator.or_, is_vector, is_projection)):
        if not is_known:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UserError(
                f"model.architecture={config.model.architecture!r}: model.mup_base_width has no rule for the parameter "
                f"{name}; create it with layers.projection or layers.vector"
            )


def adam_eps(config: Config) -> float:
    """Return Adam's ε, scaled down like the gradients."""
    return config.optimizer.eps / (config.model.width_ratio * config.model.depth_ratio)


def rate_factors(config: Config, *, exponent: float) -> tuple[optax.GradientTransformation, ...]:
    """Return a transformation that divides the updates of projections by `width_ratio ** exponent`, or () if this is 1.

    It is applied after the optimizer's moments and before weight decay, so the decay per update does not depend on the
    width.
    """
    factor = config.model.width_ratio**-exponent
    return () if factor == 1 else (optax.masked(optax.scale(factor), split(config, _projections(config))[0]),)


def _projections(config: Config) -> dict:
    """Return a tree of booleans: True for projections, which are linear maps between activations."""
    axes = parameter_metadata(config.model, "matrix_axes", None)
    return jax.tree.map(
        lambda axes: axes is not None, axes, is_leaf=lambda axes: axes is None or isinstance(axes, tuple)
    )
