"""Convert the weights of a Transformer to a differential architecture (docs/differentialize.md).

All values of the Transformer are copied bit for bit. Weights that only the new architecture has are initialised as in a
new model.
"""
# Axes in strings: D = model width, H = heads, K = key/value heads, G = 2 groups of a head, P = K / 2 pairs of key/value
# heads, R = H / K query heads per key/value head, d = width of a head.
# Axes of arrays: B = rows, T = tokens, C = selected queries, L = layers, H = heads

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import reshard

from difftx.config import Config, ModelConfig
from difftx.config.fields import Flag, fields_with
from difftx.config.model import MatchedConfig
from difftx.data.loader import Batch, ordered_batches
from difftx.data.sources import Sources
from difftx.errors import UserError
from difftx.inference.decode import put
from difftx.interop.fields import heads_from
from difftx.interop.parameters import by_layer, by_rows, rearrange, sizes_of
from difftx.kernels.rows import AttentionRows
from difftx.model.abstract import abstract_parameters
from difftx.model.architectures import heads_of
from difftx.model.decoder import Decoder
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import batch_shards
from difftx.training.checkpoint.manifest import Manifest, WeightsPart
from difftx.training.checkpoint.restoring import restore_params
from difftx.training.checkpoint.weights import ParamsReader, Streamed
from difftx.training.state import graph

Heads = Literal["entropy", "all"]

# Fields of `model` that users may set for the new model. All other fields are copied from the Transformer.
CHANGEABLE = fields_with(ModelConfig, Flag.SPECIFIC, Flag.CONVERSION)
ATTENTION = "blocks/attention/"
ENTROPY_ROWS, ENTROPY_QUERIES = 32, 64  # DEX chooses heads by 64 queries in each of 32 validation rows.

# Architecture → name of an attention parameter → (name in the Transformer, axes there, new axes). If only the new axes
# have the group axis G, the Transformer's values become the first group. Parameters that are not listed are copied from
# the parameter with the same name.
SOURCES: dict[str, dict[str, tuple[str, str, str]]] = {
    "zero_branch": {
        "query_DHGd": ("query_DHd", "D H d", "D H G d"),
        "key_DKGd": ("key_DKd", "D K d", "D K G d"),
        "value_DKE": ("value_DKd", "D K d", "D K d"),
        "output_HED": ("output_HdD", "H d D", "H d D"),
        "query_bias": ("query_bias", "H d", "H G d"),
        "key_bias": ("key_bias", "K d", "K G d"),
    },
    "dex": {},
    "diff": {
        "query_DHGd": ("query_DHd", "D PGR d", "D PR G d"),
        "key_DKGd": ("key_DKd", "D PG d", "D P G d"),
        "value_DKE": ("value_DKd", "D PG d", "D P Gd"),
        "output_HED": ("output_HdD", "PGR d D", "PR Gd D"),
        "query_bias": ("query_bias", "PGR d", "PR G d"),
        "key_bias": ("key_bias", "PG d", "P G d"),
        "value_bias": ("value_bias", "PG d", "P Gd"),
    },
}


def require_convertible(transformer: ModelConfig, architecture: str) -> None:
    """Raise `UserError` if a model is not a Transformer, or cannot be converted to `architecture`."""
    if transformer.architecture != "transformer":
        raise UserError(f"model.architecture={transformer.architecture!r}: --differential requires a 'transformer'")
    if transformer.head_norm != "none":
        raise UserError(f"model.head_norm={transformer.head_norm!r}: --differential requires a Transformer without one")
    for name in ("mup_base_width", "post_scale"):
        value = getattr(transformer, name)
        if architecture != "diff" and value is not None:
            raise UserError(
                f"model.{name}={value}: architecture {architecture!r} lacks the factors of this field, so the new "
                "model would compute another function; use --differential=split"
            )


def is_changeable(field: str, architecture: str) -> bool:
    """Return whether users may set this field of `model` in a conversion to `architecture`."""
    return field in CHANGEABLE or field.startswith(f"{architecture}.")


def new_model(transformer: ModelConfig, chosen: ModelConfig) -> ModelConfig:
    """Return the Transformer's config with the architecture and the fields in `CHANGEABLE` taken from `chosen`."""
    require_convertible(transformer, chosen.architecture)
    fields = {name: getattr(chosen, name) for name in ("architecture", *CHANGEABLE)}
    if chosen.architecture == "diff":
        heads, kv_heads = transformer.num_heads, heads_of(transformer).kv_heads
        if kv_heads % 2:
            name = "num_heads" if kv_heads == heads else "num_kv_heads"
            raise UserError(
                f"model.{name}={kv_heads}: split makes one head of two that differ in keys and values, so their "
                "number must be even; use zero-branch or dex"
            )
        fields |= heads_from(transformer.d_model, 2, heads // 2, kv_heads // 2, heads_of(transformer).d_head)
    return dataclasses.replace(transformer, matched=MatchedConfig(), **fields, extensions=chosen.extensions)


def new_params(
    reader: ParamsReader, transformer: ModelConfig, config: Config, chosen_LH: np.ndarray | None
) -> dict[str, Streamed]:
    """Return the new model's parameters by path. `reader` reads the Transformer's parameters.

    Call this function under the mesh of the new parameters. `chosen_LH` is 1 for heads that DEX corrects, else 0.
    """
    model = config.model
    source_of = {f"{ATTENTION}{name}": found for name, found in SOURCES[model.architecture].items()}
    old, shapes = _shapes(transformer), _shapes(model)
    new = [name for name in shapes if name not in old and name not in source_of]
    with_new_group = [name for name, (_, axes, new_axes) in source_of.items() if "G" in new_axes and "G" not in axes]
    initial = _initial_values(config, [*new, *(name for name in with_new_group if name in shapes)])
    if chosen_LH is not None:
        initial[f"{ATTENTION}chosen_H"] = chosen_LH
    arrays = copied_params(reader, model)
    for name, shape in shapes.items():
        if name in source_of:
            read_layer = partial(_layer_of, reader, transformer, *source_of[name], initial.get(name))
            arrays[name] = by_layer(shape, read_layer)
        elif name in initial:
            arrays[name] = by_layer(shape, initial[name].__getitem__)
    return arrays


def copied_params(reader: ParamsReader, model: ModelConfig) -> dict[str, Streamed]:
    """Return a model's parameters by path, without changing them."""
    copied = {True: by_layer, False: by_rows}
    return {
        name: copied[name.startswith("blocks/")](shape, partial(reader.read, name))
        for name, shape in _shapes(model).items()
    }


def heads_by_entropy(
    config: Config, mesh: jax.sharding.Mesh, checkpoint: Manifest, part: WeightsPart, sources: Sources
) -> np.ndarray:
    """Choose the half of each layer's heads with the highest attention entropy: 1, else 0, float32 `[L, H]`.

    The entropy is a mean over queries of validation rows, as in DEX (arXiv 2505.16333). Padding does not count.
    `config` is the Transformer's config.
    """
    rows, length = batch_shards(mesh), config.data.sequence_length
    layout = Layout.of(config.mesh.context_method).with_whole_rows()
    positions_C = np.unique(np.linspace(0, length - 1, ENTROPY_QUERIES, dtype=np.int32))
    sharding = jax.NamedSharding(mesh, Layout().act_BT)
    total_LH = np.zeros((config.model.num_layers, config.model.num_heads))
    with jax.set_mesh(mesh):
        graphdef = graph(config, layout)
        params = restore_params(checkpoint, config, mesh, part)
        queries_BC = put(mesh, np.tile(positions_C, (rows, 1)))
        for source in sources.valid.values():
            batches = ordered_batches(
                source,
                batch_rows=rows,
                limit_tokens=max(1, ENTROPY_ROWS // len(sources.valid)) * length,
                sharding=sharding,
                vocab_size=config.model.embeddings,
            )
            for batch in batches:
                total_LH += np.asarray(_entropies(graphdef, params, batch, queries_BC))
    heads = config.model.num_heads
    rank_LH = np.argsort(np.argsort(-total_LH, axis=1, kind="stable"), axis=1, kind="stable")
    return (rank_LH < (heads + 1) // 2).astype(np.float32)


@partial(jax.jit, static_argnums=0)
def _entropies(graphdef: nnx.GraphDef, params: object, batch: Batch, queries_BC: jax.Array) -> jax.Array:
    """Sum the entropies of the attention weights over all queries that are not padding, per layer and head `[L, H]`."""
    model = nnx.merge(graphdef, params)
    real_BC = jnp.take_along_axis(*reshard((batch.is_real_BT, queries_BC), jax.P()), axis=1)

    def entropies(rows: AttentionRows) -> jax.Array:
        entropy_BCH = reshard(jnp.sum(jax.scipy.special.entr(rows.weights_BCHS), axis=3), jax.P())
        return jnp.sum(jnp.where(real_BC[:, :, None], entropy_BCH, 0), axis=(0, 1))

    return model.attention_rows(
        batch.tokens_BT, queries_BC, entropies, positions_BT=batch.positions_BT, segment_ids_BT=batch.segment_ids_BT
    )


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    tree: Any = nnx.to_pure_dict(abstract_parameters(model))
    flat: dict[str, Any] = flax.traverse_util.flatten_dict(tree, sep="/")
    return {name: leaf.shape for name, leaf in flat.items()}


def _initial_values(config: Config, names: Iterable[str]) -> dict[str, np.ndarray]:
    def initial() -> dict[str, Any]:
        params = nnx.to_pure_dict(nnx.state(Decoder(config.model, rngs=nnx.Rngs(config.train.seed))))
        flat = flax.traverse_util.flatten_dict(params, sep="/")
        return {name: flat[name] for name in names}

    return {name: np.asarray(value) for name, value in jax.jit(initial)().items()}


def _layer_of(
    reader: ParamsReader,
    transformer: ModelConfig,
    name: str,
    axes: str,
    new_axes: str,
    initial_L: np.ndarray | None,
    layer: int,
) -> np.ndarray:
    """Convert the Transformer's parameter `name` in one layer to the new axes."""
    array = reader.read(f"{ATTENTION}{name}", layer)
    if initial_L is not None:
        return np.stack([array, initial_L[layer][..., 1, :]], axis=-2)
    K = heads_of(transformer).kv_heads
    sizes = sizes_of(transformer) | {"P": K // 2, "R": transformer.num_heads // K}
    return rearrange(array, axes, new_axes, sizes)
