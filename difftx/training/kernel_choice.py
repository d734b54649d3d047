"""Choose the attention kernels at the start of a command.

On accelerators, with `train.kernel_choice = "measured"`, each process compares all kernels with the reference and times
them for the shapes of the run. The processes then agree on one ranking. It leaves out every kernel that any process
rejects.

The manifest of the run records the ranking, together with the devices, the versions of `COMPILERS`, the hash of the
source files in `KERNELS`, and the shapes. If all of these are unchanged on the primary process, a resumed run uses the
recorded ranking, so its results stay the same bit for bit. If any of them changed, all processes measure again.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from difftx import kernels
from difftx.config import Config
from difftx.config.fields import Effect, Flag, fields_with, flat, values_of
from difftx.files import source_sha256
from difftx.json_files import json_sha256
from difftx.kernels import target
from difftx.kernels.backend import Ranking
from difftx.parallel import multihost
from difftx.training import kernel_measurement
from difftx.training.checkpoint.manifest import ACCELERATOR_PACKAGES, package_versions
from difftx.training.workload import kernel_function

COMPILERS = ("jax", "jaxlib", *ACCELERATOR_PACKAGES)  # A kernel may change with the versions of these packages.
KERNELS = Path(kernels.__file__).parent


def choose(configs: Sequence[Config], recorded: Mapping[str, Ranking]) -> None:
    """Choose the attention kernels of the configs. Raise `UserError` if JAX finds no device.

    Call `multihost.join` and `agree_on_command` first. `recorded` has the rankings in the run's manifest.
    """
    automatic = [config for config in configs if config.model.attention_implementation == "auto"]
    measurable = {kernel_function(config): config for config in automatic if config.train.kernel_choice == "measured"}
    measurable.pop("weighted_attention", None)  # It has one kernel.
    devices = kernel_measurement.gpu_identity() if measurable else None
    if devices is None:  # On GPUs, measure before this process allocates their memory.
        multihost.require_devices()
        if measurable and target.platform() == "tpu":
            device = jax.devices()[0]
            version = device.client.platform_version.splitlines()[0]
            devices = f"{jax.device_count()} × {device.device_kind}, {version}"
    own = {} if devices is None else {f: conditions(devices, config) for f, config in measurable.items()}
    timeout = configs[0].multihost.barrier_timeout_seconds
    present = multihost.decide_on_primary(lambda: own, timeout)
    changed = [f for f, found in present.items() if f not in recorded or recorded[f].conditions != found]
    times = {function: kernel_measurement.measured(measurable[function]) for function in changed}
    measured = multihost.exchange("kernels", lambda: times, timeout)
    for function, found in present.items():
        results = {process: of[function] for process, of in enumerate(measured) if any(of.get(function, ()))}
        ranking = Ranking(function, found, *combined(results)) if results else recorded.get(function)
        if ranking is not None:
            _use(ranking, recorded.get(function))
    multihost.require_devices()


def conditions(devices: str, config: Config) -> dict[str, str]:
    """Return everything that a ranking of the kernels depends on, by name. `devices` includes their driver."""
    values = flat(values_of(config))
    # Leave out the fields that the preset sets: their values in a recorded config differ from those on the command
    # line.
    set_by_preset = fields_with(Config, Flag.PRESET) if config.mesh.preset == "auto" else []
    determining = {*fields_with(Config, Effect.SHAPES, Effect.FUNCTION, Flag.KERNEL)}.difference(set_by_preset)
    fields = {name: value for name, value in values.items() if name in determining}
    return {
        "devices": devices,
        "versions": ", ".join(f"{name} {version}" for name, version in package_versions().items() if name in COMPILERS),
        "kernel source files": source_sha256(KERNELS),
        "shapes": json_sha256([multihost.process_count(), fields]),
    }


def combined(results: Mapping[int, kernel_measurement.Measured]) -> kernel_measurement.Measured:
    """Return the slowest time of each kernel over all processes, fastest kernel first, without rejected kernels."""
    rejected: dict[str, str] = {}
    for process, (_, reasons) in results.items():
        for name, reason in reasons.items():
            rejected.setdefault(name, reason if len(results) == 1 else f"process {process}: {reason}")
    names = [name for name in next(iter(results.values()))[0] if name not in rejected]
    slowest = {name: max(times.get(name, math.inf) for times, _ in results.values()) for name in names}
    return dict(sorted(slowest.items(), key=lambda item: item[1])), rejected


def _use(ranking: Ranking, recorded: Ranking | None) -> None:
    """Make "auto" follow `ranking`, and print it together with what changed since `recorded`."""
    if recorded is not None and ranking != recorded:
        before, after = (next(iter(each.milliseconds), "none") for each in (recorded, ranking))
        others = [name for name, value in ranking.conditions.items() if recorded.conditions.get(name) != value]
        multihost.print_on_primary(
            f"changed since the run began: attention kernel {before} → {after}, for other {' and '.join(others)} (safe)"
        )
    kernels.use(ranking)
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in ranking.milliseconds.items())
    multihost.print_on_primary(f"kernels  {ranking.function}: {times or 'no measured kernel passed the comparison'}")
    for name, reason in ranking.rejected.items():
        multihost.print_on_primary(f"         {name} is not used: {reason}")
