"""Findings of `difftx doctor`: the speeds of a machine, what prevents training on it, and the page that shows them."""

import argparse
import contextlib
import dataclasses
import itertools
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import rich.console
import rich.table

from difftx import kernels
from difftx.commands.cost import memory_of
from difftx.commands.train import check_extras, check_run
from difftx.config import Config, MeshConfig
from difftx.config.recipes import load_config
from difftx.errors import explained, install_hint, printable
from difftx.evals.throughput import COMPARED, pair
from difftx.files import require_writable
from difftx.kernels import api
from difftx.kernels.backend import Ranking
from difftx.launch import health
from difftx.launch.jobs import GRACE_SECONDS
from difftx.launch.topology import take_gpu_memory
from difftx.model.abstract import count_parameters
from difftx.model.architectures import describe_heads
from difftx.model.flops import PEAK_FLOPS, flops_per_token, format_bytes
from difftx.parallel import multihost
from difftx.parallel.mesh import make_mesh
from difftx.storage.paths import AnyPath, is_bucket
from difftx.training import kernel_measurement
from difftx.training.checkpoint.manifest import package_versions, steps_in
from difftx.training.checkpoint.retention import newest_and_every
from difftx.training.fit import fit
from difftx.training.run import Run, fit_to_devices
from difftx.training.state import state_bytes
from difftx.training.workload import attention_kernel, attention_workload, kernel_function

WIDTH = 100  # Width of the page in characters.
EFFICIENCY = 0.5  # Assumed speed of training, as a share of the speed of matrix products.
DEFAULT = {"cpu": "quickstart:diff", "accelerator": "diff_3b:diff"}  # Recipes to measure kernels with.
FORMATS: dict[str, Callable[[Any], str]] = {  # Name of a finding in `Findings` → format on the page.
    "matmul_flops": lambda rate: f"{rate / 1e12:,.3f} TFLOP/s",
    "memory_bandwidth": lambda rate: f"{rate / 1e9:,.2f} GB/s",
    "memory_bytes": format_bytes,
    "write": lambda rate: f"{rate / 1e6:,.0f} MB/s",
    "read": lambda rate: f"{rate / 1e6:,.0f} MB/s",
    "latency_seconds": lambda seconds: f"{seconds:,.4f}",
    "free_bytes": format_bytes,
    "parameters": lambda count: f"{count:,}",
    "mesh": lambda sizes: ", ".join(f"{axis} {size}" for axis, size in sizes.items()),
    "tokens_per_second": lambda speed: f"about {speed:,.0f}, at half of the matrix products' speed",
    "save_seconds": lambda seconds: f"about {seconds:.1f}",
}


@dataclasses.dataclass
class Findings:
    """The results of the command. Speeds are in bytes/s and FLOP/s."""

    software: dict[str, str] = dataclasses.field(default_factory=dict)
    devices: dict[str, Any] = dataclasses.field(default_factory=dict)
    collectives: dict[str, float] = dataclasses.field(default_factory=dict)  # Bytes/s received, by axis of the mesh.
    kernels: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    storage: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] | None = None
    problems: list[str] = dataclasses.field(default_factory=list)  # Reasons why training cannot start.
    advice: list[str] = dataclasses.field(default_factory=list)  # What to change, most important first.

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Record an error of the block as a problem, if difftx can explain it."""
        try:
            yield
        except Exception as error:
            if (explanation := explained(error)) is None:
                raise
            if str(explanation) not in self.problems:  # Two checks may find the same problem.
                self.problems.append(str(explanation))


def examine(options: argparse.Namespace, config: Config | None) -> Findings:
    """Examine this machine, and all other machines of the job, for a config or for a default one."""
    gpus, share, findings = kernel_measurement.gpu_identity(), take_gpu_memory(), Findings()
    findings.software = {"python": platform.python_version(), "system": platform.platform(), **package_versions()}
    multihost.join(options, (config or load_config(DEFAULT["cpu"], {})).multihost)
    # Measure before this process takes the memory of the GPUs.
    rankings = {} if gpus is None else _rankings(config or load_config(DEFAULT["accelerator"], {}))
    multihost.require_devices()

    on_cpu = jax.default_backend() == "cpu"
    shown = config or load_config(DEFAULT["cpu" if on_cpu else "accelerator"], {})
    size, count = (1024, 2**22) if on_cpu else (8192, 2**27)
    device, machine_memory = jax.local_devices()[0], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    findings.devices = {
        "kind": jax.devices()[0].device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "driver": gpus or jax.devices()[0].client.platform_version.splitlines()[0],
        "memory_share": None if gpus is None else float(share),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit", machine_memory),
        "dtype": shown.model.compute_dtype,
        "matmul_flops": health.matmul_flops(shown.model.compute_dtype, size),
        "memory_bandwidth": health.memory_bandwidth(count),
    }
    if on_cpu and kernel_measurement.has_nvidia_gpu():
        findings.advice.append(f"JAX uses the CPU, although there is an NVIDIA GPU: {install_hint('cuda')}")
    with findings.part():
        rankings = rankings or _rankings(shown)
        findings.kernels = _kernels(rankings, findings.devices["matmul_flops"])
    with findings.part():
        mesh = fit_to_devices(config).mesh if config is not None else MeshConfig()
        findings.collectives = health.collective_bandwidths(make_mesh(mesh), count)
    with findings.part():
        require_writable(options.workdir)
        findings.storage = _storage(options.workdir)
    wrong = [function for function, (_, ranking) in rankings.items() if not ranking.milliseconds]
    findings.problems += [f"no kernel of {function} gives right results on this device" for function in wrong]
    if config is not None and not wrong:
        for _, ranking in rankings.values():
            if config.train.kernel_choice == "measured":
                kernels.use(ranking)
        with findings.part():
            _examine_config(options, config, findings)
    # All processes must call this. A problem or advice that several processes have is shown once.
    lists = [findings.problems, findings.advice]
    everywhere = multihost.exchange("findings", lambda: lists, shown.multihost.barrier_timeout_seconds)
    findings.problems, findings.advice = (
        list(dict.fromkeys(itertools.chain(*lists))) for lists in zip(*everywhere, strict=True)
    )
    return findings


def _rankings(config: Config) -> dict[str, tuple[Config, Ranking]]:
    """Measure the kernels of a config and of its counterpart. Return each config and its ranking by function."""
    by_function = {}
    for one in pair(config).values() if config.model.architecture in COMPARED else [config]:
        function = kernel_function(one)
        if function != "weighted_attention":  # This function only has one kernel.
            by_function[function] = one, Ranking(function, {}, *kernel_measurement.measured(one))
    return by_function


def _kernels(rankings: Mapping[str, tuple[Config, Ranking]], matmul_flops: float) -> list[dict[str, Any]]:
    """Return a row for each backend of the platform."""
    rows = []
    for function, (one, ranking) in rankings.items():
        workload = attention_workload(one, jax.devices()[0].device_kind, jax.device_count())
        floor = 1e3 * workload.flops / matmul_flops
        for backend in api.candidates(function):
            time, reason = ranking.milliseconds.get(backend.name), ranking.rejected.get(backend.name)
            row = {"function": function, "name": backend.name, "correct": time is not None, "milliseconds": time}
            row["ratio_to_floor"] = None if time is None else time / floor
            rows.append(row | {"reason": reason or backend.why_unsupported(workload.call())})
    return rows


def _storage(workdir: AnyPath) -> dict[str, Any]:
    """Return the speeds of a writable folder or bucket, and for a folder also its free space."""
    if is_bucket(workdir):
        return {"folder": str(workdir), **health.bucket_speeds(workdir)}
    folder = next(folder for folder in (workdir.absolute(), *workdir.absolute().parents) if folder.exists())
    return {"folder": str(folder), **health.file_speeds(folder), "free_bytes": shutil.disk_usage(folder).free}


def _examine_config(options: argparse.Namespace, config: Config, findings: Findings) -> None:
    """Set `findings.config`, and add problems and advice. Raise `UserError` if training cannot start."""
    with findings.part():
        check_extras(config)
    fitted = fit_to_devices(config)
    mesh = make_mesh(fitted.mesh)
    fit(fitted, mesh)
    memory, size = memory_of(fitted, mesh), state_bytes(fitted)
    if warning := memory.warning():
        (findings.advice if memory.holds_state else findings.problems).append(warning)
    if (free := findings.storage.get("free_bytes")) is not None:
        c = fitted.checkpoint
        kept = newest_and_every(c, range(c.every_steps, fitted.train.steps + 1, c.every_steps))
        # A run has the most checkpoints while it writes a new one.
        most = len(kept) + 1 + (c.keep_best is not None) + (c.every_minutes is not None)
        missing = most - len(steps_in(options.workdir / "checkpoints"))
        if missing * size > free:
            findings.problems.append(
                f"{missing} checkpoints of {format_bytes(size)} exceed the {format_bytes(free)} that are free in "
                f"{findings.storage['folder']}; make room, use another --workdir, or lower checkpoint.keep"
            )
    run = Run.open(fitted, options.workdir)
    check_run(run)
    flops = flops_per_token(fitted.model, fitted.data.sequence_length, causal=True)
    speed = EFFICIENCY * findings.devices["matmul_flops"] * jax.device_count() / flops
    # Each process writes its own shards. It has measured its speed while the other processes wrote too.
    save_seconds = size / jax.process_count() / findings.storage["write"] if findings.storage else 0
    findings.config = {
        "config": options.config,
        "heads": describe_heads(fitted.model),
        "parameters": count_parameters(fitted.model).total,
        "mesh": dict(run.mesh.shape),
        "remat": fitted.model.remat,
        "accumulation": fitted.train.accumulation,
        "kernel": attention_kernel(fitted, run.mesh),
        "tokens_per_second": speed,
        "save_seconds": save_seconds,
    }
    if jax.default_backend() != "cpu":
        peak, reached = PEAK_FLOPS.get(findings.devices["kind"]), findings.devices["matmul_flops"]
        if peak is not None and config.model.compute_dtype != "float32" and reached < peak / 2:
            slow = f"matrix products reach {reached / peak:.0%} of the data sheet; look for other processes"
            findings.advice.append(slow)
    if (stopping := fitted.train.global_batch_tokens / speed + save_seconds) > GRACE_SECONDS:
        findings.advice.append(
            f"a step and a save take about {stopping:,.0f} s, but jobs end {GRACE_SECONDS} s after the signal of a "
            "preemption, without a checkpoint; raise the time in the job file, write to faster storage, or lower "
            "checkpoint.every_steps"
        )


def show(findings: Findings) -> None:
    """Print the findings as a page of width `WIDTH`."""
    console = rich.console.Console(width=WIDTH, highlight=False, markup=False)

    def table(title: str, rows: Iterable[Sequence[str]], *headers: str) -> None:
        grid = rich.table.Table(title=title, title_justify="left", show_header=bool(headers), width=WIDTH)
        for number, header in enumerate(headers or ("", "")):
            grid.add_column(header, justify="left" if number == 0 or not headers else "right", overflow="fold")
        for row in rows:
            grid.add_row(*row)
        console.print(grid)

    def rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
        texts = {name: FORMATS.get(name, str)(value) for name, value in found.items() if value is not None}
        return [(name.replace("_", " "), text) for name, text in texts.items()]

    gathers = [(f"all-gather over {axis}", f"{rate / 1e9:,.2f} GB/s") for axis, rate in findings.collectives.items()]
    table("Software", findings.software.items())
    table("Devices", [*rows(findings.devices), *gathers])
    measurements = [
        (
            f"{row['function']}: {row['name']}",
            "yes" if row["correct"] else "no",
            "–" if row["milliseconds"] is None else f"{row['milliseconds']:.2f}",
            "–" if row["ratio_to_floor"] is None else f"{row['ratio_to_floor']:.1f}",
            row["reason"] or "",
        )
        for row in findings.kernels
    ]
    table("Attention kernels, forward and backward", measurements, "kernel", "right", "ms", "× floor", "reason")
    table("Folder of the run", rows(findings.storage))
    if findings.config is not None:
        table("Config", rows(findings.config))
    for title, lines in (("Training cannot start", findings.problems), ("What to change first", findings.advice)):
        if lines:
            console.print(f"{title}:", *(f"  {n}. {printable(line)}" for n, line in enumerate(lines, 1)), sep="\n")
    if not findings.problems:
        console.print("Training can start here.")
