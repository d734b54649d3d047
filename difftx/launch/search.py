"""Search for the meshes, remat policies and numbers of microbatches with which a step fits the devices.

Each attempt compiles the train step, which takes seconds to minutes, so the search leaves out attempts that cannot win.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from difftx.config import Config
from difftx.errors import UserError
from difftx.launch.estimate import DoesNotFitError, Estimate, estimate
from difftx.launch.topology import GIB, Chip
from difftx.model.flops import state_bytes
from difftx.parallel.mesh import batch_shards, check_divisible, make_mesh

# From most memory to most arithmetic. "offload" is left out because its cost cannot be estimated.
REMAT = ("none", "dots", "full")
TENSOR = (1, 2, 4, 8)
STATE_SHARE = 0.75  # Parameters and moments persist between steps: 12 of the 16 bytes that include the gradient.


def search(
    config: Config, devices: Sequence[jax.Device], chip: Chip, *, report: Callable[[str], None]
) -> list[Estimate]:
    """Return the estimates that fit the devices' memory, fastest first.

    Fewer microbatches gather the parameters less often, and a remat policy that keeps more activations recomputes less.
    For each mesh and policy, the search therefore stops at the fewest microbatches that fit. It tries a policy that
    keeps less only with fewer microbatches than a previous policy needs.

    Args:
        config: Config whose mesh, remat policy and accumulation are varied; its context axis and slices are kept.
        devices: Devices to compile for; all of them are used.
        chip: Memory and bandwidths of a device.
        report: Called with one line of text per attempt.
    """
    found: list[Estimate] = []
    for candidate in meshes(config, devices, chip):
        fewest: int | None = None
        for remat in REMAT:
            for accumulation in accumulations(candidate, devices):
                if fewest is not None and accumulation >= fewest:
                    break
                attempt = _replace(candidate, model={"remat": remat}, train={"accumulation": accumulation})
                result = _attempt(attempt, devices, chip, report)
                if result is not None and result.fits:
                    found.append(result)
                    fewest = accumulation
    return sorted(found, key=_rank)


def meshes(config: Config, devices: Sequence[jax.Device], chip: Chip) -> Iterator[Config]:
    """Yield the config with a few promising meshes, with tensor parallelism of 1, 2, 4 and 8.

    For each tensor size, the parameters are sharded over all devices (one replica per slice), or replicated as often as
    half of the memory allows, or a medium number of times. Smaller groups of devices span less of a torus and
    communicate faster (docs/operations.md).
    """
    slices, context, bytes_of_state = config.mesh.slices, config.mesh.context, state_bytes(config.model)
    for tensor in TENSOR:
        per_slice, rest = divmod(len(devices), tensor * context * slices)  # Product of `data` and `fsdp` in a slice.
        if rest:
            continue
        replicas = [n for n in range(1, per_slice + 1) if per_slice % n == 0]
        fitting = [n for n in replicas if bytes_of_state * n / (per_slice * tensor) <= chip.hbm_bytes / 2]
        middle = len(fitting) // 2
        for n in sorted({1, *fitting[middle : middle + 1], *fitting[-1:]}):
            fsdp = per_slice // n
            candidate = _replace(config, mesh={"data": n * slices, "fsdp": fsdp, "tensor": tensor, "preset": "none"})
            fits = STATE_SHARE * bytes_of_state / (fsdp * tensor) <= chip.hbm_bytes
            if fits and accumulations(candidate, devices):
                yield candidate


def accumulations(config: Config, devices: Sequence[jax.Device]) -> list[int]:
    """Return the powers of two that split the batch into microbatches whose rows divide over the mesh.

    The list is empty if the mesh does not divide another dimension of the model or the data.
    """
    mesh = make_mesh(config.mesh, devices)
    counts = [2**i for i in range(config.batch_rows.bit_length())]
    counts = [n for n in counts if config.batch_rows % (n * batch_shards(mesh)) == 0]
    try:
        for count in counts:
            check_divisible(_replace(config, train={"accumulation": count}), mesh)
    except UserError:  # The mesh does not divide some dimension.
        return []
    return counts


def _replace(config: Config, **groups: dict) -> Config:
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **fields) for name, fields in groups.items()}
    )


def _attempt(
    config: Config, devices: Sequence[jax.Device], chip: Chip, report: Callable[[str], None]
) -> Estimate | None:
    mesh = " ".join(f"{axis}={n}" for axis, n in make_mesh(config.mesh, devices).shape.items())
    what = f"{mesh}  remat={config.model.remat}  accumulation={config.train.accumulation}"
    try:
        result = estimate(config, devices, chip)
    except DoesNotFitError as error:
        report(f"{what}: {error}")
        return None
    verdict = "fits" if result.fits else "too much"
    report(f"{what}: {result.needed_bytes / GIB:.2f} GiB, {verdict} (compiled in {result.compile_seconds:.0f} s)")
    return result


def _rank(result: Estimate) -> tuple[float, ...]:
    """Return the sort key: time, or FLOPs if the device's speed is unknown; then bytes sent; then memory."""
    time = result.executed_flops if result.bound is None else result.bound.step_seconds
    sent_bytes = sum(c["interconnect_bytes"] for c in result.collectives.values())
    return time, sent_bytes, result.needed_bytes
