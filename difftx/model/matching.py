"""Configs of models with as many parameters as a Transformer, and a warning for a config that is not matched."""

from ml_collections import ConfigDict

from difftx.config import Config, ModelConfig
from difftx.config.build import build_group
from difftx.config.fields import flat, values_of
from difftx.config.model import default_specific_fields
from difftx.errors import UserError
from difftx.model.abstract import count_parameters
from difftx.model.architectures import ARCHITECTURES, heads_of

MLP_MULTIPLE = 4  # `match` sets the width of the MLP to a multiple of this number, so that four devices can share it.


def match(c: ConfigDict, architecture: str, *, heads: int) -> None:
    """Convert the config of a Transformer with `heads` heads to another architecture with as many parameters.

    `model.num_kv_heads` is that of the Transformer too. `SelfAttention.configure` sets the heads of the new
    architecture. If its attention has more or fewer weights than the Transformer's, `model.mlp_dim` compensates,
    because SwiGLU has 3 d_model weights per unit of its width. `model.matched` holds the Transformer.
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
    """Return a line on how a model differs from the one that `match` gives, or None if it does not differ.

    Changes after `match`, such as --config.model.d_model, may have undone the match. A changed `model.mlp_dim` may be
    that of the Transformer too.
    """
    model = config.model
    if model.matched.num_heads is None:
        return None
    transformer = f"a Transformer of {model.matched.num_heads} heads"
    try:
        expected = _matched_model(config, model.matched.mlp_dim)
        if _is_equal(model, expected) or _is_equal(model, _matched_model(config, model.mlp_dim)):
            return None
    except UserError as error:
        return f"warning  the model is not matched with {transformer}, because it has none: {error}"
    names = [*values_of(model.matched), "head_norm"]  # The fields that `match` sets.
    ours, theirs = heads_of(model), heads_of(expected)
    values, wanted = (flat(values_of(each)) for each in (model, expected))
    if ours.sub_heads == theirs.sub_heads:
        names.remove("num_heads")
    else:
        names += [name for name in values if name.startswith(f"{model.architecture}.")]
    names = [name for name in names if values[name] != wanted[name]]
    differences = [f"model.{name}={values[name]}, not {wanted[name]}" for name in names]
    if ours.d_head != theirs.d_head:
        differences.append(f"heads of width {ours.d_head}, not {theirs.d_head}")
    counts = [count_parameters(each).total for each in (model, expected)]
    if counts[0] != counts[1]:
        differences.append(f"{counts[0]:,} parameters, not {counts[1]:,}")
    flags = [f"--config.model.{name}={wanted[name]}" for name in names]
    if not flags:  # A field that `match` does not know has added weights, such as `model.gdla.output_gate`.
        width = model.mlp_dim - (counts[0] - counts[1]) / (3 * model.d_model * model.num_layers)
        flags = [f"--config.model.mlp_dim={MLP_MULTIPLE * round(width / MLP_MULTIPLE)}"]
    return (
        f"warning  the model is not matched with {transformer}: {'; '.join(differences)}; for an equal comparison, add "
        f"{' '.join(flags)}, or set the sizes in a recipe before it calls choose"
    )


def _matched_model(config: Config, mlp_dim: int | None) -> ModelConfig:
    """Return the model of the config's architecture that matches a Transformer of its width."""
    model, matched = config.model, config.model.matched
    assert matched.num_heads is not None
    replaced, kv_heads = ARCHITECTURES[model.architecture].replaced_heads, model.num_kv_heads
    c = ConfigDict(values_of(config), type_safe=False)
    c.model.update({model.architecture: values_of(type(model.own)())} if model.own else {})
    # The Transformer's number of key/value heads, or what a changed number of the model implies for the Transformer.
    for of_transformer in (matched.num_kv_heads, kv_heads and kv_heads * replaced):
        c.model.update({**default_specific_fields(), "num_kv_heads": of_transformer, "mlp_dim": mlp_dim})
        match(c, model.architecture, heads=matched.num_heads)
        if c.model.num_kv_heads == kv_heads:
            break
    return build_group(ModelConfig, c.model.to_dict(), "model")


def _is_equal(model: ModelConfig, expected: ModelConfig) -> bool:
    """Return whether two models have equal heads and, up to the rounding of `match`, equally many parameters.

    In `gda`, models with other numbers of signal heads per noise head have equal heads if all together are as many.
    """
    counts = [count_parameters(each).total for each in (model, expected)]
    heads = [(heads_of(each).sub_heads, heads_of(each).d_head, each.head_norm) for each in (model, expected)]
    rounding = 3 * MLP_MULTIPLE * model.d_model * model.num_layers
    vectors = sum(count_parameters(each).vectors for each in (model, expected))  # For example, λ may not be learned.
    return heads[0] == heads[1] and abs(counts[0] - counts[1]) <= rounding + vectors


def _layer_weights(c: ConfigDict) -> float:
    """Return the number of weights in the matrices of one layer."""
    model = build_group(ModelConfig, c.model.to_dict(), "model")
    return count_parameters(model).projections / model.num_layers
