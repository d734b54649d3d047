"""Requests and times of runs in buckets, on the emulators of the tests.

python benchmarks/buckets.py [--megabytes=128] [--rounds=5]

Requires the extras gcs, s3 and buckets-test. The emulators and the proxy in front of them run on this machine, so the
numbers of requests are those of a real store, but the times are not. The script prints two tables for each kind of
store:

- requests: the number of each kind, for a push of small files, a save, a restore, a verification and a tiny run;
- throughput: the speed of saves and restores, next to copies of a file of the same size to the same emulator.
"""

import argparse
import contextlib
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # Sets the variables of the tests' environment, before the import of JAX.
import jax
import jax.numpy as jnp
import rich.table
from helpers import buckets
from helpers.bucket_runs import command
from helpers.command_server import commands

from benchmarks.console_tables import console, numbers_table
from difftx.config import Config
from difftx.config.recipes import load_config
from difftx.run_files import small_files
from difftx.storage import objects
from difftx.storage.paths import AnyPath
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.checkpoint.manifest import why_invalid
from difftx.training.checkpoint.restoring import restore_state
from difftx.training.metrics import MetricsWriter
from difftx.training.state import TrainState

REQUEST_KINDS = ("read", "describe", "list", "write", "delete")
LOADER_STATE = {"examples": 0, "signature": {}}
ARRAYS = 24  # Number of arrays of a train state. One third are parameters, and the others are Adam's moments.

type Count = Callable[[str, Callable[[], Any]], None]  # Runs an operation, and adds a row with its name and requests.


def main() -> None:
    """Measure both stores and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128, help="MiB of a train state (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        text = conftest.write_text(Path(folder, "text.txt"))
        for scheme in buckets.MODULES:
            bucket = buckets.start(scheme, stack)
            requests = requests_table(bucket, text)
            seconds = measure_throughput(bucket, args.megabytes, args.rounds)
            console(120).print(requests, throughput_table(bucket.scheme, args.megabytes, seconds))


def state_of(size: int, step: int) -> TrainState:
    """Return a train state of `size` bytes of random arrays, a third of which are parameters."""
    keys = jax.random.split(jax.random.key(step), ARRAYS)
    rows = max(1, size // ARRAYS // 4096)  # A row of 1,024 float32 numbers has 4,096 bytes.
    arrays = [jax.random.normal(key, (rows, 1024)) for key in keys]
    third = ARRAYS // 3
    trees = [{f"w{i}": x for i, x in enumerate(arrays[n * third : (n + 1) * third])} for n in range(3)]
    return jax.block_until_ready(TrainState(jnp.int32(step), trees[0], trees[1:]))


def save(saver: Checkpointer, state: TrainState, config: Config) -> None:
    """Save a checkpoint, and wait until it is in the bucket."""
    saver.save(state, LOADER_STATE, config)
    saver.wait()


def requests_table(bucket: buckets.Bucket, text: Path) -> rich.table.Table:
    """Return a table with the number of requests of each operation, by kind."""
    columns = ("operation", *REQUEST_KINDS, "all")
    table = numbers_table(f"requests to {bucket.scheme}://", columns, title_justify="left")

    def count(name: str, run: Callable[[], Any]) -> None:
        bucket.plan()  # Sets the counters to zero.
        run()
        counts = bucket.plan()["requests"]
        table.add_row(name, *(str(counts.get(kind, 0)) for kind in REQUEST_KINDS), str(sum(counts.values())))

    workdir, config = bucket.folder(), load_config("quickstart:diff", {})
    _count_metrics(workdir, config, count)
    _count_checkpoints(workdir, config, count)
    _count_commands(bucket.folder(), text, count)
    return table


def _count_metrics(workdir: AnyPath, config: Config, count: Count) -> None:
    """Count the requests of pushes of metrics.jsonl and of events of TensorBoard."""
    with small_files(workdir) as owner:
        writer = MetricsWriter(owner.folder, config.logging, 0)
        for name in ("the first push of metrics.jsonl and TensorBoard's events", "a push after a row"):
            writer.write("train", 1, {"loss": 1.0})
            count(name, owner.push)
        count("a push without changes", owner.push)


def _count_checkpoints(workdir: AnyPath, config: Config, count: Count) -> None:
    """Count the requests of saves, verifications and restores of a train state of 1 MiB."""
    mesh = jax.make_mesh((1,), ("data",))
    saver = Checkpointer(workdir, config.checkpoint)
    count("look for a checkpoint, there is none", saver.newest)
    for step in range(10, 50, 10):  # The last save deletes a checkpoint: checkpoint.keep is 3.
        state = state_of(2**20, step)
        name = {10: "the first save", 40: "a save, and the removal of a checkpoint"}.get(step, "a save")
        count(name, functools.partial(save, saver, state, config))
    abstract = jax.eval_shape(lambda: state)
    count("verify sizes", lambda: why_invalid(saver.folder / "40", step=40, content=False))
    count("verify checksums", lambda: why_invalid(saver.folder / "40", step=40, content=True))
    count("restore", lambda: restore_state(saver.read(40), abstract, mesh))
    count("look for the newest checkpoint of 3", Checkpointer(workdir, config.checkpoint).newest)


def _count_commands(workdir: AnyPath, text: Path, count: Count) -> None:
    """Count the requests of `difftx train` on a text, and of the same command when it resumes."""

    def train(**changes: object) -> None:
        done = commands().run(command(text, workdir, logging__trackers=(), eval__every_steps=1000, **changes))
        assert done.returncode == 0, done.stdout + done.stderr

    count("difftx train, 4 steps, 4 rows, 1 save", lambda: train(train__steps=4))
    count("resume, 4 steps, 4 rows, 1 save", lambda: train(train__steps=8))
    count("resume, 8 steps, 8 rows, 2 saves", lambda: train(train__steps=16))
    count("resume, 40 steps, 40 rows, 1 save", lambda: train(train__steps=56, checkpoint__every_steps=56))


def measure_throughput(bucket: buckets.Bucket, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Return operation → seconds of each round, for saves, restores and copies of `megabytes` MiB in turn.

    The proxy in front of the emulator injects no faults.
    """
    workdir, config, mesh = bucket.folder(), load_config("quickstart:diff", {}), jax.make_mesh((1,), ("data",))
    saver, size = Checkpointer(workdir, config.checkpoint), megabytes * 2**20
    seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        for step in range(rounds + 1):
            state = state_of(size, step)
            source.write_bytes(b"".join(x.tobytes() for x in jax.device_get(jax.tree.leaves(state))))
            with timed("upload of a file"):
                objects.upload(workdir / "copy", str(source))
            with timed("save"):
                with timed("save, training waits"):
                    saver.save(state, LOADER_STATE, config)
                saver.wait()
            with timed("verify"):
                assert why_invalid(saver.folder / str(step), step=step, content=True) is None
            with timed("download of a file"):
                objects.download(workdir / "copy", str(target))
            with timed("restore"):
                jax.block_until_ready(restore_state(saver.read(step), jax.eval_shape(lambda s=state: s), mesh))
    return {name: of_rounds[1:] for name, of_rounds in seconds.items()}  # The first round is a warm-up.


def throughput_table(scheme: str, megabytes: int, seconds: Mapping[str, Sequence[float]]) -> rich.table.Table:
    """Return a table of what `measure_throughput` measured: median and range of the seconds, and MiB per second."""
    rounds = len(next(iter(seconds.values())))
    columns = ("operation", "seconds", "best … worst", "MiB/s")
    table = numbers_table(f"{megabytes} MiB to {scheme}://, median of {rounds}", columns, title_justify="left")
    for name, of_rounds in seconds.items():
        median = statistics.median(of_rounds)
        extremes = f"{min(of_rounds):.2f} … {max(of_rounds):.2f}"
        table.add_row(name, f"{median:.2f}", extremes, f"{megabytes / median:,.0f}")
    return table


if __name__ == "__main__":
    main()
