"""Search for the mesh, remat policy and number of microbatches that make a step fit the devices' memory.

Each attempt compiles the train step, which takes seconds to minutes. The search skips attempts that cannot be fastest.
"""

from collections.abc import Callable, Iterator, Sequence

import jax

from difftx.config import Config
from difftx.config.checks import divisors
from difftx.errors import UserError
from difftx.launch.estimate import DoesNotFitError, Estimate, estimate
from difftx.launch.topology import GIB, Chip
from difftx.model.flops import gradient_bytes
from difftx.parallel.mesh import batch_shards, make_mesh
from difftx.training.fit import fit
from difftx.training.state import state_bytes

# Remat policies, ordered by decreasing memory and increasing arithmetic. The cost of "offload" cannot be estimated.
REMAT = ("none", "dots", "full")
TENSOR = (1, 2, 4, 8)  # Sizes of the tensor axis to try.


def search(
    config: Config, devices: Sequence[jax.Device], chip: Chip, *, report: Callable[[str], None]
) -> list[Estimate]:
    """Return the estimates that fit the devices' memory, fastest first.

    Fewer microbatches are faster, because parameters are gathered less often. For each mesh and remat policy, the
    search therefore stops at the smallest number of microbatches that fits. A policy that saves fewer activations
    recomputes more, so it is tried only with fewer microbatches than the policies before it need. The context axis and
    the slices are not changed. `report` is called with a line of text after each attempt.
    """
    found: list[Estimate] = []
    for candidate in _meshes(config, devices, chip):
        fewest: int | None = None
        for remat in REMAT:
            for accumulation in _accumulations(candidate, devices):
                if fewest is not None and accumulation >= fewest:
                    break
                attempt = candidate.but(model={"remat": remat}, train={"accumulation": accumulation})
                mesh = " ".join(f"{axis}={n}" for axis, n in make_mesh(attempt.mesh, devices).shape.items())
                what = f"{mesh}  remat={remat}  accumulation={accumulation}"
                try:
                    result = estimate(attempt, devices, chip)
                except DoesNotFitError as error:
                    report(f"{what}: {error}")
                    continue
                memory = f"{result.needed_bytes / GIB:.2f} GiB, {'fits' if result.fits else 'too much'}"
                report(f"{what}: {memory} (compiled in {result.compile_seconds:.0f} s)")
                if result.fits:
                    found.append(result)
                    fewest = accumulation
    return sorted(found, key=_rank)


def _meshes(config: Config, devices: Sequence[jax.Device], chip: Chip) -> Iterator[Config]:
    """Yield the config with a few promising meshes for each size of the tensor axis in `TENSOR`.

    For each size, try one replica of the parameters per slice, as many as fit into half of the memory, and a number in
    between. With more replicas, the devices of a replica span a smaller part of the torus and communicate faster
    (docs/fit.md).
    """
    slices, context, persistent = config.mesh.slices, config.mesh.context, state_bytes(config)
    needed = persistent + gradient_bytes(config.model)
    for tensor in TENSOR:
        per_slice, rest = divmod(len(devices), tensor * context * slices)  # `data` × `fsdp` in a slice.
        if rest:
            continue
        fitting = [n for n in divisors(per_slice) if needed * n / (per_slice * tensor) <= chip.hbm_bytes / 2]
        middle = len(fitting) // 2
        for n in sorted({1, *fitting[middle : middle + 1], *fitting[-1:]}):
            fsdp = per_slice // n
            candidate = config.but(mesh={"data": n * slices, "fsdp": fsdp, "tensor": tensor, "preset": "none"})
            fits = persistent / (fsdp * tensor) <= chip.hbm_bytes
            if fits and _accumulations(candidate, devices):
                yield candidate


def _accumulations(config: Config, devices: Sequence[jax.Device]) -> list[int]:
    """Return the numbers of microbatches to try: powers of two with which the config fits the mesh."""
    mesh = make_mesh(config.mesh, devices)
    counts = [2**i for i in range(config.batch_rows.bit_length())]
    counts = [n for n in counts if config.batch_rows % (n * batch_shards(mesh)) == 0]
    try:
        for count in counts:
            fit(config.but(train={"accumulation": count}), mesh)
    except UserError:
        return []
    return counts


def _rank(result: Estimate) -> tuple[float, ...]:
    """Return the sort key of an estimate: time (or FLOPs if the device's speed is unknown), bytes sent, memory."""
    time = result.executed_flops if result.bound is None else result.bound.step_seconds
    sent_bytes = sum(c["interconnect_bytes"] for c in result.collectives.values())
    return time, sent_bytes, result.needed_bytes
