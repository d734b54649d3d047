"""Check whether training can start on this machine, and measure how fast it will be.

difftx doctor [--config=FILE.py[:ARG]] [--workdir=DIR] [--json]

The command measures the devices, the attention kernels, the folder or bucket of the run, and the bucket of its data.
Its exit code is 1 if training cannot start. Start it on every host of a job with the flags of `difftx train` to
check all of them.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftx.commands.flags import parse_command
from difftx.config import Config, MeshConfig
from difftx.config.recipes import load_config
from difftx.console import protected
from difftx.data.records import bucket_files
from difftx.data.tokenizer import with_vocabulary
from difftx.errors import EXIT_FAILED, UserError, explained, install_hint, printable
from difftx.files import require_writable
from difftx.parallel import multihost
from difftx.storage.paths import AnyPath, is_bucket, path_of

if TYPE_CHECKING:
    from etils import epath

    from difftx.kernels.backend import Ranking

WIDTH = 100  # Columns of the page.
EFFICIENCY = 0.5  # Assumed share of the speed of matrix products that a training reaches.
DEFAULT = {"cpu": "quickstart:diff", "accelerator": "diff_3b:diff"}  # Recipes whose kernels are measured.
SLOW_WRITES = 50e6  # Bytes/s below which checkpoints take long.
# Format of each speed and size, by its name in `Findings`.
RATES: dict[str, Callable[[float], str]] = {
    "write": lambda rate: f"{rate / 1e6:,.0f} MB/s",
    "read": lambda rate: f"{rate / 1e6:,.0f} MB/s",
    "latency_seconds": lambda seconds: f"{1e3 * seconds:,.1f} ms",
    "free_bytes": lambda count: f"{count / 2**30:,.0f} GiB",
}


def main(arguments: Sequence[str]) -> int:
    """Print the page, or one JSON object with --json. Exit codes: 0 a run can start, 1 it cannot, 2 bad input."""
    parser = argparse.ArgumentParser(prog="difftx doctor", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE.py[:ARG]", help="also check this config, and estimate its speed")
    parser.add_argument("--workdir", default=".", help="folder of the run, or gs://… or s3://…; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    multihost.add_flags(parser)
    parser.epilog = "--config.path.to.field=value changes a field; docs/config.md describes them all"
    options, overrides = parse_command(parser, arguments, "config")
    options.workdir = path_of("--workdir", options.workdir)
    config = None if options.config is None else with_vocabulary(load_config(options.config, overrides))
    out = protected(os.fdopen(os.dup(sys.stdout.fileno()), "w", closefd=False))
    if options.json:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Libraries, such as Gloo, print to standard output.
    findings = examine(options, config)
    if multihost.is_primary():
        if options.json:
            print(
                json.dumps(dataclasses.asdict(findings) | {"ok": not findings.problems}, indent=2), file=out, flush=True
            )
        else:
            show(findings)
    return EXIT_FAILED if findings.problems else 0


@dataclasses.dataclass
class Findings:
    """The results of the command. Speeds are in bytes/s and FLOP/s."""

    software: dict[str, str] = dataclasses.field(default_factory=dict)
    devices: dict[str, Any] = dataclasses.field(default_factory=dict)
    collectives: dict[str, float] = dataclasses.field(default_factory=dict)  # Bytes/s received, by axis of the mesh.
    kernels: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    storage: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # Speeds of data paths in buckets.
    folders: dict[str, str | None] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] | None = None
    problems: list[str] = dataclasses.field(default_factory=list)  # Why training cannot start.
    advice: list[str] = dataclasses.field(default_factory=list)  # What to change, the most important first.

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Turn an error that difftx can explain into a problem."""
        try:
            yield
        except Exception as error:
            if (explanation := explained(error)) is None:
                raise
            self.problems.append(str(explanation))


def examine(options: argparse.Namespace, config: Config | None) -> Findings:
    """Examine this machine, and the others of the job, for a config or for a default one."""
    from difftx.training import kernel_measurement

    gpus, findings = kernel_measurement.gpu_identity(), Findings(software=_software(), folders=_folders())
    multihost.join(options, (config or load_config(DEFAULT["cpu"], {})).multihost)
    # Measure before this process takes the memory of the GPUs.
    rankings = {} if gpus is None else _rankings(config or load_config(DEFAULT["accelerator"], {}))
    multihost.require_devices()

    import jax

    from difftx import kernels
    from difftx.launch import health
    from difftx.parallel.mesh import make_mesh
    from difftx.training.run import fit_to_devices

    on_cpu = jax.default_backend() == "cpu"
    shown = config or load_config(DEFAULT["cpu" if on_cpu else "accelerator"], {})
    size, count = (1024, 2**22) if on_cpu else (8192, 2**27)
    dtype = shown.model.compute_dtype
    findings.devices = {
        "kind": jax.devices()[0].device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "driver": gpus or jax.devices()[0].client.platform_version.splitlines()[0],
        "memory_bytes": _memory_bytes(),
        "dtype": dtype,
        "matmul_flops": health.matmul_flops(dtype, size),
        "memory_bandwidth": health.memory_bandwidth(count),
    }
    if on_cpu and kernel_measurement.has_nvidia_gpu():
        findings.advice.append(f"JAX uses the CPU, although there is an NVIDIA GPU: {install_hint('cuda')}")
    with findings.part():
        rankings = rankings or _rankings(shown)
        findings.kernels = _kernels(rankings, findings.devices["matmul_flops"], findings.advice)
    with findings.part():
        mesh = fit_to_devices(config).mesh if config is not None else MeshConfig()
        findings.collectives = health.collective_bandwidths(make_mesh(mesh), count)
    with findings.part():
        require_writable(options.workdir)
        findings.storage = _storage(options.workdir, findings.advice)
    for path in _bucket_data(config):
        with findings.part():
            findings.data[str(path)] = _read_speeds(path)
    wrong = [function for function, (_, ranking) in rankings.items() if not ranking.milliseconds]
    findings.problems += [f"no kernel of {function} gives right results on this device" for function in wrong]
    if config is not None and not wrong:
        for _, ranking in rankings.values():
            if config.train.kernel_choice == "measured":
                kernels.use(ranking)
        with findings.part():
            _examine_config(options, config, findings)
    _add_other_processes(findings, shown.multihost.barrier_timeout_seconds)
    return findings


def _add_other_processes(findings: Findings, timeout_seconds: float) -> None:
    """Add the problems and the advice of all processes, without duplicates. All processes must call this."""
    everywhere = multihost.gather("findings", [findings.problems, findings.advice], timeout_seconds)
    findings.problems, findings.advice = (
        list(dict.fromkeys(itertools.chain(*lists))) for lists in zip(*everywhere, strict=True)
    )


def _software() -> dict[str, str]:
    from difftx.training.checkpoint.manifest import package_versions

    return {"python": platform.python_version(), "system": platform.platform(), **package_versions()}


def _memory_bytes() -> int:
    """Return the memory of a device, or of the machine if its devices are CPUs."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _folders() -> dict[str, str | None]:
    """Return the folders of caches. None: compiled programs or vocabularies are not kept."""
    return {
        "compiled programs": os.environ.get("JAX_COMPILATION_CACHE_DIR"),
        "tokenizers": os.environ.get("TIKTOKEN_CACHE_DIR", str(Path(tempfile.gettempdir()) / "data-gym-cache")),
    }


def _rankings(config: Config) -> "dict[str, tuple[Config, Ranking]]":
    """Measure the kernels of a config and of its counterpart. Return each config and its ranking by function."""
    from difftx.evals.throughput import COMPARED, pair
    from difftx.kernels.backend import Ranking
    from difftx.training import kernel_measurement
    from difftx.training.workload import kernel_function

    by_function = {}
    for one in pair(config).values() if config.model.architecture in COMPARED else [config]:
        function = kernel_function(one)
        if function != "weighted_attention":  # It has one kernel.
            by_function[function] = one, Ranking(function, {}, *kernel_measurement.measured(one))
    return by_function


def _kernels(
    rankings: "dict[str, tuple[Config, Ranking]]", matmul_flops: float, advice: list[str]
) -> list[dict[str, Any]]:
    """Return a row for each backend of the platform: function, name, correct, milliseconds, ratio_to_floor, reason."""
    import jax

    from difftx.kernels import api
    from difftx.training.workload import attention_workload

    rows = []
    for function, (one, ranking) in rankings.items():
        workload = attention_workload(one, jax.devices()[0].device_kind, jax.device_count())
        if (rows_measured := workload.fitting().batch) < workload.batch:
            advice.append(
                f"a microbatch has {workload.batch} rows per device, of which {rows_measured} fit a measurement: the "
                f"times of {function} are scaled; raise train.accumulation, or set mesh.preset=auto"
            )
        floor = 1e3 * workload.flops / matmul_flops
        for backend in api.candidates(function):
            time, reason = ranking.milliseconds.get(backend.name), ranking.rejected.get(backend.name)
            rows.append(
                {
                    "function": function,
                    "name": backend.name,
                    "correct": time is not None,
                    "milliseconds": time,
                    "ratio_to_floor": None if time is None else time / floor,
                    "reason": reason or backend.why_unsupported(workload.call()),
                }
            )
    return rows


def _storage(workdir: AnyPath, advice: list[str]) -> dict[str, Any]:
    from difftx.launch import health

    if is_bucket(workdir):
        speeds = health.bucket_speeds(workdir)
        if speeds["write"] < SLOW_WRITES:
            slow = f"{workdir} writes {speeds['write'] / 1e6:.0f} MB/s, so checkpoints take long"
            advice.append(f"{slow}; use a bucket in the region of this machine")
        return {"folder": str(workdir), **speeds, "conditional_writes": True}  # `require_writable` has tested them.
    folder = workdir.absolute()
    while not folder.exists():
        folder = folder.parent
    speeds = health.file_speeds(folder)
    if speeds["write"] < SLOW_WRITES:
        advice.append(f"{folder} writes {speeds['write'] / 1e6:.0f} MB/s, so checkpoints take long; use a faster disk")
    atomic = health.renames_are_atomic(folder)
    if not atomic:
        raise UserError(
            f"--workdir={workdir}: renames there are not atomic, so a crash could corrupt a run; use another"
        )
    free = shutil.disk_usage(folder).free
    return {"folder": str(folder), **speeds, "atomic_renames": atomic, "free_bytes": free}


def _bucket_data(config: Config | None) -> "list[epath.Path]":
    """Return the data paths of a config that are in buckets."""
    paths = [] if config is None else [path_of("data.path", text) for text in config.data.paths]
    return [path for path in paths if is_bucket(path)]


def _read_speeds(path: "epath.Path") -> dict[str, float]:
    """Measure reads of the largest object at a data path."""
    from difftx.launch import health

    files = bucket_files(path)
    if not files:
        raise UserError(f"data.path={path}: no such object or folder, and no object matches it as a glob")
    largest = max(files, key=lambda file: files[file].size)
    return health.object_speeds(largest, files[largest].size)


def _examine_config(options: argparse.Namespace, config: Config, findings: Findings) -> None:
    """Set `findings.config`, and add problems and advice. Raise `UserError` if training cannot start."""
    from difftx.config.extras import check_extras
    from difftx.parallel.mesh import check_divisible, make_mesh
    from difftx.training.run import fit_to_devices

    with findings.part():
        check_extras(config)
    fitted = fit_to_devices(config)
    check_divisible(fitted, make_mesh(fitted.mesh))
    _examine_space(fitted, options.workdir, findings)
    findings.config = {"config": options.config, **_expected_training(fitted, options.workdir, findings)}
    _advise_on_speed(config, fitted, findings)


def _examine_space(fitted: Config, workdir: AnyPath, findings: Findings) -> None:
    """Add problems and advice on the memory of the devices and on the space for checkpoints."""
    from difftx.commands.cost import memory_of
    from difftx.model.flops import format_bytes
    from difftx.parallel.mesh import make_mesh
    from difftx.training.checkpoint.manifest import steps_in
    from difftx.training.state import state_bytes

    memory, size = memory_of(fitted, make_mesh(fitted.mesh)), state_bytes(fitted)
    if warning := memory.warning():
        (findings.advice if memory.holds_state else findings.problems).append(warning)
    if (free := findings.storage.get("free_bytes")) is not None:
        missing = _most_checkpoints(fitted) - len(steps_in(workdir / "checkpoints"))
        if missing * size > free:
            findings.problems.append(
                f"{missing} checkpoints of {format_bytes(size)} exceed the {format_bytes(free)} that are free in "
                f"{findings.storage['folder']}; make room, use another --workdir, or lower checkpoint.keep"
            )


def _expected_training(fitted: Config, workdir: AnyPath, findings: Findings) -> dict[str, Any]:
    """Return what a training of the config would use, and its expected speed. Raise `UserError` if it cannot start."""
    import jax

    from difftx.commands.train import check_run
    from difftx.model.abstract import count_parameters
    from difftx.model.flops import flops_per_token
    from difftx.training.run import Run
    from difftx.training.state import state_bytes
    from difftx.training.workload import attention_kernel

    run = Run.open(fitted, workdir)
    check_run(run)
    flops = flops_per_token(fitted.model, fitted.data.sequence_length, causal=True)
    # Each process writes its shards at the speed that it has measured next to the others.
    process_bytes = state_bytes(fitted) / jax.process_count()
    return {
        "parameters": count_parameters(fitted.model).total,
        "mesh": dict(run.mesh.shape),
        "remat": fitted.model.remat,
        "accumulation": fitted.train.accumulation,
        "kernel": attention_kernel(fitted, run.mesh),
        "tokens_per_second": EFFICIENCY * findings.devices["matmul_flops"] * jax.device_count() / flops,
        "save_seconds": process_bytes / findings.storage["write"] if findings.storage else 0,
    }


def _advise_on_speed(config: Config, fitted: Config, findings: Findings) -> None:
    """Add advice on what slows down the training in `findings.config`, and on steps and saves that are too long."""
    import jax

    from difftx.launch.jobs import GRACE_SECONDS
    from difftx.model.flops import PEAK_FLOPS

    assert findings.config is not None
    if jax.default_backend() != "cpu":
        peak = PEAK_FLOPS.get(findings.devices["kind"])
        if config.model.compute_dtype == "float32":
            findings.advice.append("model.compute_dtype=float32 does not use the fast matrix units; set it to bfloat16")
        elif peak is not None and findings.devices["matmul_flops"] < peak / 2:
            reached = findings.devices["matmul_flops"] / peak
            findings.advice.append(f"matrix products reach {reached:.0%} of the data sheet; look for other processes")
        if config.mesh.preset == "none":
            findings.advice.append("mesh.preset=none; with auto, difftx selects mesh, remat and microbatches")
    step_seconds = fitted.train.global_batch_tokens / findings.config["tokens_per_second"]
    if (stopping := step_seconds + findings.config["save_seconds"]) > GRACE_SECONDS:
        findings.advice.append(
            f"a step and a save take about {stopping:,.0f} s, but jobs end {GRACE_SECONDS} s after the signal of a "
            "preemption, without a checkpoint; raise the time in the job file, write to faster storage, or lower "
            "checkpoint.every_steps"
        )


def _most_checkpoints(config: Config) -> int:
    """Return the largest number of checkpoints that a run has at a time, the one that is being written included."""
    steps, checkpoint = config.train.steps, config.checkpoint
    saved = [*range(checkpoint.every_steps, steps, checkpoint.every_steps), steps]
    kept = set(saved[-checkpoint.keep - 1 :])  # The run has the most checkpoints while it writes the last one.
    if checkpoint.keep_every_steps is not None:
        kept.update(step for step in saved if step % checkpoint.keep_every_steps == 0)
    return min(len(saved), len(kept) + (checkpoint.keep_best is not None))


def show(findings: Findings) -> None:
    """Print the findings as a page of `WIDTH` columns."""
    import rich.console
    import rich.table

    console = rich.console.Console(width=WIDTH, highlight=False, markup=False)

    def table(title: str, rows: Iterable[Sequence[str]], *headers: str) -> None:
        grid = rich.table.Table(title=title, title_justify="left", show_header=bool(headers), width=WIDTH)
        for number, header in enumerate(headers or ("", "")):
            grid.add_column(header, justify="left" if number == 0 or not headers else "right", overflow="fold")
        for row in rows:
            grid.add_row(*row)
        console.print(grid)

    def bandwidth(value: float) -> str:
        return f"{value / 1e9:,.2f} GB/s"

    measured = findings.devices
    devices = {
        "devices": f"{measured['count']} × {measured['kind']}, {measured['processes']} processes",
        "driver": measured["driver"],
        "memory": f"{measured['memory_bytes'] / 2**30:.1f} GiB",
        f"matrix products ({measured['dtype']})": f"{measured['matmul_flops'] / 1e12:,.3f} TFLOP/s",
        "memory bandwidth": bandwidth(measured["memory_bandwidth"]),
    }
    devices |= {f"all-gather over {axis}": bandwidth(rate) for axis, rate in findings.collectives.items()}
    table("Software", findings.software.items())
    table("Devices", devices.items())
    kernels = [
        (
            f"{row['function']}: {row['name']}",
            "yes" if row["correct"] else "no",
            "–" if row["milliseconds"] is None else f"{row['milliseconds']:.2f}",
            "–" if row["ratio_to_floor"] is None else f"{row['ratio_to_floor']:.1f}",
            row["reason"] or "",
        )
        for row in findings.kernels
    ]
    table("Attention kernels, forward and backward", kernels, "kernel", "right", "ms", "× floor", "reason")
    storage = [(name.replace("_", " "), str(value)) for name, value in findings.storage.items() if name not in RATES]
    for prefix, numbers in {
        "": findings.storage,
        **{f"{path}: ": speeds for path, speeds in findings.data.items()},
    }.items():
        names = [name for name in RATES if name in numbers]
        storage += [(f"{prefix}{re.sub('_(bytes|seconds)', '', name)}", RATES[name](numbers[name])) for name in names]
    table("Folders", [*storage, *((name, folder or "not kept") for name, folder in findings.folders.items())])
    if findings.config is not None:
        fields = {name.replace("_", " "): str(value) for name, value in findings.config.items()}
        fields["parameters"] = f"{findings.config['parameters']:,}"
        fields["mesh"] = ", ".join(f"{axis} {size}" for axis, size in findings.config["mesh"].items())
        fields["tokens per second"] = (
            f"about {findings.config['tokens_per_second']:,.0f}, at half of the matrix products' speed"
        )
        fields["save seconds"] = f"about {findings.config['save_seconds']:.1f}"
        table("Config", fields.items())
    for title, lines in (("Training cannot start", findings.problems), ("What to change first", findings.advice)):
        if lines:
            console.print(
                f"{title}:", *(f"  {number}. {printable(line)}" for number, line in enumerate(lines, 1)), sep="\n"
            )
    if not findings.problems:
        console.print("Training can start here.")
