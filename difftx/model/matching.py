"""Give a model as many parameters as a Transformer, and warn if a config is not matched in this way."""

from ml_collections import ConfigDict

from difftx.config import Config, ModelConfig
from difftx.config.build import build_group
from difftx.config.fields import flat, values_of
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
    """Return a warning if the model differs from the result of `match`, else None.

    Flags that apply after `match`, such as --config.model.d_model, may have undone the match.
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
    if not flags:  # A field that `match` does not set has added weights, such as `model.gdla.output_gate`.
        width = model.mlp_dim - (counts[0] - counts[1]) / (3 * model.d_model * model.num_layers)
        flags = [f"--config.model.mlp_dim={MLP_MULTIPLE * round(width / MLP_MULTIPLE)}"]
    return (
        f"warning  the model is not matched with {transformer}: {'; '.join(differences)}; for an equal comparison, add "
        f"{' '.join(flags)}, or set the sizes in a recipe before it calls choose"
    )


def _matched_model(config: Config, mlp_dim: int | None) -> ModelConfig:
    """Return the model config that `match` makes for this architecture and width."""
    model, matched = config.model, config.model.matched
    assert matched.num_heads is not None
    replaced, kv_heads = ARCHITECTURES[model.architecture].replaced_heads, model.num_kv_heads
    c = ConfigDict(values_of(config), type_safe=False)
    c.model.update({model.architecture: values_of(type(model.own)())} if model.own else {})
    # Try the recorded number of key/value heads first, then the number that the current config implies.
    for transformer_kv_heads in (matched.num_kv_heads, kv_heads and kv_heads * replaced):
        c.model.update({**default_specific_fields(), "num_kv_heads": transformer_kv_heads, "mlp_dim": mlp_dim})
        match(c, model.architecture, heads=matched.num_heads)
        if c.model.num_kv_heads == kv_heads:
            break
    return build_group(ModelConfig, c.model.to_dict(), "model")


def _is_equal(model: ModelConfig, expected: ModelConfig) -> bool:
    """Return whether two models have equal heads and, up to the rounding in `match`, equally many parameters.

    For `gda`, only the total number of heads must be equal, not the number of signal heads per noise head.
    """
    counts = [count_parameters(each).total for each in (model, expected)]
    heads = [(heads_of(each).sub_heads, heads_of(each).d_head, each.head_norm) for each in (model, expected)]
    rounding = 3 * MLP_MULTIPLE * model.d_model * model.num_layers
    vectors = sum(count_parameters(each).vectors for each in (model, expected))  # λ, for example, may be fixed.
    return heads[0] == heads[1] and abs(counts[0] - counts[1]) <= rounding + vectors


def _layer_weights(c: ConfigDict) -> float:
    """Return the number of weights in the matrices of one layer."""
    model = build_group(ModelConfig, c.model.to_dict(), "model")
    return count_parameters(model).projections / model.num_layers
