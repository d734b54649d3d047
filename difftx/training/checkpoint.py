"""Checkpoints of a run: train state, loader state and config, saved by orbax in the background."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from difftx.config import CheckpointConfig, Config
from difftx.config_reader import config_from_dict
from difftx.errors import UserError
from difftx.training.state import TrainState


class Checkpointer:
    """The checkpoints in `<workdir>/checkpoints`, one folder a step."""

    def __init__(self, workdir: Path, config: CheckpointConfig | None = None):
        """Open the folder; `config` is needed to save, and makes the folder."""
        self.folder = workdir.resolve() / "checkpoints"
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=config.keep if config else None,
                create=config is not None,
                read_only=config is None,
            ),
            # Named handlers: without them a manager that has not saved cannot read the metadata.
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "loader": ocp.JsonCheckpointHandler(),
                "config": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, state: TrainState, loader: dict[str, Any], config: Config) -> None:
        """Start to save under the state's step; returns when the arrays may be donated. Waits for an earlier save."""
        step = int(jax.device_get(state.step))
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_as_tree(state)),
                loader=ocp.args.JsonSave(loader),
                config=ocp.args.JsonSave(json.loads(config.to_json())),
            ),
            force=True,
        )

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def newest(self) -> int | None:
        """Return the newest step, or None."""
        return max(self.steps(), default=None)

    def restore(self, step: int, abstract: TrainState, mesh: jax.sharding.Mesh) -> tuple[TrainState, dict[str, Any]]:
        """Return the train state, in the shards of `abstract` on `mesh`, and the loader's state.

        Raises:
            UserError: the checkpoint's arrays are not those of `abstract`.
        """
        wanted = jax.tree.map(lambda x: _on_mesh(x, mesh), _as_tree(abstract))
        self._check_shapes(step, wanted)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted), loader=ocp.args.JsonRestore()),
        )
        return TrainState(**restored["state"]), restored["loader"]

    def config(self, step: int) -> Config:
        """Return the config that the checkpoint was trained with."""
        restored = self._manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
        return config_from_dict(restored["config"])

    def close(self) -> None:
        """Wait until all saves are on disk; raises what a save in the background raised."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _check_shapes(self, step: int, wanted: Any) -> None:
        """Compare with the metadata first: orbax's own error for a mismatch names no array, and dtypes it casts."""
        saved = {
            jax.tree_util.keystr(path, simple=True, separator="/"): (tuple(leaf.shape), leaf.dtype)
            for path, leaf in jax.tree_util.tree_leaves_with_path(self._manager.item_metadata(step)["state"])
        }
        leaves = jax.tree_util.tree_leaves_with_path(wanted)
        # Parameters first: the user knows them, and their moments differ with them.
        for path, leaf in sorted(leaves, key=lambda item: item[0][0].key != "params"):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if saved.pop(name, None) != (leaf.shape, leaf.dtype):
                raise UserError(
                    f"{self.folder / str(step)}: {name} is not {leaf.shape} {leaf.dtype} there; "
                    "model or optimizer was configured otherwise: restore that config, or start a new --workdir"
                )
        if saved:
            raise UserError(f"{self.folder / str(step)}: {next(iter(saved))} has no place in this config's train state")


def _as_tree(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _on_mesh(leaf: jax.ShapeDtypeStruct, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """Give an abstract array its place on real devices; scalars carry no sharding of their own."""
    spec = leaf.sharding.spec if leaf.sharding is not None else jax.P()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))
