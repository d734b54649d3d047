"""The device mesh: axes `data`, `fsdp` and `tensor`, all explicit."""

import math
from collections.abc import Sequence

import jax

from difftx.config import Config, MeshConfig
from difftx.errors import UserError

AXES = ("data", "fsdp", "tensor")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Return the mesh of a config over all devices; an axis of -1 takes what the others leave.

    Raises:
        UserError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes:
        sizes[sizes.index(-1)] = len(devices) // fixed
    if math.prod(sizes) != len(devices):
        asked = ", ".join(f"mesh.{axis}={getattr(config, axis)}" for axis in AXES)
        raise UserError(f"{asked}: they do not multiply to the {len(devices)} devices here; set one of them to -1")
    # Explicit: every array's type carries its sharding, so Adam's moments are born where the parameters are, and a
    # mismatch is an error while tracing rather than a silent all-gather.
    return jax.make_mesh(tuple(sizes), AXES, (jax.sharding.AxisType.Explicit,) * len(AXES), devices=devices)


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Number of shards along the batch axis."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def check_divisible(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raise `UserError` where a sharded dimension does not divide by its mesh axes."""
    model, tensor, shards = config.model, mesh.shape["tensor"], batch_shards(mesh)
    rows = config.batch_rows // config.train.accumulation
    checks = [
        (
            "train.global_batch_tokens",
            rows,
            f"{rows} rows a microbatch",
            shards,
            "mesh.data × mesh.fsdp",
        ),
        ("model.d_model", model.d_model, str(model.d_model), mesh.shape["fsdp"], "mesh.fsdp"),
        ("model.num_heads", model.num_heads, str(model.num_heads), tensor, "mesh.tensor"),
        ("model.num_kv_heads", model.kv_heads, str(model.kv_heads), tensor, "mesh.tensor"),
        ("model.mlp_dim", model.mlp_dim, str(model.mlp_dim), tensor, "mesh.tensor"),
        ("model.vocab_size", model.vocab_size, str(model.vocab_size), tensor, "mesh.tensor"),
    ]
    for field, size, shown, parts, axes in checks:
        if size % parts:
            fix = math.ceil(size / parts) * parts
            raise UserError(
                f"{field}: {shown} cannot be cut into {axes} = {parts} shards; use a multiple, such as {fix}"
            )
