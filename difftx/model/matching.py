"""Give a model as many parameters as a Transformer, and warn if a config is not matched in this way."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from difftx.config import Config, ModelConfig
from difftx.config.build import build_group
from difftx.config.model import default_specific_fields
from difftx.errors import UserError
from difftx.model.abstract import count_parameters
from difftx.model.architectures import ARCHITECTURES, heads_of

MLP_MULTIPLE = 4  # `match` rounds the MLP width to a multiple of this number, so that four devices can shard it.


def match(c: ConfigDict, architecture: str, *, heads: int) -> None:
    """Convert the config of a Transformer with `heads` heads to another architecture with equally many parameters.

    On entry, `model.num_kv_heads` and `model.mlp_dim` are those of the Transformer. `SelfAttention.configure` sets the
    heads of the new architecture. If its attention has more or fewer weights, `model.mlp_dim` compensates for them:
    SwiGLU has 3 d_model weights per unit of width. `model.matched` records the Transformer's values.
    """
    c.model.matched.update(num_heads=heads, num_kv_heads=c.model.num_kv_heads, mlp_dim=c.model.mlp_dim)
    c.model.architecture, c.model.num_heads, c.model.head_norm = "transformer", heads, "none"
    expected = _layer_weights(c)
    c.model.architecture = architecture
    ARCHITECTURES[architecture].configure(c, heads)
    if extra := _layer_weights(c) - expected:
        width = c.model.mlp_dim - extra / (3 * c.model.d_model)
        c.model.mlp_dim = MLP_MULTIPLE * round(width / MLP_MULTIPLE)


def matching_warning(config: Config) -> str | None:
    """Return a warning if the model differs in size from the Transformer that `match` made it equal to, else None.

    Flags that apply after `match`, such as --config.model.d_model, may have undone the match. If a user changes
    `model.mlp_dim` or `model.num_kv_heads` in all models of a comparison, the Transformer has the change too.
    """
    model, matched = config.model, config.model.matched
    if matched.num_heads is None:
        return None
    architecture, heads = ARCHITECTURES[model.architecture], heads_of(model)
    found, kv_heads = count_parameters(model), model.num_kv_heads
    sizes: list[dict[str, Any]] = [
        {"num_kv_heads": transformers_kv_heads, "mlp_dim": mlp_dim}
        for transformers_kv_heads in (matched.num_kv_heads, kv_heads and kv_heads * architecture.replaced_heads)
        for mlp_dim in (matched.mlp_dim, model.mlp_dim)
    ]
    fields: dict[str, Any] = {"architecture": "transformer", "head_norm": "none", "num_heads": matched.num_heads}
    fields |= default_specific_fields() | {"attention_implementation": "auto", "extensions": ()}
    warning = f"warning  the model is not matched with a Transformer of {matched.num_heads} heads"
    try:
        transformers = [dataclasses.replace(model, **fields, **size) for size in sizes]
        width = heads_of(transformers[0]).d_head
        counts = [count_parameters(transformer) for transformer in transformers]
    except UserError as error:
        return f"{warning}, because it has none: {error}"
    differences = []
    if (heads.sub_heads, heads.d_head) != (matched.num_heads, width):
        differences.append(f"{heads.sub_heads} sub-heads of width {heads.d_head}, not {matched.num_heads} of {width}")
    if model.head_norm != architecture.default_head_norm:
        differences.append(f"model.head_norm={model.head_norm}, not {architecture.default_head_norm}")
    per_unit = 3 * model.d_model * model.num_layers  # Weights of the MLPs per unit of their width.
    # The vectors may differ: for example, λ may not be learned.
    if all(abs(found.total - c.total) > MLP_MULTIPLE * per_unit + found.vectors + c.vectors for c in counts):
        expected = counts[0].total
        mlp_dim = MLP_MULTIPLE * round((model.mlp_dim - (found.total - expected) / per_unit) / MLP_MULTIPLE)
        differences.append(f"{found.total:,} parameters, not {expected:,}, as with --config.model.mlp_dim={mlp_dim}")
    fix = "for an equal comparison, set the sizes in a recipe before it calls choose"
    return f"{warning}: {'; '.join(differences)}; {fix}" if differences else None


def _layer_weights(c: ConfigDict) -> float:
    """Return the number of weights in the matrices of one layer."""
    model = build_group(ModelConfig, c.model.to_dict(), "model")
    return count_parameters(model).projections / model.num_layers
