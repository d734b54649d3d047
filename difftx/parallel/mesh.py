"""The device mesh: axes `data`, `fsdp`, `context` and `tensor`, all explicit."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from difftx.config import Config, MeshConfig
from difftx.config.checks import divisor_below
from difftx.errors import UserError

# Outermost first: neighbouring devices share the innermost axis, which communicates most.
AXES = ("data", "fsdp", "context", "tensor")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Return the mesh of a config over all devices. An axis of size -1 takes the remaining devices.

    Raises:
        UserError: the axes do not multiply to the number of devices, or `mesh.slices` does not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes:
        sizes[sizes.index(-1)] = len(devices) // fixed
    if math.prod(sizes) != len(devices):
        asked = ", ".join(f"mesh.{axis}={getattr(config, axis)}" for axis in AXES)
        raise UserError(
            f"{asked}: they do not multiply to the {len(devices)} devices here; {_fitting(config, len(devices))}"
        )
    # Explicit: every array's type carries its sharding, so Adam's moments are created where the parameters are, and
    # a mismatch is an error while tracing rather than a silent all-gather.
    types = (jax.sharding.AxisType.Explicit,) * len(AXES)
    if config.slices > 1:
        return jax.sharding.Mesh(_sliced(config.slices, sizes, devices), AXES, types)
    # Allow a mesh that has to split axes of the physical torus, such as 8 × 8 on 4 × 4 × 4.
    placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return jax.sharding.Mesh(placed, AXES, types)


def _fitting(config: MeshConfig, devices: int) -> str:
    """Return a hint, for an error, to change one axis so that the mesh covers the devices. Prefer the largest axis."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    for axis, size in sorted(fixed.items(), key=lambda item: -item[1]):
        rest, remainder = divmod(devices, math.prod(fixed.values()) // size)
        if not remainder:
            return f"set mesh.{axis}={divisor_below(size, rest) if free else rest}"
    return f"set mesh.{(free or ['fsdp'])[0]}=-1 and the other axes to 1"


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Return the number of shards along the batch axis."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def check_divisible(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raise `UserError` if a sharded dimension does not divide by its mesh axes."""
    rows, shards = config.batch_rows // config.train.accumulation, batch_shards(mesh)
    _check("train.global_batch_tokens", rows, f"{rows} rows a microbatch", shards, "mesh.data × mesh.fsdp")
    length, context = config.data.sequence_length, mesh.shape["context"]
    if config.mesh.context_method == "zigzag" and context > 1:
        _check("data.sequence_length", length, None, 2 * context, "2 × mesh.context (mesh.context_method='zigzag')")
    _check("data.sequence_length", length, None, context, "mesh.context")
    check_model_divisible(config, mesh)


def check_model_divisible(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raise `UserError` if a dimension of the model does not divide by its mesh axes."""
    model, tensor, fsdp, context = config.model, mesh.shape["tensor"], mesh.shape["fsdp"], mesh.shape["context"]
    _check("model.d_model", model.d_model, None, fsdp, "mesh.fsdp")
    _check("model.num_heads", model.num_heads, None, tensor, "mesh.tensor")
    _check("model.num_kv_heads", model.kv_heads, None, tensor, "mesh.tensor")
    if config.mesh.context_method == "heads":
        over_heads = "mesh.tensor × mesh.context"
        hint = "; or mesh.context_method='zigzag', which cuts no heads"
        _check("model.num_heads", model.num_heads, None, tensor * context, over_heads, hint)
        _check("model.num_kv_heads", model.kv_heads, None, tensor * context, over_heads, hint)
    _check("model.mlp_dim", model.mlp_dim, None, tensor, "mesh.tensor")
    _check("model.vocab_size", model.vocab_size, None, tensor, "mesh.tensor")


def _check(field: str, size: int, shown: str | None, parts: int, axes: str, hint: str = "") -> None:
    if size % parts:
        fix = math.ceil(size / parts) * parts
        raise UserError(
            f"{field}: {shown or size} cannot be cut into {axes} = {parts} shards; use a multiple, such as {fix}{hint}"
        )


def _sliced(slices: int, sizes: list[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Return the devices as `[data, fsdp, context, tensor]`, with whole slices along `data`.

    Only communication along `data` then crosses the network between slices.
    """
    per_slice = [sizes[0] // slices, *sizes[1:]]
    found = {getattr(device, "slice_index", None) for device in devices}
    if sizes[0] % slices or len(found) != slices:
        raise UserError(
            f"mesh.slices={slices}: it must divide mesh.data={sizes[0]} and be the number of slices, "
            f"which is {len(found)} here"
        )
    return mesh_utils.create_hybrid_device_mesh(per_slice, [slices, 1, 1, 1], devices, allow_split_physical_axes=True)
