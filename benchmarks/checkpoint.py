"""Time of saving, verifying and restoring a checkpoint, and the time for which a save blocks training.

python benchmarks/checkpoint.py [--gigabytes=1] [--rounds=5] [--folder=DIR]

Saves a train state of random float32 arrays repeatedly; a third of it is parameters. Prints a table of seconds and
processor seconds, as medians over rounds in one process:

save           until the checkpoint is on disk, as in a synchronous save: arrays, reading them back, manifest
blocked        until `save` returns, the time for which training waits
verify         the check before a restore
restore        the restore itself
orbax save     of the same arrays by orbax alone, which reads nothing back
orbax restore  of those arrays by orbax alone
"""

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import rich.table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.console_tables import console, median_and_range
from difftx.config.recipes import load_config
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.checkpoint.manifest import why_invalid
from difftx.training.checkpoint.restoring import restore_state
from difftx.training.state import TrainState

ARRAYS = 8  # Number of parameter arrays, and of arrays of each moment.
LOADER_STATE = {"examples": 0, "signature": {}}
MEASURED = ("save", "blocked", "verify", "restore", "orbax save", "orbax restore")

type Times = dict[str, list[float]]  # Name of a measurement → seconds of each round.


def main() -> None:
    """Measure the times and print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one if not given")
    args = parser.parse_args()
    wall, cpu = measure(args.gigabytes, args.rounds, args.folder)
    title = (
        f"{args.gigabytes:g} GB in {3 * ARRAYS} arrays; {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; "
        f"median (best … worst of {args.rounds})"
    )
    console(140).print(times_table(title, wall, cpu))


def measure(gigabytes: float, rounds: int, parent: Path | None) -> tuple[Times, Times]:
    """Return the wall times and the processor times of `rounds` rounds, after a round that is not counted.

    The checkpoints of `gigabytes` · 10⁹ bytes are in a temporary folder in `parent`.
    """
    rows = round(gigabytes * 1e9 / (3 * ARRAYS * 4 * 1024))  # A row of an array has 1,024 numbers of 4 bytes.
    keys = iter(jax.random.split(jax.random.key(0), 3 * ARRAYS))
    trees = [{f"w{i}": jax.random.normal(next(keys), (rows, 1024)) for i in range(ARRAYS)} for _ in range(3)]
    config = load_config(str(Path(__file__).resolve().parent.parent / "configs" / "quickstart.py"), {})
    mesh = jax.make_mesh((1,), ("data",))
    wall: Times = {name: [] for name in MEASURED}
    cpu: Times = {name: [] for name in MEASURED}

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        began, cpu_began = time.perf_counter(), time.process_time()
        yield
        wall[name].append(time.perf_counter() - began)
        cpu[name].append(time.process_time() - cpu_began)

    with tempfile.TemporaryDirectory(dir=parent) as folder, ocp.StandardCheckpointer() as plain:
        writer = Checkpointer(Path(folder), config.checkpoint)
        for step in range(1, rounds + 2):
            state = TrainState(jnp.int32(step), trees[0], trees[1:])
            jax.block_until_ready(state)
            with timed("save"):
                with timed("blocked"):
                    writer.save(state, LOADER_STATE, config)
                writer.save_and_wait(state, LOADER_STATE, config)
            with timed("verify"):
                assert why_invalid(writer.folder / str(step), step=step, content=True) is None
            with timed("restore"):
                jax.block_until_ready(restore_state(writer.read(step), jax.eval_shape(lambda s=state: s), mesh))
            with timed("orbax save"):
                plain.save(path := Path(folder) / "orbax" / str(step), state.parts())
                plain.wait_until_finished()
            with timed("orbax restore"):
                jax.block_until_ready(plain.restore(path, jax.eval_shape(lambda s=state: s.parts())))
            shutil.rmtree(path)
        writer.close()
    return {name: wall[name][1:] for name in MEASURED}, {name: cpu[name][1:] for name in MEASURED}


def times_table(title: str, wall: Times, cpu: Times) -> rich.table.Table:
    """Return a table with a row for each measurement: medians, extremes and shares."""
    table = rich.table.Table(title=title)
    for name in ("", "wall seconds", "share", "CPU seconds", "share"):
        table.add_column(name, justify="right" if "seconds" in name else "left")
    for name in MEASURED:
        table.add_row(name, *_cells(wall, name), *_cells(cpu, name))
    return table


def _cells(times: Times, name: str) -> tuple[str, str]:
    """Return the seconds of a measurement, and their share of those of another measurement, as text."""
    medians = {other: statistics.median(values) for other, values in times.items()}
    shares = {
        "blocked": f"{medians['blocked'] / medians['save']:.1%} of save",
        "verify": f"{medians['verify'] / medians['restore']:.1%} of restore",
        "orbax save": f"{medians['orbax save'] / medians['save']:.1%} of save",
        "orbax restore": f"{medians['orbax restore'] / medians['restore']:.1%} of restore",
    }
    return median_and_range(times[name], ".3f"), shares.get(name, "")


if __name__ == "__main__":
    main()
