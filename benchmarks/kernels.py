"""Speed of the differential attention kernels, compared with the matched Transformer's attention and an ideal time.

python benchmarks/kernels.py [--batch=4] [--heads=12] [--widths=128] [--lengths=4096] [--rounds=9]
    [--only=NAME,…]

For each shape, the table shows the ideal time ("floor") and the measured times of forward, backward and both, as
medians over interleaved rounds in one process. It also shows the executed TFLOP/s and the ratios to the floor and to
the Transformer. The floor is the time for the matrix FLOPs or for the bytes, whichever is longer, at the rates of a
large matrix product and a large copy, which the benchmark measures first. A kernel that cannot run on the device is
listed with the reason. --only selects implementations, and may name a Pallas kernel of another platform, which is then
interpreted.

Shapes: B = batch rows, T = tokens per row, H = differential heads, G = 2 groups of queries and keys, d = their width,
E = 2d, the width of values.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import rich.console
import rich.table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.console_tables import numbers_table
from difftx import kernels
from difftx.kernels import target
from difftx.kernels.measure import REPEAT_SECONDS, seconds_per_call

# Sizes of the computations that measure the rates of the floor: a square matrix, and bytes that are read and written.
MATRIX_SIDE, CPU_MATRIX_SIDE = 8192, 1024
COPIED_BYTES = 2**31

# Number of matrix products of width d over T² / 2 pairs for one differential head, as (forward, backward), at 2 FLOPs
# per multiply-add. The floor counts P1 V and P2 V separately, as kernels with an online softmax compute them.
FLOOR_UNITS = (6, 10)
# Implementation → number of such products that it executes.
EXECUTED_UNITS = {
    "pallas_tpu": (6, 10),
    "pallas_gpu": (6, 14),  # The backward pass consists of two kernels.
    "cudnn": (8, 20),
    "xla": (4, 10),
    "four calls": (8, 20),
    "transformer": (4, 10),
}


def four_calls(q_BTHGd: jax.Array, k_BTHGd: jax.Array, v_BTHE: jax.Array, lam: jax.Array) -> jax.Array:
    """Compute FlashDiffAttn_2 of the official code: each softmax attends to each half of V separately."""
    halves = jnp.split(v_BTHE, 2, axis=-1)
    one, two = (
        jnp.concatenate([kernels.attention(q_BTHGd[:, :, :, g], k_BTHGd[:, :, :, g], v) for v in halves], axis=-1)
        for g in (0, 1)
    )
    return (one - lam * two).astype(v_BTHE.dtype)


def transformer_attention(q_BTHGd: jax.Array, k_BTHGd: jax.Array, v_BTHE: jax.Array, lam: jax.Array) -> jax.Array:
    """Compute the matched Transformer's attention from the same arrays: 2H heads of width d."""
    del lam
    B, T, H, G, d = q_BTHGd.shape
    q, k, v = (x.reshape(B, T, G * H, d) for x in (q_BTHGd, k_BTHGd, v_BTHE))
    return kernels.attention(q, k, v).reshape(B, T, H, G * d)


def contestants(only: list[str] | None) -> dict[str, Callable[..., jax.Array]]:
    """Return name → function that computes the attention; it raises ValueError where it cannot run.

    `only` are names, or None for all that the platform compiles.
    """
    named = {
        # Pallas kernels of other platforms would run in the interpreter.
        name: functools.partial(kernels.diff_attention, implementation=name)  # pyrefly: ignore[bad-argument-type]
        for name, backend in kernels.BACKENDS["diff_attention"].items()
        if (name in only if only else backend.auto and backend.platform in (None, target.platform()))
    }
    others = {"four calls": four_calls, "transformer": transformer_attention}
    return named | {name: function for name, function in others.items() if not only or name in only}


class Program(NamedTuple):
    """A compiled program with its arguments."""

    call: Callable[[], object]
    calls: int  # Calls of one measurement: as many as take `REPEAT_SECONDS`, so that the host's part is small.

    def seconds(self) -> float:
        """Return the mean seconds of a call."""
        return seconds_per_call(self.call, self.calls)


def compile_program(function: Callable[..., object], *arguments: jax.Array) -> Program:
    """Compile a function, and run it twice: to warm up, and to choose the number of calls of a measurement."""
    call = functools.partial(jax.jit(function).lower(*arguments).compile(), *arguments)
    jax.block_until_ready(call())
    return Program(call, max(1, round(REPEAT_SECONDS / seconds_per_call(call, 1))))


class Rates(NamedTuple):
    """Highest rates that the device reached."""

    flops: float  # FLOP/s of a large bfloat16 matrix product.
    bytes: float  # Bytes/s of a large copy, read and written.


def measure_rates() -> Rates:
    """Measure the rates of the device. Random numbers matter: a product of zeros needs less power and is faster."""
    side = CPU_MATRIX_SIDE if target.platform() == "cpu" else MATRIX_SIDE
    matrix = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    values = jnp.arange(COPIED_BYTES // 8, dtype=jnp.float32)  # Half of the bytes is read, half is written.
    product, copy = compile_program(jnp.matmul, matrix, matrix), compile_program(jnp.negative, values)
    seconds = [statistics.median(program.seconds() for _ in range(5)) for program in (product, copy)]
    return Rates(2 * side**3 / seconds[0], COPIED_BYTES / seconds[1])


def programs_of(attention: Callable[..., jax.Array], arguments: tuple[jax.Array, ...]) -> dict[str, Program]:
    """Return the programs "forward" and "both" (forward and backward)."""

    def with_gradient(*arguments: jax.Array):
        out, pull = jax.vjp(attention, *arguments)
        return pull(jnp.ones_like(out))

    functions = {"forward": attention, "both": with_gradient}
    return {name: compile_program(function, *arguments) for name, function in functions.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the arrays that the kernels are measured with."""

    batch: int
    heads: int  # Differential heads.
    width: int  # Width of a query or a key.
    length: int  # Tokens per row.

    def arrays(self) -> tuple[jax.Array, ...]:
        """Return random q and k of shape [B, T, H, G, d] and v of shape [B, T, H, E] in bfloat16, and λ."""
        keys = jax.random.split(jax.random.key(0), 3)
        rows = self.batch, self.length, self.heads
        shapes = [(*rows, 2, self.width), (*rows, 2, self.width), (*rows, 2 * self.width)]
        q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
        return q, k, v, jnp.float32(0.5)

    @property
    def product_flops(self) -> float:
        """FLOPs of one product of width d over T² / 2 pairs for all heads, the unit of `FLOOR_UNITS`."""
        return 2 * self.batch * self.heads * self.width * self.length**2 / 2

    def floor_seconds(self, rates: Rates) -> list[float]:
        """Return the ideal seconds of forward and backward."""
        tensor_bytes = self.batch * self.length * self.heads * 2 * self.width * 2  # Size of q, k, v or the output.
        tensors = (5, 8)  # Number of tensors that the forward and the backward pass read or write.
        return [
            max(products * self.product_flops / rates.flops, count * tensor_bytes / rates.bytes)
            for products, count in zip(FLOOR_UNITS, tensors, strict=True)
        ]


type Seconds = dict[str, dict[str, list[float]]]  # Implementation → "forward" or "both" → seconds of each round.


def measure(shape: Shape, rounds: int, only: list[str] | None) -> tuple[Seconds, dict[str, str]]:
    """Return the measured seconds, and implementation → reason for those that cannot run on the device."""
    arguments = shape.arrays()
    programs, refused = {}, {}
    for name, attention in contestants(only).items():
        try:
            programs[name] = programs_of(attention, arguments)
        except (ValueError, jax.errors.JaxRuntimeError) as error:  # Unsupported shapes, or too little memory.
            refused[name] = str(error).splitlines()[0]
    seconds: Seconds = {name: {"forward": [], "both": []} for name in programs}
    for _ in range(rounds):
        for name, parts in programs.items():
            for part, program in parts.items():
                seconds[name][part].append(program.seconds())
    return seconds, refused


def shape_table(shape: Shape, rates: Rates, rounds: int, seconds: Seconds) -> rich.table.Table:
    """Return the table of one shape, with a row for the floor and one per implementation."""
    device = jax.devices()[0].device_kind
    sizes = f"B={shape.batch} T={shape.length} H={shape.heads} d={shape.width}"
    columns = ("kernel", "forward ms", "backward ms", "both ms", "TFLOP/s fwd", "bwd", "× floor", "× transformer")
    table = numbers_table(f"{device}: {sizes}, causal, bf16, medians of {rounds}", columns)
    floor = shape.floor_seconds(rates)
    table.add_row("floor", *(f"{1e3 * s:.3f}" for s in (*floor, sum(floor))), "", "", "1.00", "")
    for name, measured in seconds.items():
        forward, both = statistics.median(measured["forward"]), statistics.median(measured["both"])
        passes = forward, both - forward
        products = zip(EXECUTED_UNITS[name], passes, strict=True)
        executed = [f"{count * shape.product_flops / s / 1e12:.1f}" for count, s in products]
        ratio = "-"
        if transformer := seconds.get("transformer"):
            pairs = zip(measured["both"], transformer["both"], strict=True)
            ratio = f"{statistics.median(own / other for own, other in pairs):.2f}"
        table.add_row(name, *(f"{1e3 * s:.3f}" for s in (*passes, both)), *executed, f"{both / sum(floor):.2f}", ratio)
    return table


def main() -> None:
    """Parse the flags and measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="rows, at the first length; longer rows take fewer")
    parser.add_argument("--heads", type=int, default=12, help="differential heads")
    parser.add_argument("--widths", default="128", help="widths d, such as 64,96,128")
    parser.add_argument("--lengths", default="4096", help="tokens per row, such as 1024,4096,65536")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", help="implementations, such as pallas_gpu,transformer")
    args = parser.parse_args()
    console = rich.console.Console(width=120)
    rates = measure_rates()
    measured = f"matrix product {rates.flops / 1e12:.0f} TFLOP/s, copy {rates.bytes / 1e12:.2f} TB/s"
    console.print(f"measured: {measured}", highlight=False)
    lengths = [int(x) for x in args.lengths.split(",")]
    for width in map(int, args.widths.split(",")):
        for length in lengths:
            batch = max(1, args.batch * lengths[0] // length)
            shape = Shape(batch=batch, heads=args.heads, width=width, length=length)
            seconds, refused = measure(shape, args.rounds, args.only and args.only.split(","))
            console.print(shape_table(shape, rates, args.rounds, seconds))
            for name, reason in refused.items():
                console.print(f"{name}: cannot run here: {reason}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
