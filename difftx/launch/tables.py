"""Tables of cost estimates for a terminal."""

from collections.abc import Sequence

from rich.table import Table

from difftx.launch.estimate import Estimate
from difftx.model.flops import format_bytes


def plan_table(e: Estimate, title: str, efficiency: float) -> Table:
    """Return the table of one estimate, with an explanation of each number.

    The row "days, likely" assumes the speed `efficiency` × bound.
    """
    out = Table(title=title, title_justify="left", show_header=False)
    out.add_column("what", no_wrap=True)
    out.add_column("value", justify="right", no_wrap=True)
    out.add_column("how it is counted")

    verdict = "fits" if e.fits else "does not fit"

    def section(*rows: tuple[str, str, str]) -> None:
        for row in rows:
            out.add_row(*row)
        out.add_section()

    section(
        ("devices", f"{e.devices} × {e.device_kind}", mesh_text(e)),
        ("compiled in", f"{e.compile_seconds:.1f} s", f"remat={e.remat}, accumulation={e.accumulation}"),
    )
    section(
        ("arguments", format_bytes(e.argument_bytes), "train state and batch; all memory is per device"),
        ("temporaries", format_bytes(e.temporary_bytes), "activations, gradients, gathered parameters; some overlap"),
        ("outputs", format_bytes(e.output_bytes), f"{format_bytes(e.alias_bytes)} of them overwrite arguments"),
        ("program", format_bytes(e.code_bytes), "machine code"),
        ("memory", format_bytes(e.needed_bytes), f"total, of {format_bytes(e.capacity_bytes)}: {verdict}"),
    )
    section(*(_collective_row(kind, numbers) for kind, numbers in e.collectives.items()))
    section(
        ("executed", f"{e.executed_flops:.3g} FLOPs", "matrix products per device and step, recomputation included"),
        ("model", f"{e.model_flops:.3g} FLOPs", "all devices: 6 N + 12 L T d per token"),
        ("model, causal", f"{e.model_flops_causal:.3g} FLOPs", "all devices: 6 N + 6 L T d per token"),
    )
    tokens = ("tokens", f"{e.steps * e.step_tokens:.4g}", f"{e.steps:,} steps of {e.step_tokens:,}")
    bound = e.bound
    if bound is None:
        section(tokens, ("time", "", f"the peak FLOP/s of {e.device_kind} are not known: no bound"))
        return out
    section(
        ("arithmetic", _seconds(bound.arithmetic_seconds), f"executed / {e.peak_flops or 0:.3g} FLOP/s"),
        ("collectives", _seconds(bound.collective_seconds), f"bytes sent / {_bandwidth(e)}"),
        ("step", f"≥ {_seconds(bound.step_seconds)}", "max(arithmetic, collectives): one hides the other"),
        ("MFU", f"≤ {bound.mfu:.1%}", "model / (devices × peak × step)"),
        ("MFU, causal", f"≤ {bound.mfu_causal:.1%}", "model, causal / (devices × peak × step)"),
    )
    section(
        tokens,
        ("days", f"≥ {bound.days:.3g}", "steps × step"),
        ("days, likely", f"{bound.days / efficiency:.3g}", f"at {efficiency:.0%} of that speed (--efficiency)"),
    )
    return out


def search_table(found: Sequence[Estimate], title: str) -> Table:
    """Return a table of estimates, one per row, in the given order."""
    out = Table(title=title, title_justify="left")
    for name in ("mesh", "remat", "accumulation", "memory", "arithmetic", "collectives", "MFU", "days"):
        out.add_column(name, justify="left" if name in ("mesh", "remat") else "right", no_wrap=True)
    for e in found:
        bound = e.bound
        times = ("",) * 4
        if bound is not None:
            seconds = _seconds(bound.arithmetic_seconds), _seconds(bound.collective_seconds)
            times = *seconds, f"≤ {bound.mfu:.1%}", f"≥ {bound.days:.3g}"
        out.add_row(mesh_text(e), e.remat, str(e.accumulation), format_bytes(e.needed_bytes), *times)
    return out


def mesh_text(e: Estimate) -> str:
    """Return the mesh axes of more than one device, such as `fsdp=16 tensor=4`."""
    axes = [f"{axis}={size}" for axis, size in e.mesh.items() if size > 1]
    return " ".join(axes + [f"slices={e.slices}"] * (e.slices > 1)) or "one device"


def _collective_row(kind: str, numbers: dict[str, float]) -> tuple[str, str, str]:
    between = f", and {format_bytes(numbers['network_bytes'])} to other slices" if numbers["network_bytes"] else ""
    runs = f"{numbers['runs']:.0f} per step"
    return kind, format_bytes(numbers["interconnect_bytes"]), f"sent per device, {runs}{between}"


def _bandwidth(e: Estimate) -> str:
    between = f" ({(e.network or 0) / 1e9:.4g} between slices)" if e.slices > 1 else ""
    return f"{(e.interconnect or 0) / 1e9:.4g} GB/s{between}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
