"""Estimate the cost of a train step on devices that are not attached, and show estimates in tables.

JAX compiles the step for a description of the devices (topology.py) and does not run it. The compiler reports the
memory. The communication is read from the optimised HLO (hlo.py), and the arithmetic from the jaxpr (arithmetic.py).
"""

import dataclasses
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.table
from jax.interpreters import partial_eval

from difftx.config import Config
from difftx.data.loader import Batch
from difftx.errors import UserError
from difftx.kernels import cudnn
from difftx.launch.arithmetic import executed_flops
from difftx.launch.hlo import Collective, list_collectives
from difftx.launch.topology import CUDNN_VERSION, GIB, Chip
from difftx.model.flops import LOW_PRECISION_FACTORS, PEAK_FLOPS, flops_per_token, format_bytes
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import make_mesh
from difftx.training.checkpoint.restoring import on_mesh
from difftx.training.fit import fit
from difftx.training.state import init_state, make_train_step
from difftx.training.teacher import abstract_teacher
from difftx.training.workload import attention_kernel

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class DoesNotFitError(UserError):
    """The step needs more memory than the device has."""

    def __init__(self, needed_bytes: float, capacity_bytes: float):
        super().__init__(
            f"the step needs {needed_bytes / GIB:.2f} GiB of a device's {capacity_bytes / GIB:.2f}, "
            f"{(needed_bytes - capacity_bytes) / GIB:.2f} GiB too much"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Cost of one train step. Bytes and seconds are per device."""

    device_kind: str
    mesh: dict[str, int]  # Axis → number of devices.
    slices: int
    remat: str
    accumulation: int
    argument_bytes: int  # Size of the train state and the batch.
    output_bytes: int
    alias_bytes: int  # Size of the outputs that reuse the memory of donated arguments.
    temporary_bytes: int  # Total size of activations, gradients and gathered parameters.
    allocated_bytes: int  # Memory for arguments, outputs and temporaries. Temporaries may share memory.
    code_bytes: int  # Size of the machine code.
    chip: Chip  # Memory and bandwidths of the device.
    compile_seconds: float
    executed_flops: float  # FLOPs that one device executes, including recomputation.
    low_precision_flops: float  # Part of `executed_flops` in products of 8-bit operands (`model.matmul`).
    model_flops: float  # FLOPs of the model over all devices: 6 N + 12 L T d_model per token.
    model_flops_causal: float  # `model_flops` without masked attention: 6 N + 6 L T d_model per token.
    peak_flops: float | None  # Peak bfloat16 FLOP/s of one device, or None if unknown.
    low_precision_peak: float | None  # Peak FLOP/s in 8-bit products, or None if unknown or not used.
    # Kind of collective → runs per step, bytes sent within a slice or GPU host, and bytes sent over the network.
    collectives: dict[str, dict[str, float]]
    attention: str  # Name of the attention kernel.
    cudnn: bool  # Whether cuDNN computes attention. Its workspace is unknown without a GPU.
    step_tokens: int  # Number of tokens in a global batch.
    steps: int  # Number of steps in the configured run.

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def needed_bytes(self) -> int:
        """Memory that the step needs on one device, including program code."""
        return self.allocated_bytes + self.code_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.chip.hbm_bytes

    @property
    def bound(self) -> "Bound | None":
        """Lower bound for the time of a step, or None if the device's peak FLOP/s or a bandwidth is unknown."""
        chip = self.chip
        if self.peak_flops is None or chip.hbm_bandwidth is None or chip.interconnect is None or chip.network is None:
            return None
        inside = sum(c["interconnect_bytes"] for c in self.collectives.values())
        between = sum(c["network_bytes"] for c in self.collectives.values())
        low = self.low_precision_flops
        arithmetic = (self.executed_flops - low) / self.peak_flops + low / (self.low_precision_peak or self.peak_flops)
        collective = max(inside / chip.interconnect, between / chip.network)
        state = (self.argument_bytes + self.output_bytes) / chip.hbm_bandwidth
        step = max(arithmetic, collective, state)
        possible = self.devices * self.peak_flops * step
        return Bound(
            arithmetic_seconds=arithmetic,
            collective_seconds=collective,
            state_seconds=state,
            step_seconds=step,
            mfu=self.model_flops / possible,
            mfu_causal=self.model_flops_causal / possible,
            days=self.steps * step / 86_400,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and all derived numbers as a JSON object."""
        derived = {"devices": self.devices, "needed_bytes": self.needed_bytes, "fits": self.fits}
        bound = {} if self.bound is None else dataclasses.asdict(self.bound)
        return dataclasses.asdict(self) | derived | bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """Lower bound for the time of a step, if arithmetic, communication and memory traffic overlap perfectly.

    Each of the three runs at the speed in the device's data sheet.
    """

    arithmetic_seconds: float  # Time of the executed matrix products at the device's peak FLOP/s for their precision.
    # Time to send all bytes. Traffic within a slice or GPU host overlaps with traffic over the network.
    collective_seconds: float
    state_seconds: float  # Time to read the train state and the batch from memory and to write the new state.
    step_seconds: float  # The largest of arithmetic, collective and state seconds.
    mfu: float  # Upper bound for the MFU: model FLOPs / (devices × bfloat16 peak × step seconds).
    mfu_causal: float  # Upper bound for the MFU with `model_flops_causal`.
    days: float  # Lower bound for the time of the configured run.


def trace_step(config: Config, mesh: jax.sharding.Mesh) -> jax.stages.Traced:
    """Trace the train step of `difftx.training.loop` with abstract arrays that have only shapes and shardings."""
    with jax.set_mesh(mesh):
        state = on_mesh(jax.eval_shape(lambda: init_state(config)), mesh)
        sharding = jax.NamedSharding(mesh, Layout().act_BT)
        shape = (config.batch_rows, config.data.sequence_length)
        tokens, mask = (jax.ShapeDtypeStruct(shape, t, sharding=sharding) for t in (jnp.int32, jnp.float32))
        documents = tokens if config.data.document_mask else None
        batch = Batch(
            tokens_BT=tokens, targets_BT=tokens, loss_mask_BT=mask, segment_ids_BT=documents, positions_BT=documents
        )
        teacher, *params = abstract_teacher(config, mesh) or (None,)
        return jax.jit(make_train_step(config, teacher), donate_argnums=0).trace(state, batch, *params)


def estimate(config: Config, devices: Sequence[jax.Device], chip: Chip) -> Estimate:
    """Compile the train step for `devices` and return its cost. Raise `DoesNotFitError` if it needs too much memory."""
    mesh = make_mesh(config.mesh, devices)
    fit(config, mesh)
    start = time.perf_counter()
    try:
        with cudnn.checked_for_target(CUDNN_VERSION):
            traced = trace_step(config, mesh)
            compiled = traced.lower().compile()
            # Remove unused gradients (of frozen parameters) before counting FLOPs, as XLA does.
            program = traced.jaxpr.jaxpr
            executed, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
            attention = attention_kernel(config, mesh)
    except jax.errors.JaxRuntimeError as error:
        raise _does_not_fit(str(error)) or error from None
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    inputs_and_outputs = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    kind, hlo = devices[0].device_kind, compiled.as_text() or ""
    length, tokens = config.data.sequence_length, config.train.global_batch_tokens
    factor = LOW_PRECISION_FACTORS.get(config.model.matmul, {}).get(kind)
    return Estimate(
        device_kind=kind,
        mesh=dict(mesh.shape),
        slices=config.mesh.slices,
        remat=config.model.remat,
        accumulation=config.train.accumulation,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        # jaxlib 0.11 does not report the total of all allocations, so add the sizes. XLA may round allocations up.
        allocated_bytes=getattr(memory, "total_allocation_bytes", inputs_and_outputs + memory.temp_size_in_bytes),
        code_bytes=memory.generated_code_size_in_bytes,
        chip=chip,
        compile_seconds=seconds,
        executed_flops=executed_flops(executed),
        low_precision_flops=executed_flops(executed, only_8_bits=True),
        model_flops=tokens * flops_per_token(config.model, length, causal=False),
        model_flops_causal=tokens * flops_per_token(config.model, length, causal=True),
        peak_flops=(peak := PEAK_FLOPS.get(kind)),
        low_precision_peak=peak and factor and peak * factor,
        collectives=_totals_by_kind(list_collectives(hlo, chip.host_devices)),
        attention=attention,
        cudnn="__cudnn$fmha" in hlo,
        step_tokens=tokens,
        steps=config.train.steps,
    )


def plan_table(e: Estimate, title: str, efficiency: float) -> rich.table.Table:
    """Return a table that explains an estimate. "days, likely" assumes `efficiency` times the speed of the bound."""
    out = rich.table.Table(title=title, title_justify="left", show_header=False)
    out.add_column("what", no_wrap=True)
    out.add_column("value", justify="right", no_wrap=True)
    out.add_column("how it is counted")

    def section(*rows: tuple[str, str, str]) -> None:
        for row in rows:
            out.add_row(*row)
        out.add_section()

    low = e.low_precision_flops
    section(
        ("devices", f"{e.devices} × {e.device_kind}", _mesh_text(e)),
        ("compiled in", f"{e.compile_seconds:.1f} s", f"remat={e.remat}, accumulation={e.accumulation}"),
    )
    verdict = "fits" if e.fits else "does not fit"
    section(
        ("arguments", format_bytes(e.argument_bytes), "train state and batch; all memory is per device"),
        ("temporaries", format_bytes(e.temporary_bytes), "activations, gradients, gathered parameters; some overlap"),
        ("outputs", format_bytes(e.output_bytes), f"{format_bytes(e.alias_bytes)} of them overwrite arguments"),
        ("program", format_bytes(e.code_bytes), "machine code"),
        ("memory", format_bytes(e.needed_bytes), f"total, of {format_bytes(e.chip.hbm_bytes)}: {verdict}"),
    )
    how = "a run measures the kernels and may select another one"
    if e.cudnn:
        how = "not compiled here: its FLOPs are counted, and its workspace is not"
    section(("attention", e.attention, how))
    for kind, numbers in e.collectives.items():
        between = f", and {format_bytes(numbers['network_bytes'])} over the network" if numbers["network_bytes"] else ""
        meaning = f"sent per device, {numbers['runs']:.0f} per step{between}"
        out.add_row(kind, format_bytes(numbers["interconnect_bytes"]), meaning)
    out.add_section()
    section(
        ("executed", f"{e.executed_flops:.3g} FLOPs", "matrix products per device and step, recomputation included"),
        *([("in 8 bits", f"{low:.3g} FLOPs", "part of these: products with weights")] if low else []),
        ("model", f"{e.model_flops:.3g} FLOPs", "all devices: 6 N + 12 L T d_model per token"),
        ("model, causal", f"{e.model_flops_causal:.3g} FLOPs", "all devices: 6 N + 6 L T d_model per token"),
    )
    tokens = ("tokens", f"{e.steps * e.step_tokens:.4g}", f"{e.steps:,} steps of {e.step_tokens:,}")
    bound = e.bound
    if bound is None:
        section(tokens, ("time", "", f"the peak FLOP/s of {e.device_kind} are not known: no bound"))
        return out
    rate = f"{e.peak_flops or 0:.3g} FLOP/s" + (f", in 8 bits {e.low_precision_peak or 0:.3g}" if low else "")
    crosses = any(numbers["network_bytes"] for numbers in e.collectives.values())
    network = f" ({(e.chip.network or 0) / 1e9:.4g} over the network)" if crosses else ""
    memory = f"{(e.chip.hbm_bandwidth or 0) / 1e9:.4g} GB/s"
    bandwidth = f"{(e.chip.interconnect or 0) / 1e9:.4g} GB/s{network}"
    section(
        ("arithmetic", _seconds(bound.arithmetic_seconds), f"executed / {rate}"),
        ("collectives", _seconds(bound.collective_seconds), f"bytes sent / {bandwidth}"),
        ("state", _seconds(bound.state_seconds), f"arguments and outputs / {memory}"),
        ("step", f"≥ {_seconds(bound.step_seconds)}", "max(arithmetic, collectives, state): one hides the others"),
        ("MFU", f"≤ {bound.mfu:.1%}", "model / (devices × peak × step)"),
        ("MFU, causal", f"≤ {bound.mfu_causal:.1%}", "model, causal / (devices × peak × step)"),
    )
    section(
        tokens,
        ("days", f"≥ {bound.days:.3g}", "steps × step"),
        ("days, likely", f"{bound.days / efficiency:.3g}", f"at {efficiency:.0%} of that speed (--efficiency)"),
    )
    return out


def search_table(found: Sequence[Estimate], title: str) -> rich.table.Table:
    """Return a table with one estimate per row, in the given order."""
    out = rich.table.Table(title=title, title_justify="left")
    for name in ("mesh", "remat", "accumulation", "memory", "arithmetic", "collectives", "MFU", "days"):
        out.add_column(name, justify="left" if name in ("mesh", "remat") else "right", no_wrap=True)
    for e in found:
        times = ("",) * 4
        if bound := e.bound:
            seconds = _seconds(bound.arithmetic_seconds), _seconds(bound.collective_seconds)
            times = *seconds, f"≤ {bound.mfu:.1%}", f"≥ {bound.days:.3g}"
        out.add_row(_mesh_text(e), e.remat, str(e.accumulation), format_bytes(e.needed_bytes), *times)
    return out


def _mesh_text(e: Estimate) -> str:
    """Return the mesh axes with more than one device as text, such as `fsdp=16 tensor=4`."""
    axes = [f"{axis}={size}" for axis, size in e.mesh.items() if size > 1]
    if e.slices > 1:
        axes.append(f"slices={e.slices}")
    return " ".join(axes) or "one device"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _totals_by_kind(collectives: Sequence[Collective]) -> dict[str, dict[str, float]]:
    totals: dict[str, dict[str, float]] = {}
    for c in sorted(collectives, key=lambda c: c.kind):
        total = totals.setdefault(c.kind, {"runs": 0, "interconnect_bytes": 0, "network_bytes": 0})
        total["runs"] += c.runs
        total["interconnect_bytes"] += c.interconnect_bytes
        total["network_bytes"] += c.network_bytes
    return totals


def _does_not_fit(message: str) -> DoesNotFitError | None:
    """Parse libtpu's error "HLO temporaries (57.43G) exceeds available HBM (15.75G)". Return None for other errors."""
    # The first number includes the arguments, although libtpu calls it temporaries.
    found = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)", message)
    if found is None:
        return None
    return DoesNotFitError(float(found[1]) * _UNITS[found[2]], float(found[3]) * _UNITS[found[4]])
