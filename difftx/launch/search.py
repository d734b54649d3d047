"""Which mesh, remat policy and number of microbatches fit the devices, and which of them is fastest on paper."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from difftx.config import Config
from difftx.errors import UserError
from difftx.launch.estimate import DoesNotFitError, Estimate, estimate
from difftx.launch.topology import GIB, Chip
from difftx.model.flops import state_bytes
from difftx.parallel.mesh import batch_shards, check_divisible, make_mesh

REMAT = ("none", "dots", "full")  # From most memory to most arithmetic; what offloading costs is not known on paper.
TENSOR = (1, 2, 4, 8)
STATE_SHARE = 0.75  # Of the parameters', moments' and gradient's 16 bytes, what persists between steps.


def search(
    config: Config, devices: Sequence[jax.Device], chip: Chip, *, report: Callable[[str], None]
) -> list[Estimate]:
    """Return what fits, fastest first. On each mesh, a choice that could only be slower is not compiled.

    Fewer microbatches gather the parameters less often, and a policy that keeps more computes less: so for each policy
    the fewest microbatches that fit are taken, and a leaner policy is tried only with fewer microbatches still.

    Args:
        config: all but mesh, remat and accumulation stays; the context axis and the slices stay too.
        devices: all of them are used.
        chip: their memory and bandwidths.
        report: takes a line on each attempt.
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
    return sorted(found, key=_speed)


def meshes(config: Config, devices: Sequence[jax.Device], chip: Chip) -> Iterator[Config]:
    """Yield the config on few sensible meshes, with tensor parallelism of 1 to 8.

    The parameters are cut over all devices, or kept in as many copies as leave half of the memory, or between: groups
    that span less of a torus are served better (docs/operations.md).
    """
    slices, context = config.mesh.slices, config.mesh.context
    for tensor in TENSOR:
        cells, rest = divmod(len(devices), tensor * context * slices)
        if rest:
            continue
        copies = [n for n in range(1, cells + 1) if cells % n == 0]
        roomy = [n for n in copies if state_bytes(config.model) * n / (cells * tensor) <= chip.hbm_bytes / 2]
        for n in sorted({1, *roomy[len(roomy) // 2 : len(roomy) // 2 + 1], *roomy[-1:]}):
            sizes = {"data": n * slices, "fsdp": cells // n, "tensor": tensor, "preset": "none"}
            candidate = _replace(config, mesh=sizes)
            shards = sizes["fsdp"] * tensor
            if STATE_SHARE * state_bytes(config.model) / shards <= chip.hbm_bytes and accumulations(candidate, devices):
                yield candidate


def accumulations(config: Config, devices: Sequence[jax.Device]) -> list[int]:
    """Return the powers of two that cut the batch into microbatches which the mesh divides."""
    mesh = make_mesh(config.mesh, devices)
    counts = [2**i for i in range(config.batch_rows.bit_length())]
    counts = [n for n in counts if config.batch_rows % (n * batch_shards(mesh)) == 0]
    try:
        for count in counts:
            check_divisible(_replace(config, train={"accumulation": count}), mesh)
    except UserError:  # A width that this mesh does not divide.
        return []
    return counts


def _replace(config: Config, **groups: dict) -> Config:
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **fields) for name, fields in groups.items()}
    )


def _attempt(config: Config, devices: Sequence[jax.Device], chip: Chip, report: Callable[[str], None]):
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


def _speed(result: Estimate) -> tuple[float, ...]:
    seconds = result.executed_flops if result.bound is None else result.bound.step_seconds
    collective = sum(c["interconnect_bytes"] for c in result.collectives.values())
    return seconds, collective, result.needed_bytes
