"""Mesh, remat policy and microbatches by hardware and size: what `mesh.preset = "auto"` puts into a config."""

import dataclasses
from typing import Literal

from difftx.config import Config
from difftx.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A rule for one kind of device and models of up to a size."""

    kind: str  # How the device's kind begins, as jax names it.
    parameters: float  # Largest model.
    fsdp: int  # Most shards of the parameters; devices beyond them hold copies.
    tensor: int
    remat: Literal["none", "dots", "full"]
    tokens: int  # Most tokens of a microbatch on a device.


# The first rule that fits is taken. What a comment names was compiled by `difftx plan`: see docs/operations.md. `fsdp`
# is small because libtpu turns gathers into all-reduces of twice the bytes where the group spans a whole 3D torus or
# the shards have fewer than 128 columns.
PRESETS = (
    Preset(kind="TPU v5 lite", parameters=1e9, fsdp=8, tensor=1, remat="dots", tokens=8192),  # v5e:4x4, 8x8
    Preset(kind="TPU v5 lite", parameters=3e9, fsdp=8, tensor=1, remat="full", tokens=4096),  # v5e:8x8, 8x8*2
    Preset(kind="TPU v5 lite", parameters=8e9, fsdp=16, tensor=1, remat="full", tokens=4096),  # v5e:8x16, 16x16
    Preset(kind="TPU v5 lite", parameters=14e9, fsdp=16, tensor=4, remat="full", tokens=4096),  # v5e:16x16
    Preset(kind="TPU v5", parameters=3e9, fsdp=4, tensor=1, remat="dots", tokens=32_768),  # v5p:2x2x1, 2x2x2
    Preset(kind="TPU v5", parameters=8e9, fsdp=8, tensor=1, remat="dots", tokens=16_384),  # v5p:2x2x4, 4x4x4
    Preset(kind="TPU v5", parameters=14e9, fsdp=16, tensor=1, remat="dots", tokens=8192),  # v5p:4x4x4
    Preset(kind="TPU v4", parameters=14e9, fsdp=16, tensor=1, remat="full", tokens=8192),  # Not compiled.
    Preset(kind="TPU v6", parameters=14e9, fsdp=16, tensor=1, remat="full", tokens=8192),  # Not compiled.
    Preset(kind="NVIDIA H200", parameters=4e9, fsdp=8, tensor=1, remat="dots", tokens=16_384),  # Counted, not run.
    Preset(kind="NVIDIA H200", parameters=14e9, fsdp=16, tensor=1, remat="full", tokens=16_384),  # Counted, not run.
    Preset(kind="NVIDIA H100", parameters=14e9, fsdp=32, tensor=1, remat="full", tokens=8192),  # Counted, not run.
    Preset(kind="cpu", parameters=14e9, fsdp=8, tensor=1, remat="none", tokens=4096),  # make quickstart
)


def apply_preset(config: Config, *, kind: str, devices: int, parameters: int) -> Config:
    """Return the config with mesh, remat policy and accumulation of the rule for its devices and size.

    A config whose `mesh.preset` is "none" is returned as it is. The context axis and the slices stay as configured.

    Args:
        config: of the run.
        kind: of the devices, as jax names it.
        devices: how many.
        parameters: of the model.

    Raises:
        UserError: there is no rule.
    """
    if config.mesh.preset == "none":
        return config
    for preset in PRESETS:
        if kind.startswith(preset.kind) and parameters <= preset.parameters:
            break
    else:
        raise UserError(
            f"mesh.preset='auto': no rule for {kind!r} and {parameters:.3g} parameters in difftx/parallel/presets.py; "
            "use 'none' and choose mesh, model.remat and train.accumulation"
        )
    tensor = preset.tensor if devices % (preset.tensor * config.mesh.context) == 0 else 1
    per_slice = devices // (tensor * config.mesh.context * config.mesh.slices)
    fsdp = max((n for n in range(1, min(preset.fsdp, per_slice) + 1) if per_slice % n == 0), default=1)
    data = devices // (fsdp * tensor * config.mesh.context)
    rows = config.batch_rows // (data * fsdp)  # A device's, of an update.
    wanted = preset.tokens * config.mesh.context
    counts = [n for n in range(1, rows + 1) if rows % n == 0]
    accumulation = next(
        (n for n in counts if rows // n * config.data.sequence_length <= wanted), max(counts, default=1)
    )
    return dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, data=data, fsdp=fsdp, tensor=tensor),
        model=dataclasses.replace(config.model, remat=preset.remat),
        train=dataclasses.replace(config.train, accumulation=accumulation),
    )
