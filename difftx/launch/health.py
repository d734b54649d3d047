"""Measure the speed of a machine: matrix products, memory, collectives, and the folder or bucket of a run."""

import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

from difftx.files import new_file
from difftx.kernels.measure import seconds_per_call
from difftx.storage import objects
from difftx.storage.paths import BucketPath
from difftx.storage.reading import BUFFER_BYTES

REPEATS = 5  # Report the fastest of these repeats, because other work on the machine only makes repeats slower.
FILE_BYTES = 64 * 2**20
SMALL_READS = 9  # Report the median time of this many small reads.


def fastest_seconds(call: Callable[[], Any]) -> float:
    """Call `call` once to compile it. Return the seconds of the fastest of `REPEATS` further calls."""
    jax.block_until_ready(call())
    return min(seconds_per_call(call, 1) for _ in range(REPEATS))


def matmul_flops(dtype: str, size: int) -> float:
    """Measure the FLOP/s of one device in a product of two square matrices with `size` rows."""
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    return 2 * size**3 / fastest_seconds(lambda: product(a))


def memory_bandwidth(count: int) -> float:
    """Measure the bytes/s that one device reads and writes while it adds 1 to `count` float32 numbers."""
    x = jnp.zeros(count, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / fastest_seconds(lambda: add(x))


def collective_bandwidths(mesh: jax.sharding.Mesh, count: int) -> dict[str, float]:
    """Measure the bytes/s that each device receives in an all-gather of `count` float32 numbers, by mesh axis.

    Axes of size 1 do not communicate and are left out.
    """
    found = {}
    for axis, size in mesh.shape.items():
        if size > 1:
            shard = count // size * size
            with jax.set_mesh(mesh):
                x = jax.device_put(jnp.zeros(shard, jnp.float32), jax.NamedSharding(mesh, P(axis)))
                gather = jax.jit(lambda x: jax.sharding.reshard(x, P()))
                found[axis] = x.nbytes * (size - 1) / size / fastest_seconds(lambda x=x, gather=gather: gather(x))
    return found


def file_speeds(folder: Path) -> dict[str, float]:
    """Measure the bytes/s at which a file in `folder` is written to disk and read back."""
    path, content = folder / f".difftx-doctor-{os.getpid()}", os.urandom(2**20)
    try:
        start = time.perf_counter()
        with new_file(path) as file:
            for _ in range(FILE_BYTES // len(content)):
                file.write(content)
        written = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            if sys.platform == "linux":  # Drop the page cache, to read from the disk.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(len(content)):
                pass
        return {"write": FILE_BYTES / (written - start), "read": FILE_BYTES / (time.perf_counter() - written)}
    finally:
        path.unlink(missing_ok=True)


def bucket_speeds(folder: BucketPath) -> dict[str, float]:
    """Measure the bytes/s at which an object in `folder` is written and read, and the seconds of a small read."""
    path = folder / f"{objects.PROBE}{uuid.uuid4().hex}"
    content = os.urandom(2**20) * (FILE_BYTES // 2**20)
    try:
        start = time.perf_counter()
        objects.write(path, content)
        written = time.perf_counter() - start
        times = []
        for _ in range(SMALL_READS):
            start = time.perf_counter()
            list(objects.read_ranges(path, [(0, 1024)]))
            times.append(time.perf_counter() - start)
        parts = [(at, min(at + BUFFER_BYTES, FILE_BYTES)) for at in range(0, FILE_BYTES, BUFFER_BYTES)]
        start = time.perf_counter()
        list(objects.read_ranges(path, parts))
        read = time.perf_counter() - start
        return {"write": FILE_BYTES / written, "read": FILE_BYTES / read, "latency_seconds": statistics.median(times)}
    finally:
        objects.delete([path])
