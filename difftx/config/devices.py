"""Config groups `mesh` and `multihost`."""

import dataclasses
from typing import Literal

from difftx.config.checks import (
    require_positive,
)
from difftx.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each axis of the mesh. One axis may be -1, which takes all remaining devices.

    `difftx.parallel.mesh` checks the product of the axes against the number of devices.
    """

    data: int = 1
    """Copies of the parameters."""
    fsdp: int = -1
    """Shards of the parameters, the optimizer's moments and the batch."""
    context: int = 1
    """Shards of a row's tokens."""
    context_method: Literal["heads", "gather", "zigzag"] = "heads"
    """How attention communicates along `context`. "heads": devices exchange tokens for heads, whose number `context`
    must divide; "gather": each device gathers the keys and values of whole rows; "zigzag": as "gather", with causal
    work balanced over the devices."""
    tensor: int = 1
    """Shards of heads, MLP width and vocabulary."""
    slices: int = 1
    """Slices of a multi-slice TPU pod, joined by the data-centre network; they divide the axis `data`."""
    preset: Literal["none", "auto"] = "none"
    """With "auto", mesh, remat and accumulation come from the table in `difftx/parallel/presets.py`, by device and
    model size."""

    def __post_init__(self):
        sizes = {axis: getattr(self, axis) for axis in ("data", "fsdp", "context", "tensor")}
        require_positive("mesh", "slices", self.slices)
        for axis, size in sizes.items():
            if size != -1:
                require_positive("mesh", axis, size)
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"mesh={sizes}: only one axis can be -1 (all devices that are left)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultihostConfig:
    """Time limits, in seconds, for training with several processes (docs/operations.md)."""

    initialization_timeout_seconds: int = 1800
    """Time for all processes to start; cold pods take long."""
    heartbeat_timeout_seconds: int = 100
    """Silence after which a process, dead or frozen, counts as gone. JAX's own heartbeat gets four times as long."""
    barrier_timeout_seconds: int = 600
    """Time for all processes to reach the same start, checkpoint or evaluation, and for a save to be on disk."""
    watchdog_seconds: int = 1800
    """Time without a finished step, compilation included, after which a process prints all stacks and exits."""

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            require_positive("multihost", name, value)
