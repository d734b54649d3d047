"""Restore a checkpoint's config, train state and parameters. The checkpoint must have been verified."""

from typing import Any

import jax

from difftx.config import Config
from difftx.config.build import config_from_dict
from difftx.errors import UserError
from difftx.registry import changed_extensions
from difftx.training.checkpoint import arrays
from difftx.training.checkpoint.manifest import Manifest, WeightsPart, adapters_of, describe_arrays
from difftx.training.state import TrainState, init_trained
from difftx.training.trainable import merged


def config_of(manifest: Manifest) -> Config:
    """Return the config that a checkpoint was trained with."""
    changed_extensions(manifest.extensions, str(manifest.folder))
    return config_from_dict(manifest.config)


def restore_state(manifest: Manifest, abstract: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
    """Return the train state of a valid checkpoint, sharded over `mesh` like `abstract`."""
    wanted = on_mesh(abstract.parts(), mesh)
    _require_arrays(manifest, wanted)
    return TrainState(**arrays.restore(manifest.contents, wanted))


def restore_params(manifest: Manifest, config: Config, mesh: jax.sharding.Mesh, part: WeightsPart = "params") -> Any:
    """Return the parameters of a valid checkpoint, sharded over `mesh` as in training with `config`.

    `part` selects the parameters, "params", or their average, "ema". Adapters are merged into the weights.
    """
    config = config.but(train=adapters_of(manifest, part))
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(lambda: init_trained(config))
    wanted = on_mesh({part: abstract}, mesh)
    _require_arrays(manifest, wanted, f"{part}/")
    with jax.set_mesh(mesh):
        return merged(arrays.restore(manifest.contents, wanted)[part], config.train)


def _require_arrays(manifest: Manifest, wanted: Any, prefix: str = "") -> None:
    """Raise `UserError` unless the checkpoint's arrays with names that begin with `prefix` match `wanted`."""
    folder = manifest.folder
    saved = {name: array for name, array in manifest.arrays.items() if name.startswith(prefix)}
    # Report mismatched parameters first, because users know their names. The optimizer's moments have the same
    # mismatches.
    ordered = sorted(describe_arrays(wanted).items(), key=lambda item: not item[0].startswith("params/"))
    for name, (shape, dtype) in ordered:
        if saved.pop(name, None) != (shape, dtype):
            raise UserError(
                f"{folder}: {name} is not {shape} {dtype} there; model or optimizer was configured otherwise: use that "
                "run's config, or new parameters in a new --workdir"
            )
    if saved:
        raise UserError(f"{folder}: {next(iter(saved))} has no place in this config's model or train state")


def on_mesh(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Return the abstract arrays of `tree`, sharded over `mesh`. An array without a sharding is replicated."""

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding is not None else jax.P()
        return leaf.update(sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)
