"""The device mesh, with four explicit axes.

`data` replicates the parameters and shards the batch, `fsdp` shards parameters, moments and batch, `context` shards the
tokens of a row, and `tensor` shards heads, MLP width and vocabulary.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from difftx.config import MeshConfig
from difftx.errors import UserError

# Mesh axes from outermost to innermost. The innermost axis communicates most, so it connects neighbouring devices.
AXES = ("data", "fsdp", "context", "tensor")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Return the mesh of a config, by default over all devices. An axis of size -1 takes the remaining devices."""
    devices = jax.devices() if devices is None else devices
    sizes = list(mesh_sizes(config, len(devices)).values())
    if config.slices > 1:
        array = _sliced(config.slices, sizes, devices)
    else:
        # Allow a mesh that splits axes of the physical torus, such as 8 × 8 on 4 × 4 × 4.
        array = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    # With explicit axes, Adam's moments have the sharding of the parameters, and a mismatch of shardings is an error
    # during tracing instead of a silent all-gather.
    return jax.sharding.Mesh(array, AXES, (jax.sharding.AxisType.Explicit,) * len(AXES))


def mesh_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """Return the size of each axis of the mesh. Raise `UserError` if they do not multiply to the number of devices."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: devices // fixed if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != devices:
        asked = ", ".join(f"mesh.{axis}={getattr(config, axis)}" for axis in AXES)
        raise UserError(
            f"{asked}: these sizes do not multiply to the {devices} devices here; set mesh.fsdp=-1, which takes the "
            "remaining devices, and the other axes to divisors"
        )
    return sizes


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Return the number of shards of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def _sliced(slices: int, sizes: list[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Return the devices as `[data, fsdp, context, tensor]`, with the slices of a multi-slice pod along `data`.

    Only gradients then cross the network between slices.
    """
    per_slice = [sizes[0] // slices, *sizes[1:]]
    found = {getattr(device, "slice_index", None) for device in devices}
    if sizes[0] % slices or len(found) != slices:
        raise UserError(
            f"mesh.slices={slices}: it must divide mesh.data={sizes[0]} and be the number of slices, which is "
            f"{len(found)} here"
        )
    return mesh_utils.create_hybrid_device_mesh(per_slice, [slices, 1, 1, 1], devices, allow_split_physical_axes=True)
