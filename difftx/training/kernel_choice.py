"""The choice of the attention kernel at the start of a command.

On accelerators, with `train.kernel_choice = "measured"`, each process compares all kernels with the reference and times
them, for the shapes of the run. All processes then use one ranking: if one process rejects a kernel, all do.

The ranking is stored in the user's cache folder and in the manifest of the run. A run that resumes on the same devices
with the same versions of `COMPILERS`, the same source files in `KERNELS` and the same shapes uses the recorded ranking,
so that its results stay the same bit for bit.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax

from difftx import kernels
from difftx.compilation_cache import user_folder
from difftx.config import Config
from difftx.config.fields import Effect, Flag, fields_with, flat, values_of
from difftx.files import read_file, source_sha256
from difftx.json_files import json_sha256, read_record, schema_error, write_record
from difftx.kernels import target
from difftx.kernels.backend import Ranking
from difftx.parallel import multihost
from difftx.storage.paths import AnyPath
from difftx.training import kernel_measurement
from difftx.training.checkpoint.manifest import ACCELERATOR_PACKAGES, MANIFEST, package_versions
from difftx.training.workload import kernel_function

COMPILERS = ("jax", "jaxlib", *ACCELERATOR_PACKAGES)  # Packages whose versions may change a kernel.
RANKING_SCHEMA = {"function": str, "conditions": {str: str}, "milliseconds": {str: float}, "rejected": {str: str}}
KERNELS = Path(kernels.__file__).parent
SOURCE = "kernel source files"  # Condition of a ranking: the SHA-256 of the files in `KERNELS`.


def choose(configs: Sequence[Config], workdir: AnyPath | None = None) -> None:
    """Choose the attention kernels of the configs, and raise `UserError` if JAX finds no device.

    Call `multihost.join` first. `workdir` is the run of the first config, which may have recorded a ranking.
    """
    measurable = {kernel_function(config): config for config in configs if _is_measured(config)}
    recorded = {function: _recorded(workdir, function) for function in measurable}
    gpus = kernel_measurement.gpu_identity() if measurable else None
    own: dict[str, Ranking | None] = {}
    if gpus is not None:  # Measure before this process allocates the memory of the GPUs.
        for function, config in measurable.items():
            own[function] = _ranked(gpus, config, recorded[function])
    multihost.require_devices()
    if measurable and gpus is None and target.platform() == "tpu":
        device = jax.devices()[0]
        tpus = f"{jax.device_count()} × {device.device_kind}, {device.client.platform_version.splitlines()[0]}"
        for function, config in measurable.items():
            own[function] = _ranked(tpus, config, recorded[function])
    pairs = {f: [r and dataclasses.asdict(r) for r in (recorded[f], own.get(f))] for f in measurable}
    # One call for all functions, in every process: `agree_on_command` has not compared the configs yet.
    everywhere = multihost.gather("kernels", pairs, configs[0].multihost.barrier_timeout_seconds)
    for function in measurable:
        _use([of_process.get(function, [None, None]) for of_process in everywhere])


def _is_measured(config: Config) -> bool:
    is_auto = config.model.attention_implementation == "auto"
    # `weighted_attention` has one kernel.
    return config.train.kernel_choice == "measured" and is_auto and kernel_function(config) != "weighted_attention"


def _recorded(workdir: AnyPath | None, function: str) -> Ranking | None:
    """Return the ranking of a function in the manifest of a run, if there is one.

    Raise `UnreadableError` if the manifest cannot be read: a new measurement could choose another kernel.
    """
    content = read_file(workdir / MANIFEST) if workdir else None
    try:
        recorded: Any = json.loads(content or b"")["kernels"][function]
    except (ValueError, LookupError, TypeError):  # `Run.check_records` reports a manifest that is not one.
        return None
    return None if schema_error(recorded, RANKING_SCHEMA) else Ranking(**recorded)


def _ranked(devices: str, config: Config, recorded: Ranking | None) -> Ranking | None:
    """Return the recorded ranking if its conditions hold, else that of the user's cache folder, else a measured one.

    Return None if nothing could be measured.
    """
    values = flat(values_of(config))
    # The config that a run records has other values of the preset's fields than the config on the command line.
    set_by_preset = fields_with(Config, Flag.PRESET) if config.mesh.preset == "auto" else []
    determining = {*fields_with(Config, Effect.SHAPES, Effect.FUNCTION, Flag.KERNEL)}.difference(set_by_preset)
    fields = {name: value for name, value in values.items() if name in determining}
    conditions = {
        "devices": devices,
        "versions": ", ".join(f"{name} {version}" for name, version in package_versions().items() if name in COMPILERS),
        SOURCE: source_sha256(KERNELS),
        "shapes": json_sha256([kernel_measurement.process_count(), fields]),
    }
    if recorded is not None and recorded.conditions == conditions:
        return recorded
    path = user_folder() / f"kernels-{json_sha256(conditions)[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        cached = read_record(path)
        if cached is not None and schema_error(cached, RANKING_SCHEMA) is None:
            return Ranking(**cached)
    milliseconds, rejected = kernel_measurement.measured(config)
    if not (milliseconds or rejected):
        return None
    ranking = Ranking(kernel_function(config), conditions, milliseconds, rejected)
    if config.train.compilation_cache != "off":
        with contextlib.suppress(OSError):  # The user may have no home folder.
            path.parent.mkdir(parents=True, exist_ok=True)
            write_record(path, dataclasses.asdict(ranking))
    return ranking


def _use(everywhere: list[list[dict[str, Any] | None]]) -> None:
    """Combine the rankings of all processes, print the result, and let "auto" follow it.

    `everywhere` has a pair for each process: the ranking that the run has recorded, and the ranking under the present
    conditions, which is the recorded one if the conditions have not changed. Without any present ranking, process 0's
    recorded one is used.
    """
    recorded = None if everywhere[0][0] is None else Ranking(**cast(dict[str, Any], everywhere[0][0]))
    own = {process: Ranking(**ranking) for process, (_, ranking) in enumerate(everywhere) if ranking is not None}
    ranking = slowest_of_all(own) if own else recorded
    if ranking is None:
        return
    if recorded is not None and ranking != recorded:
        before, after = (next(iter(each.milliseconds), "none") for each in (recorded, ranking))
        present = [condition for own_ranking in own.values() for condition in own_ranking.conditions.items()]
        others = dict.fromkeys(name for name, value in present if recorded.conditions.get(name) != value)
        multihost.print_on_primary(
            f"changed since the run began: attention kernel {before} → {after}, for other {' and '.join(others)} (safe)"
        )
    kernels.use(ranking)
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in ranking.milliseconds.items())
    multihost.print_on_primary(f"kernels  {ranking.function}: {times or 'no measured kernel passed the comparison'}")
    for name, reason in ranking.rejected.items():
        multihost.print_on_primary(f"         {name} is not used: {reason}")


def slowest_of_all(rankings: Mapping[int, Ranking]) -> Ranking:
    """Return the ranking by each kernel's largest time in any process, without kernels that a process rejects."""
    first, *others = rankings.values()
    rejected: dict[str, str] = {}
    for process, ranking in rankings.items():
        for name, reason in ranking.rejected.items():
            # The reasons in a recorded ranking of several processes already name the process.
            is_named = not others or reason.startswith("process ")
            rejected.setdefault(name, reason if is_named else f"process {process}: {reason}")
    names = [name for name in first.milliseconds if name not in rejected]
    slowest = {name: max(ranking.milliseconds.get(name, math.inf) for ranking in rankings.values()) for name in names}
    ordered = dict(sorted(slowest.items(), key=lambda item: item[1]))
    return dataclasses.replace(first, milliseconds=ordered, rejected=rejected)
