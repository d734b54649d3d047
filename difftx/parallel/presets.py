"""Presets of mesh, remat policy and microbatch size by hardware and model size (`mesh.preset = "auto"`)."""

import dataclasses
from typing import Literal

from difftx.config import Config
from difftx.config.checks import divisors, largest_divisor_up_to
from difftx.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings for one kind of device and for models up to a maximum size."""

    kind: str  # Prefix of JAX's name of the device kind.
    parameters: float  # Largest number of model parameters to which the preset applies.
    fsdp: int  # Largest size of the mesh axis `fsdp`. With more devices, the parameters are replicated along `data`.
    tensor: int  # Size of the mesh axis `tensor`.
    remat: Literal["none", "dots", "full"]
    tokens: int  # Largest number of tokens in a microbatch, per device.


# The first preset that matches applies. Comments name the topologies for which `difftx plan` compiled the preset
# (docs/fit.md). `fsdp` is small because libtpu turns gathers into all-reduces of twice the bytes if the group
# spans a whole 3D torus or if the shards have fewer than 128 columns.
PRESETS = (
    Preset(kind="TPU v5 lite", parameters=1e9, fsdp=8, tensor=1, remat="dots", tokens=8192),  # v5e:4x4, 8x8
    Preset(kind="TPU v5 lite", parameters=3e9, fsdp=8, tensor=1, remat="full", tokens=4096),  # v5e:8x8, 8x8*2
    Preset(kind="TPU v5 lite", parameters=8e9, fsdp=16, tensor=1, remat="full", tokens=4096),  # v5e:8x16, 16x16
    Preset(kind="TPU v5 lite", parameters=14e9, fsdp=16, tensor=4, remat="full", tokens=4096),  # v5e:16x16
    Preset(kind="TPU v5", parameters=3e9, fsdp=4, tensor=1, remat="dots", tokens=32_768),  # v5p:2x2x1, 2x2x2
    Preset(kind="TPU v5", parameters=8e9, fsdp=8, tensor=1, remat="dots", tokens=16_384),  # v5p:2x2x4, 4x4x4
    Preset(kind="TPU v5", parameters=14e9, fsdp=16, tensor=1, remat="dots", tokens=8192),  # v5p:4x4x4
    Preset(kind="TPU v4", parameters=14e9, fsdp=16, tensor=1, remat="full", tokens=8192),  # Not compiled.
    Preset(kind="TPU v6", parameters=14e9, fsdp=16, tensor=1, remat="full", tokens=8192),  # v6e:8x8, for 2.8B only.
    Preset(kind="NVIDIA H200", parameters=4e9, fsdp=8, tensor=1, remat="dots", tokens=16_384),  # Estimated, not run.
    Preset(kind="NVIDIA H200", parameters=14e9, fsdp=16, tensor=1, remat="full", tokens=16_384),  # Estimated, not run.
    Preset(kind="NVIDIA H100", parameters=14e9, fsdp=32, tensor=1, remat="full", tokens=8192),  # Estimated, not run.
    Preset(kind="NVIDIA A100", parameters=14e9, fsdp=32, tensor=1, remat="full", tokens=8192),  # Estimated, not run.
    Preset(kind="NVIDIA B200", parameters=4e9, fsdp=8, tensor=1, remat="dots", tokens=32_768),  # Estimated, not run.
    Preset(kind="NVIDIA B200", parameters=14e9, fsdp=8, tensor=1, remat="full", tokens=32_768),  # Estimated, not run.
    Preset(kind="NVIDIA L4", parameters=8e9, fsdp=16, tensor=1, remat="full", tokens=4096),  # Estimated, not run.
    Preset(kind="NVIDIA GeForce RTX 4090", parameters=8e9, fsdp=16, tensor=1, remat="full", tokens=4096),  # As above.
    Preset(kind="cpu", parameters=14e9, fsdp=8, tensor=1, remat="none", tokens=4096),  # make quickstart
)


def apply_preset(config: Config, *, kind: str, devices: int, parameters: int) -> Config:
    """Return the config with the mesh, remat policy and accumulation of the first preset that matches.

    If `mesh.preset` is "none", return the config unchanged. `mesh.context` and `mesh.slices` never change. `kind` is
    JAX's name of the kind of device, and `parameters` the number of parameters of the model.
    """
    if config.mesh.preset == "none":
        return config
    rules = (rule for rule in PRESETS if kind.startswith(rule.kind) and parameters <= rule.parameters)
    preset = next(rules, None)
    if preset is None:
        raise UserError(
            f"mesh.preset='auto': no rule for {kind!r} and {parameters:.3g} parameters in difftx/parallel/presets.py; "
            "use 'none' and choose mesh, model.remat and train.accumulation"
        )
    context, slices = config.mesh.context, config.mesh.slices
    if context < 1 or devices % (context * slices):  # A preset leaves no devices to a `mesh.context` of -1.
        raise UserError(
            f"mesh.context={context}, mesh.slices={slices}: these sizes do not multiply to a divisor of the {devices} "
            "devices here; set both to 1"
        )
    tensor = preset.tensor if devices % (preset.tensor * context) == 0 else 1
    per_slice = devices // (tensor * context * slices)
    fsdp = largest_divisor_up_to(preset.fsdp, per_slice) if per_slice else 1
    data = devices // (fsdp * tensor * context)
    rows = config.batch_rows // (data * fsdp)  # Rows per device and update.
    counts = divisors(rows) if rows else [1]
    largest = preset.tokens * context
    accumulation = next((n for n in counts if rows // n * config.data.sequence_length <= largest), counts[-1])
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    return config.but(mesh=sizes, model={"remat": preset.remat}, train={"accumulation": accumulation})
