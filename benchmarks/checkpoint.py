"""Time of saving, verifying and restoring a checkpoint, and the time for which a save blocks training.

python benchmarks/checkpoint.py [--gigabytes=1] [--rounds=5] [--folder=DIR]

Saves a train state of random float32 arrays repeatedly; a third of it is parameters. Prints medians over rounds in one
process:

save      until the checkpoint is on disk, as in a synchronous save
blocked   until `save` returns, the time for which training waits
manifest  reading all files back and writing the manifest; part of "save"
verify    the check before a restore
restore   the restore itself
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
import rich.table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.config.recipes import load_config
from difftx.training.checkpoint import checkpointer as checkpoint
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.checkpoint.manifest import why_invalid
from difftx.training.state import TrainState

ARRAYS = 8  # Number of parameter arrays, and of arrays of each moment.
LOADER = {"examples": 0, "signature": {}}


def main() -> None:
    """Measure the times and print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one if not given")
    args = parser.parse_args()
    rows = round(args.gigabytes * 1e9 / (3 * ARRAYS * 4 * 1024))
    keys = iter(jax.random.split(jax.random.key(0), 3 * ARRAYS))
    trees = [{f"w{i}": jax.random.normal(next(keys), (rows, 1024)) for i in range(ARRAYS)} for _ in range(3)]
    config = load_config(str(Path(__file__).resolve().parent.parent / "configs" / "quickstart.py"), {})
    mesh = jax.make_mesh((1,), ("data",))
    wall: dict[str, list[float]] = {name: [] for name in ("save", "blocked", "manifest", "verify", "restore")}
    cpu: dict[str, list[float]] = {name: [] for name in wall}

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        began, cpu_began = time.perf_counter(), time.process_time()
        yield
        wall[name].append(time.perf_counter() - began)
        cpu[name].append(time.process_time() - cpu_began)

    write_manifest = checkpoint.write_manifest

    def timed_manifest(*arguments: Any) -> None:
        with timed("manifest"):
            write_manifest(*arguments)

    vars(checkpoint)["write_manifest"] = timed_manifest
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        writer = Checkpointer(Path(folder), config.checkpoint)
        for step in range(1, args.rounds + 2):  # The first step is a warm-up and not counted.
            state = TrainState(jnp.int32(step), trees[0], trees[1:])
            jax.block_until_ready(state)
            with timed("save"):
                with timed("blocked"):
                    writer.save(state, LOADER, config)
                writer.save_and_wait(state, LOADER, config)
            with timed("verify"):
                assert why_invalid(writer.folder / str(step), step=step, content=True) is None
            with timed("restore"):
                jax.block_until_ready(writer.restore(step, jax.eval_shape(lambda s=state: s), mesh))
        writer.close()

    table = rich.table.Table(
        title=f"{args.gigabytes:g} GB in {3 * ARRAYS} arrays; {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; "
        f"median (best … worst of {args.rounds})"
    )
    for name in ("", "wall seconds", "share", "CPU seconds", "share"):
        table.add_column(name, justify="right" if "seconds" in name else "left")

    def cells(kind: dict[str, list[float]], name: str) -> tuple[str, str]:
        medians = {other: statistics.median(values[1:]) for other, values in kind.items()}
        shares = {
            "blocked": f"{medians['blocked'] / medians['save']:.1%} of save",
            "manifest": f"{medians['manifest'] / (medians['save'] - medians['manifest']):.1%} of the rest of save",
            "verify": f"{medians['verify'] / medians['restore']:.1%} of restore",
        }
        spread = f"{medians[name]:.3f} ({min(kind[name][1:]):.3f} … {max(kind[name][1:]):.3f})"
        return spread, shares.get(name, "")

    for name in wall:
        table.add_row(name, *cells(wall, name), *cells(cpu, name))
    rich.console.Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
