"""Restoration of a checkpoint's config, train state and parameters. The checkpoint must have been verified."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from difftx.config import Config
from difftx.config.build import config_from_dict
from difftx.errors import RunError, UnreadableError, UserError
from difftx.json_files import json_sha256, read_json
from difftx.registry import changed_extensions
from difftx.storage.paths import AnyPath, is_bucket
from difftx.training.checkpoint import arrays
from difftx.training.checkpoint.manifest import (
    CONFIG_FILE,
    LOADER_FILE,
    MANIFEST,
    WeightsPart,
    describe_arrays,
    read_manifest,
)
from difftx.training.state import TrainState


def config_of(folder: AnyPath) -> Config:
    """Return the config that the checkpoint in `folder` was trained with."""
    manifest, raw = read_manifest(folder), config_values(folder)
    changed_extensions(manifest.extensions, str(folder))
    return config_from_dict(raw)


def config_values(folder: AnyPath) -> dict[str, Any]:
    """Return the values of `config_of`, which may need extensions that are not loaded."""
    manifest = read_manifest(folder)
    path = folder / manifest.contents / CONFIG_FILE if manifest.contents else folder / CONFIG_FILE
    raw = read_json(path)
    if json_sha256(raw) != manifest.config_sha256:
        raise UserError(f"{path}: the file is corrupt: its SHA-256 is not the config_sha256 of {folder / MANIFEST}")
    return raw


def restore_state(folder: AnyPath, abstract: TrainState, mesh: jax.sharding.Mesh) -> tuple[TrainState, dict[str, Any]]:
    """Return the train state and the state of the data loader of the valid checkpoint in `folder`.

    The train state is sharded over `mesh` like `abstract`.
    """
    wanted = on_mesh(abstract.parts(), mesh)
    contents = _checked_contents(folder, wanted)
    if contents is not None:
        with _reading(folder):
            return TrainState(**arrays.restore(contents, wanted)), read_json(contents / LOADER_FILE)
    handler = ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler(), loader=ocp.JsonCheckpointHandler())
    args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), loader=ocp.args.JsonRestore())
    with _reading(folder), ocp.Checkpointer(handler) as reader:
        restored = reader.restore(folder.resolve(), args=args)  # Orbax requires an absolute path.
    return TrainState(**restored["state"]), restored["loader"]


def restore_params(folder: AnyPath, params: Any, mesh: jax.sharding.Mesh, part: WeightsPart = "params") -> Any:
    """Return the parameters of the valid checkpoint in `folder`, sharded over `mesh` like the abstract `params`.

    `part` is the part of the train state that has them: "params", or their average "ema".
    """
    wanted = on_mesh({part: params}, mesh)
    contents = _checked_contents(folder, wanted, f"{part}/")
    if contents is not None:
        with _reading(folder):
            return arrays.restore(contents, wanted)[part]
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
    with _reading(folder), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(folder.resolve() / "state", args=args)[part]


@contextlib.contextmanager
def _reading(folder: AnyPath) -> Iterator[None]:
    """Convert errors of orbax and tensorstore to `UnreadableError`, because the checkpoint has been verified."""
    try:
        yield
    except Exception as error:
        if is_bucket(folder) and not isinstance(error, UserError | RunError):
            why = (str(error) or type(error).__name__).splitlines()[0][:300]
            raise UnreadableError(f"{folder} cannot be read: {why}; run the same command again") from error
        # Orbax wraps some of tensorstore's errors in a plain `Exception`.
        cause = error.__cause__ if type(error) is Exception else error
        code = re.search(r"os_error_code='(\d+)'", str(cause))  # Tensorstore has the code only in its message.
        number = cause.errno if isinstance(cause, OSError) else code and int(code[1])
        if number is None or isinstance(cause, FileNotFoundError):
            raise
        why = os.strerror(number)
        raise UnreadableError(f"{folder} cannot be read: {why}; run the same command again") from error


def _checked_contents(folder: AnyPath, wanted: Any, prefix: str = "") -> AnyPath | None:
    """Return the folder that `arrays` reads, or None if orbax has written the checkpoint to a local disk.

    Raise `UserError` unless the checkpoint's arrays whose names begin with `prefix` are the `wanted` ones.
    """
    manifest = read_manifest(folder)
    # Orbax would silently cast other dtypes, and its error for another shape would not name the array.
    saved = {name: array for name, array in manifest.arrays.items() if name.startswith(prefix)}
    # Parameters come first, because users know their names. The optimizer's moments have the same mismatches.
    ordered = sorted(describe_arrays(wanted).items(), key=lambda item: not item[0].startswith("params/"))
    for name, (shape, dtype) in ordered:
        if saved.pop(name, None) != (shape, dtype):
            raise UserError(
                f"{folder}: {name} is not {shape} {dtype} there; "
                "model or optimizer was configured otherwise: restore that config, or start a new --workdir"
            )
    if saved:
        raise UserError(f"{folder}: {next(iter(saved))} has no place in this config's model or train state")
    if manifest.contents:
        return folder / manifest.contents
    return folder if is_bucket(folder) else None


def on_mesh(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Return the abstract arrays with shardings over `mesh`. Arrays without a sharding are replicated."""

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding is not None else jax.P()
        return leaf.update(sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)
