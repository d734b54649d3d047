"""Select the parameters to train: those in `train.trainable`, or LoRA adapters (arXiv 2106.09685), or all.

In the train state, the adapter of the weight `blocks/mlp/up_DF` is stored as `lora/blocks/mlp/up_DF/a` and `…/b`.
Training computes x W + (alpha / rank) x A B. Readers of a checkpoint get the merged weight W + (alpha / rank) A B, so
adapters are not part of the model.
"""

import fnmatch
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

from difftx.config import Config, ModelConfig, TrainConfig
from difftx.errors import UserError, did_you_mean
from difftx.model.abstract import parameter_metadata
from difftx.model.lora import LORA, Adapted

flatten: Callable[[Any], dict[str, Any]] = functools.partial(flax.traverse_util.flatten_dict, sep="/")
unflatten: Callable[[Any], Any] = functools.partial(flax.traverse_util.unflatten_dict, sep="/")


def split(config: Config, params: Any) -> tuple[Any, Any]:
    """Split the parameters into trainable and frozen ones. Each result only has its own entries.

    `params` is a tree of nested dictionaries with an entry for each parameter.
    """
    names, by_name = trainable(config), flatten(params)
    if names == by_name.keys():
        return params, {}
    train, frozen = ({n: x for n, x in by_name.items() if (n in names) == part} for part in (True, False))
    return unflatten(train), unflatten(frozen)


def join(train: Any, frozen: Any) -> Any:
    """Join the results of `split`."""
    return unflatten(flatten(train) | flatten(frozen)) if frozen else train


def metadata(config: Config, name: str, default: Any) -> Any:
    """Return `parameter_metadata` for the trainable parameters. Adapters have the default."""
    return split(config, unflatten(_metadata(config, name, default)))[0]


def trainable(config: Config) -> set[str]:
    """Return the paths of the trainable parameters, such as "blocks/mlp/up_DF".

    They include the progress of `anneal_steps`, which does not follow a gradient. Raise `UserError` if a pattern in
    `train.trainable` matches no path.
    """
    is_progress = _metadata(config, "is_progress", False)
    found = {name for name, grows in is_progress.items() if grows}
    for pattern in config.train.trainable or ("*" if config.train.lora_rank is None else f"{LORA}/*",):
        matches = fnmatch.filter(is_progress, pattern)
        if not matches:
            hint = did_you_mean(pattern, is_progress)
            raise UserError(f"train.trainable={pattern!r} matches no path of a parameter.{hint}")
        found.update(matches)
    return found


def _metadata(config: Config, name: str, default: Any) -> dict[str, Any]:
    by_name = flatten(parameter_metadata(config.model, name, default))
    if config.train.lora_rank is not None:
        adapters = [f"{LORA}/{weight}/{part}" for weight in adapted_names(config.model) for part in ("a", "b")]
        by_name |= dict.fromkeys(adapters, default)
    return by_name


def adapted_names(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the path of each weight that gets an adapter, with its numbers of input and output axes."""
    axes = flatten(parameter_metadata(model, "matrix_axes", None))
    return {name: (len(each[0]), len(each[1])) for name, each in axes.items() if each is not None}


def new_adapters(model: ModelConfig, params: Any, rank: int, key: jax.Array) -> Any:
    """Create adapters for the parameters: A is initialised as in PEFT, and B is 0.

    A is sharded like the weight along its inputs, B like the weight along its outputs.
    """
    adapters, weights = {}, flatten(params)
    for number, (name, (inputs, outputs)) in enumerate(sorted(adapted_names(model).items())):
        shape, spec = weights[name].shape, jax.typeof(weights[name]).sharding.spec
        layers, end = len(shape) - inputs - outputs, len(shape) - outputs
        axes = {"in_axis": range(layers, end), "out_axis": -1, "batch_axis": range(layers)}
        init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", **axes)
        a_shape, a_spec = (*shape[:end], rank), jax.P(*spec[:end], None)
        b_shape, b_spec = (*shape[:layers], rank, *shape[end:]), jax.P(*spec[:layers], None, *spec[end:])
        adapters[f"{name}/a"] = init(jax.random.fold_in(key, number), a_shape, jnp.float32, out_sharding=a_spec)
        adapters[f"{name}/b"] = jnp.zeros(b_shape, jnp.float32, out_sharding=b_spec)
    return unflatten(adapters)


def with_adapters(params: Mapping[str, Any], c: TrainConfig) -> Any:
    """Return the parameters for `nnx.merge`. A weight with an adapter becomes an `Adapted`."""
    if LORA not in params:
        return params
    weights = flatten({name: part for name, part in params.items() if name != LORA})
    adapters = flatten(params[LORA])
    for name in {path.rpartition("/")[0] for path in adapters}:
        a, b = (adapters[f"{name}/{part}"] for part in ("a", "b"))
        weights[name] = Adapted(weights[name], a, b, c.lora_alpha / a.shape[-1])
    return unflatten(weights)


def merged(params: Mapping[str, Any], c: TrainConfig) -> Any:
    """Return the model's parameters with adapters merged into them."""
    if LORA not in params:
        return params

    def merge(params: Any) -> Any:
        weights = flatten(with_adapters(params, c))
        return unflatten({name: x[...] if isinstance(x, Adapted) else x for name, x in weights.items()})

    return jax.jit(merge)(params)
