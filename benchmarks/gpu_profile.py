"""Device time of each kernel of one forward and backward pass of differential attention.

python benchmarks/gpu_profile.py [--batch=4] [--heads=12] [--widths=128,64] [--length=4096] [--runs=30]

`ncu` can start this script with --runs=1: then the script runs each pass once and profiles nothing itself.
"""

import argparse
import collections
import functools
import statistics
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernels import Shape
from difftx import kernels


def kernel_times(folder: Path) -> dict[str, list[float]]:
    """Return {kernel: its milliseconds in each run} from the traces in `folder`."""
    times = collections.defaultdict(list)
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                if line.name.startswith("Stream"):
                    for event in line.events:
                        times[event.name].append(event.duration_ns / 1e6)
    return times


def main() -> None:
    """Run both passes, and print a line per kernel: the median and the smallest time, and the calls per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--widths", default="128,64")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=30)
    args = parser.parse_args()
    for width in map(int, args.widths.split(",")):
        shape = Shape(batch=args.batch, heads=args.heads, width=width, length=args.length)
        attention = functools.partial(kernels.diff_attention, implementation="pallas_gpu")

        @jax.jit
        def both(dout, *arguments, attention=attention):
            out, pull = jax.vjp(attention, *arguments)
            return out, pull(dout)

        arguments = shape.arrays()
        call = functools.partial(both, jnp.ones_like(arguments[2]), *arguments)
        jax.block_until_ready(call())
        print(f"\nB = {shape.batch}, T = {shape.length}, H = {shape.heads}, d = {width}")
        if args.runs == 1:
            continue
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(args.runs):
                    jax.block_until_ready(call())
            times = kernel_times(Path(folder))
        for name, ms in sorted(times.items(), key=lambda item: -sum(item[1])):
            per_run = len(ms) / args.runs
            print(f"{statistics.median(ms):9.4f} ms, smallest {min(ms):9.4f}, {per_run:4.1f} per run  {name[:80]}")


if __name__ == "__main__":
    main()
