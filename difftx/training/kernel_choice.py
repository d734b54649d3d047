"""The start of the processes of a command, with the choice of the attention kernel.

On accelerators, with `train.kernel_choice = "measured"`, each process compares all kernels with the reference and times
them, for the shapes of the run. All processes then use one ranking: if one process rejects a kernel, all do.

A kernel may hang, or leave the device in a state in which every later call fails. On GPUs, a child process therefore
measures the kernels before this process opens the device; after a failure, a new child measures the remaining ones. A
TPU belongs to one process, so the process itself measures there, and ends with an advice if a kernel hangs.

The ranking is stored in the user's cache folder and in the manifest of the run. A run that resumes on the same devices
with the same versions of `COMPILERS`, the same source files in `KERNELS` and the same shapes uses the recorded ranking,
so that its results stay the same bit for bit.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import flax.traverse_util
import jax
from jax._src import distributed  # For the number of processes before JAX opens the devices.

from difftx import kernels
from difftx.compilation_cache import user_folder
from difftx.config import Config
from difftx.config.architectures import ARCHITECTURES
from difftx.config.fields import values_of
from difftx.errors import EXIT_FAILED, printable
from difftx.files import read_file, source_sha256
from difftx.json_files import json_sha256, read_record, schema_error, write_record
from difftx.kernels import target
from difftx.kernels.backend import Ranking
from difftx.kernels.context import SequenceSharding
from difftx.kernels.measure import Workload, measure
from difftx.model.abstract import count_parameters
from difftx.parallel import multihost
from difftx.parallel.mesh import mesh_sizes
from difftx.parallel.presets import apply_preset
from difftx.registry import load_extensions, loaded_extensions
from difftx.storage.paths import AnyPath
from difftx.training.checkpoint.manifest import ACCELERATOR_PACKAGES, MANIFEST, package_versions

DEADLINE_SECONDS = 60.0  # Time for all kernels.
KERNEL_SECONDS = 25.0  # Time for one kernel, including its compilation.
COMPILERS = ("jax", "jaxlib", *ACCELERATOR_PACKAGES)  # Packages whose versions may change a kernel.
SHAPE = {"function": str, "conditions": {str: str}, "milliseconds": {str: float}, "rejected": {str: str}}
KERNELS = Path(kernels.__file__).parent
SOURCE = "kernel source files"  # Condition of a ranking: the SHA-256 of the files in `KERNELS`.
Measured = tuple[dict[str, float], dict[str, str]]  # Milliseconds, or else the reason for a rejection, by kernel.
# Groups and fields that determine the shapes of a call.
SHAPE_FIELDS = (
    "model.",
    "mesh.",
    "train.global_batch_tokens",
    "train.accumulation",
    "data.sequence_length",
    "data.doc",
)


def start(flags: argparse.Namespace, configs: Sequence[Config], workdir: AnyPath | None) -> None:
    """Join the other processes, choose the attention kernels of the configs, and look for devices.

    `flags` are those of `multihost.add_flags`. `workdir` is the run of the first config, which may have recorded a
    ranking.
    """
    multihost.join(flags, configs[0].multihost)
    choose(configs, workdir)


def choose(configs: Sequence[Config], workdir: AnyPath | None = None) -> None:
    """Choose the attention kernels of the configs, and look for devices."""
    measurable = {kernel_function(config): config for config in configs if _is_measured(config)}
    recorded = {function: _recorded(workdir, function) for function in measurable}
    gpus = gpu_identity() if measurable else None
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
    for function, config in measurable.items():
        pair = [r and dataclasses.asdict(r) for r in (recorded[function], own.get(function))]
        _use(multihost.gather(f"kernels of {function}", pair, config.multihost.barrier_timeout_seconds))


def kernel_function(config: Config) -> str:
    """Return the name of the attention function that the config's model calls."""
    if config.model.attention_logit_bits is not None:
        return "weighted_attention"
    return ARCHITECTURES[config.model.architecture].kernel


def workload(config: Config, kind: str, devices: int) -> Workload:
    """Return the shapes of a microbatch's attention on one of `devices` devices of a kind."""
    config = apply_preset(config, kind=kind, devices=devices, parameters=count_parameters(config.model).total)
    model, sizes = config.model, mesh_sizes(config.mesh, devices)
    is_differential = kernel_function(config) == "diff_attention"
    # With the method "heads", each device attends with whole rows to a part of the heads. With the other methods, it
    # has a part of the tokens and all heads. One device cannot run these, so the shapes are those of whole rows.
    shards = sizes["tensor"] * (sizes["context"] if config.mesh.context_method == "heads" else 1)
    return Workload(
        function="diff_attention" if is_differential else "attention",
        batch=max(1, config.batch_rows // config.train.accumulation // (sizes["data"] * sizes["fsdp"])),
        tokens=config.data.sequence_length,
        heads=max(1, (model.num_heads if is_differential else model.query_heads) // shards),
        kv_heads=max(1, model.kv_heads * (1 if is_differential else model.groups) // shards),
        width=model.d_head,
        dtype=model.compute_dtype,
        has_segments=config.data.document_mask,
        window=None if None in model.windows else model.window,  # Layers without a window take the most time.
    )


def attention_call(config: Config, mesh: jax.sharding.Mesh) -> kernels.AttentionCall:
    """Return the arguments of the attention function in a train step on a mesh, with shapes in place of arrays."""
    call = workload(config, mesh.devices.flat[0].device_kind, mesh.size).call()
    if config.mesh.context_method == "heads" or mesh.shape["context"] == 1:
        return call
    zigzag = config.mesh.context_method == "zigzag"
    return call._replace(sharding=SequenceSharding("context", mesh.shape["context"], zigzag))


def attention_kernel(config: Config, mesh: jax.sharding.Mesh) -> str:
    """Return the name of the attention backend in a train step on a mesh, whose devices need not be attached."""
    with jax.set_mesh(mesh):
        call = attention_call(config, mesh)
        return kernels.selected(kernel_function(config), config.model.attention_implementation, call)


def has_nvidia_gpu() -> bool:
    """Return whether this machine has the NVIDIA driver. JAX may use another platform nevertheless."""
    return shutil.which("nvidia-smi") is not None


def gpu_identity() -> str | None:
    """Return the number and names of the NVIDIA GPUs that JAX will use, with their driver, or None.

    JAX does not open the devices.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "").split(",")
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if platforms[0] not in ("", "cuda", "gpu") or not has_nvidia_gpu() or not any("cuda" in p.name for p in plugins):
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    names = found.stdout.strip().splitlines()
    return f"{len(names)} × {names[0]}" if found.returncode == 0 and names else None


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
        found: Any = json.loads(content or b"")["kernels"][function]
    except (ValueError, LookupError, TypeError):  # `Run.check_records` reports a manifest that is not one.
        return None
    if schema_error(found, SHAPE):
        return None
    # Older rankings do not have this condition.
    return Ranking(**found | {"conditions": {SOURCE: source_sha256(KERNELS)} | found["conditions"]})


def _ranked(devices: str, config: Config, recorded: Ranking | None) -> Ranking | None:
    """Return the recorded ranking if its conditions hold, else that of the user's cache folder, else a measured one.

    Return None if nothing could be measured.
    """
    values = flax.traverse_util.flatten_dict(values_of(config), sep=".")
    shapes = {name: value for name, value in values.items() if name.startswith(SHAPE_FIELDS)}
    conditions = {
        "devices": devices,
        "versions": ", ".join(f"{name} {version}" for name, version in package_versions().items() if name in COMPILERS),
        SOURCE: source_sha256(KERNELS),
        "shapes": json_sha256([_process_count(), shapes]),
    }
    if recorded is not None and recorded.conditions == conditions:
        return recorded
    path = user_folder() / f"kernels-{json_sha256(conditions)[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        found = read_record(path)
        if found is not None and schema_error(found, SHAPE) is None:
            return Ranking(**found)
    milliseconds, rejected = measured(config)
    if not (milliseconds or rejected):
        return None
    ranking = Ranking(kernel_function(config), conditions, milliseconds, rejected)
    if config.train.compilation_cache != "off":
        with contextlib.suppress(OSError):  # The user may have no home folder.
            path.parent.mkdir(parents=True, exist_ok=True)
            write_record(path, dataclasses.asdict(ranking))
    return ranking


def measured(config: Config) -> Measured:
    """Measure the kernels of a config; the fastest comes first. On GPUs, call this before JAX opens the devices."""
    milliseconds, rejected = _measured_here(config) if gpu_identity() is None else _measured_by_children(config)
    return dict(sorted(milliseconds.items(), key=lambda item: item[1])), rejected


def _measured_by_children(config: Config) -> Measured:
    """Measure the kernels in child processes. After a failure, a new child measures the remaining kernels."""
    context, deadline = multiprocessing.get_context("spawn"), time.monotonic() + DEADLINE_SECONDS
    milliseconds: dict[str, float] = {}
    rejected: dict[str, str] = {}
    todo: list[str] | None = None
    extensions = [extension.path for extension in loaded_extensions()]
    devices = jax.config.read(
        "jax_cuda_visible_devices"
    )  # Set by `jax.distributed` if each process has some of the GPUs.
    while todo is None or todo:
        pipe, end = context.Pipe(duplex=False)
        child = context.Process(
            target=_child, args=(end, config, extensions, devices, _process_count(), todo), daemon=True
        )
        child.start()
        end.close()
        try:
            todo = _received(pipe, deadline)
            while todo:
                outcome = _received(pipe, min(deadline, time.monotonic() + KERNEL_SECONDS))
                if isinstance(outcome, str):
                    raise _FailedError(outcome)
                milliseconds[todo.pop(0)] = outcome
        except _FailedError as error:
            if todo is None:
                print(printable(f"attention kernels cannot be measured: {error}"), file=sys.stderr, flush=True)
                break
            rejected[todo.pop(0)] = str(error)
            if time.monotonic() > deadline:
                rejected |= _not_tried(todo)
                break
        finally:
            child.kill()
            child.join()
    return milliseconds, rejected


class _FailedError(Exception):
    """A kernel failed in a child process."""


def _received(pipe: Connection, deadline: float) -> Any:
    """Return what a child sends. Raise `_FailedError` if it sends nothing until the deadline, or ends."""
    began = time.monotonic()
    try:
        if pipe.poll(max(0.0, deadline - began)):
            return pipe.recv()
    except (EOFError, OSError):
        raise _FailedError("the process that measured it crashed") from None
    raise _FailedError(f"it did not finish within {time.monotonic() - began:.0f} s")


def _child(
    end: Connection, config: Config, extensions: list[str], devices: str, processes: int, todo: list[str] | None
):
    """Send the names of the kernels to measure, and then, for each, its milliseconds or the reason why it failed.

    The first failure is the last thing that a child sends, because another child measures the remaining kernels.
    """
    # A hung kernel must not keep the GPU if the parent dies.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax.config.update("jax_cuda_visible_devices", devices)
    load_extensions([Path(path) for path in extensions])
    shapes = workload(config, target.device_kind(), jax.local_device_count() * processes)
    names = shapes.candidates() if todo is None else todo
    end.send(names)
    for name in names:
        outcome = _outcome(shapes, name)
        end.send(outcome)
        if isinstance(outcome, str):
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(EXIT_FAILED)


def _outcome(shapes: Workload, name: str) -> float | str:
    """Return the milliseconds of a kernel, or the reason why it failed."""
    try:
        return measure(shapes, name)
    except Exception as error:  # A kernel may raise any exception.
        return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def _measured_here(config: Config) -> Measured:
    """Measure the kernels in this process. If one hangs, the process ends with exit code 1 and an advice."""
    last_start = time.monotonic() + DEADLINE_SECONDS - KERNEL_SECONDS
    shapes = workload(config, target.device_kind(), jax.device_count())
    milliseconds: dict[str, float] = {}
    rejected: dict[str, str] = {}
    running: list[str] = []
    watchdog = threading.Timer(DEADLINE_SECONDS, _abort, [running])
    watchdog.daemon = True
    watchdog.start()
    for name in shapes.candidates():
        if time.monotonic() > last_start:  # The watchdog ends the process even if a kernel is only slow to compile.
            rejected |= _not_tried([name])
            continue
        running[:] = [name]
        outcome = _outcome(shapes, name)
        if isinstance(outcome, str):
            rejected[name] = outcome
        else:
            milliseconds[name] = outcome
    watchdog.cancel()
    return milliseconds, rejected


def _not_tried(names: list[str]) -> dict[str, str]:
    # Without "xla", which compiles for every device, there might be no kernel at all.
    return {name: f"not tried within {DEADLINE_SECONDS:.0f} s" for name in names if name != "xla"}


def _abort(running: list[str]) -> None:
    print(
        f"error: attention kernel {running[0]!r} did not finish before the deadline of {DEADLINE_SECONDS:.0f} s; name "
        "another one, such as model.attention_implementation=xla, or set train.kernel_choice=fixed",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_FAILED)


def _process_count() -> int:
    """Return the number of processes, without opening the devices."""
    return distributed.global_state.num_processes or 1


def _use(everywhere: list[list[dict[str, Any] | None]]) -> None:
    """Let "auto" follow the worst of the rankings of all processes, or else what process 0 has recorded. Log it.

    `everywhere` has two rankings of each process: the recorded one, and the one under the present conditions. A process
    whose conditions have not changed gives its recorded ranking twice. So its measurements count even if another
    process has measured again.
    """
    recorded = None if everywhere[0][0] is None else Ranking(**cast(dict[str, Any], everywhere[0][0]))
    own = {process: Ranking(**ranking) for process, (_, ranking) in enumerate(everywhere) if ranking is not None}
    ranking = worst(own) if own else recorded
    if ranking is None:
        return
    if recorded is not None and ranking != recorded:
        before, now = (next(iter(one.milliseconds), "none") for one in (recorded, ranking))
        present = [item for one in own.values() for item in one.conditions.items()]
        others = dict.fromkeys(name for name, value in present if recorded.conditions.get(name) != value)
        multihost.print_on_primary(
            f"changed since the run began: attention kernel {before} → {now}, for other {' and '.join(others)} (safe)"
        )
    kernels.use(ranking)
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in ranking.milliseconds.items())
    multihost.print_on_primary(f"kernels  {ranking.function}: {times or 'no measured kernel is right'}")
    for name, reason in ranking.rejected.items():
        multihost.print_on_primary(f"         {name} is not used: {reason}")


def worst(rankings: Mapping[int, Ranking]) -> Ranking:
    """Return the ranking with the largest time of each kernel, without kernels that a process rejects."""
    first, *others = rankings.values()
    rejected: dict[str, str] = {}
    for process, ranking in rankings.items():
        for name, reason in ranking.rejected.items():
            # The reasons in a recorded ranking of several processes already name the process.
            is_named = not others or reason.startswith("process ")
            rejected.setdefault(name, reason if is_named else f"process {process}: {reason}")
    names = [name for name in first.milliseconds if name not in rejected]
    slowest = {name: max(one.milliseconds.get(name, math.inf) for one in rankings.values()) for name in names}
    ordered = dict(sorted(slowest.items(), key=lambda item: item[1]))
    return dataclasses.replace(first, milliseconds=ordered, rejected=rejected)
