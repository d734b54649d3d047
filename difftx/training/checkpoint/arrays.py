"""Read and write the arrays of checkpoints in orbax's format: an OCDBT database with one zarr array per name.

On disks, orbax saves and restores the arrays. In buckets, this module calls TensorStore, which orbax uses too
(docs/design.md, section 12). For `convert`, it also writes and reads single rows, which orbax cannot do. Each process
writes its own database, and the primary process merges them.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import EllipsisType
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from orbax.checkpoint.type_handlers import ArrayHandler, ArrayRestoreArgs, ParamInfo, SaveArgs

from difftx.storage import objects
from difftx.storage.paths import AnyPath, is_bucket
from difftx.training.checkpoint.manifest import array_name

STATE = "state"  # Name of the folder with the arrays, below the folder of a save.
ZARR_METADATA = ".zarray"
CHUNK_BYTES = 2**25  # Split shards larger than this into several chunks.
DATA_FILE_BYTES = 2**28  # Start a new data file after this size.
TRANSACTION_BYTES = 2**30  # Commit a transaction after this size. Its arrays are held in memory, compressed.
CACHE_BYTES = 2**30  # Cache for chunks that several devices of one process read.
# Database settings, the same as orbax's: small values are stored inline, next to their keys, and there is one manifest.
OCDBT_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 10**8, "manifest_kind": "single"}
# Merge reads that are less than 1 MB apart into one request.
COALESCED = {
    "experimental_read_coalescing_threshold_bytes": 10**6,
    "experimental_read_coalescing_merged_bytes": 5 * 10**11,
    "experimental_read_coalescing_interval": "1ms",
}


# Mute orbax's log: it prints a traceback for each error before it raises the error.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


@dataclasses.dataclass(frozen=True)
class Shards:
    """The parts of one array that this process writes."""

    shape: tuple[int, ...]  # Shape of the whole array.
    chunk: tuple[int, ...]  # Shape of one stored chunk.
    dtype: np.dtype
    parts: Iterable[tuple[Any, np.ndarray]]  # Index in the whole array, and values. Can be iterated only once.


def start_write(folder: AnyPath, tree: Any) -> Callable[[], None]:
    """Copy this process's shards to the host. The returned function waits until they are written to `folder`."""
    if is_bucket(folder):
        return functools.partial(write_shards, folder / own_part(folder), copy_shards(tree))
    infos = _infos(folder, tree)
    arguments = [SaveArgs(chunk_byte_size=CHUNK_BYTES) for _ in infos]
    with objects.one_line_errors(folder, "written"):
        futures = _run(_handler().serialize(jax.tree.leaves(tree), infos, arguments))

    def wait() -> None:
        with objects.one_line_errors(folder, "written"):
            for future in futures:
                future.result()

    return wait


def _handler() -> ArrayHandler:
    return ArrayHandler(enable_write_sharding_file=False)


def _infos(folder: AnyPath, tree: Any) -> list[ParamInfo]:
    """Return the parameters with which orbax finds each array of `tree` in a checkpoint.

    They have no `byte_limiter`, so orbax writes all arrays in one transaction, which fails as a whole. With a limiter,
    orbax closes its event loop after the first error, and the remaining writes end with tracebacks.
    """
    _, context = _base(folder / STATE)
    state = epath.Path(folder.resolve() / STATE)
    names = [array_name(path).replace("/", ".") for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [ParamInfo(name=n, parent_dir=state, is_ocdbt_checkpoint=True, ts_context=context) for n in names]


def _run[T](requests: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and all its tasks to the end, and return its result. The thread must have no event loop."""

    async def wait() -> T:
        try:
            return await requests
        except Exception as error:  # orbax wraps TensorStore's error to add the index. Raise the original one.
            raise (error.__cause__ or error) from None
        finally:
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.gather(*tasks, return_exceptions=True)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, wait()).result()


def copy_shards(tree: Any) -> dict[str, Shards]:
    """Copy the shards of each array to host memory, and return them by array name.

    If several devices hold replicas of a shard, only one of them writes it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    written = {array_name(path): [s for s in leaf.addressable_shards if s.replica_id == 0] for path, leaf in leaves}
    for shards in written.values():
        for shard in shards:
            shard.data.copy_to_host_async()
    by_name = {}
    for path, leaf in leaves:
        name = array_name(path)
        # On a CPU, force a copy, because the next step may reuse the array's memory.
        copies = [
            (shard.index, np.array(shard.data, copy=True if shard.device.platform == "cpu" else None))
            for shard in written[name]
        ]
        chunk = _chunk(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize)
        by_name[name] = Shards(leaf.shape, chunk, leaf.dtype, copies)
    return by_name


def write_shards(folder: AnyPath, arrays: Mapping[str, Shards]) -> None:
    """Write this process's shards to the database in `folder`, in transactions of about `TRANSACTION_BYTES`."""
    with objects.one_line_errors(folder, "written"):
        base, context = _base(folder)
        database = ts.KvStore.open(_database(base, writes=True), context=context).result()
        transaction, copies, size = ts.Transaction(atomic=True), [], 0
        for name, array in arrays.items():
            metadata = _zarr_metadata(array)
            database.with_transaction(transaction)[f"{_zarr_folder(name)}{ZARR_METADATA}"] = json.dumps(metadata)
            # With `assume_metadata`, TensorStore does not request the array's metadata, which is not stored yet.
            spec = _array(_database(base, writes=True), name) | {"metadata": metadata, "assume_metadata": True}
            spec |= {"store_data_equal_to_fill_value": True}
            store = ts.open(spec, open=True, context=context, transaction=transaction).result()
            for index, values in array.parts:
                copies.append(store[index].write(values, can_reference_source_data_indefinitely=True).copy)
                size += values.nbytes
                if size > TRANSACTION_BYTES:
                    _commit(transaction, copies)
                    transaction, copies, size = ts.Transaction(atomic=True), [], 0
                    store = store.with_transaction(None).with_transaction(transaction)
        _commit(transaction, copies)


def _commit(transaction: ts.Transaction, copies: Iterable[ts.Future[None]]) -> None:
    for copied in copies:  # Raise the error of a failed write.
        copied.result()
    transaction.commit_async().result()


def merge(folder: AnyPath) -> None:
    """Merge the databases of all processes into one. The data files are not moved."""
    if own_part(folder) == STATE:
        return
    with objects.one_line_errors(folder, "written"):
        base, context = _base(folder / STATE)
        merged = ts.KvStore.open(_database(base, writes=True), context=context).result()
        transaction = ts.Transaction(atomic=True)
        for process in range(jax.process_count()):
            part, _ = _base(folder / _part(folder, process))
            source = ts.KvStore.open(_database(part), context=context).result()
            source.experimental_copy_range_to(merged.with_transaction(transaction)).result()
        transaction.commit_async().result()


def restore(folder: AnyPath, wanted: Any) -> Any:
    """Read a checkpoint's arrays with the structure and shardings of the abstract tree `wanted`.

    The caller must have compared `wanted` with the manifest. Each process reads only the shards of its own devices.
    """
    with objects.one_line_errors(folder, "read"):
        if is_bucket(folder):
            found = _restore_from_bucket(folder, wanted)
        else:
            leaves = jax.tree.leaves(wanted)
            arguments = [ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape) for leaf in leaves]
            found = _run(_handler().deserialize(_infos(folder, wanted), arguments))
    return jax.tree.unflatten(jax.tree.structure(wanted), found)


def _restore_from_bucket(folder: AnyPath, wanted: Any) -> list[jax.Array]:
    base, context = _base(folder / STATE)
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    opened = [ts.open(_readable(base, array_name(path)), open=True, context=context) for path, _ in leaves]
    reads = []
    for (_, leaf), future in zip(leaves, opened, strict=True):
        store = future.result()
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        reads.append({index: store[index].read() for index in dict.fromkeys(indices)})
    return [
        jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index, shards=shards: shards[index].result())
        for (_, leaf), shards in zip(leaves, reads, strict=True)
    ]


def open_array(folder: AnyPath, name: str, *, cache_bytes: int = 0) -> ts.TensorStore:
    """Open one array of a checkpoint. Its values are read on demand."""
    with objects.one_line_errors(folder, "read"):
        base, context = _base(folder / STATE, cache_bytes)
        return ts.open(_readable(base, name), open=True, context=context).result()


def read_part(folder: AnyPath, opened: ts.TensorStore, index: int | slice | EllipsisType = ...) -> np.ndarray:
    """Read a part of an array that `open_array` has opened."""
    with objects.one_line_errors(folder, "read"):
        return opened[index].read().result()


def _base(folder: AnyPath, cache_bytes: int = CACHE_BYTES) -> tuple[dict[str, Any], ts.Context]:
    """Return the TensorStore spec of the storage under the database, and the context for all requests."""
    pools = {"cache_pool": {"total_bytes_limit": cache_bytes}, "cache_pool#ocdbt": {"total_bytes_limit": 10**8}}
    if is_bucket(folder):
        spec, context = objects.tensorstore_spec(folder)
        return spec, ts.Context(context | pools)
    return {"driver": "file", "path": f"{folder.resolve()}/"}, ts.Context(pools)


def _database(base: dict[str, Any], *, writes: bool = False) -> dict[str, Any]:
    spec = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"}
    if not writes:
        return spec if base["driver"] == "file" else spec | COALESCED
    # Every save has a new folder, so `assume_config` saves the request that looks for an existing database.
    return spec | {"config": OCDBT_CONFIG, "assume_config": True, "target_data_file_size": DATA_FILE_BYTES}


def _readable(base: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the spec for reading an array. A missing chunk is an error: it does not read as zeros."""
    return _array(_database(base), name) | {"fill_missing_data_reads": False}


def _array(database: dict[str, Any], name: str) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": database | {"path": _zarr_folder(name)}}


def _zarr_folder(name: str) -> str:
    return f"{name.replace('/', '.')}/"


def _zarr_metadata(array: Shards) -> dict[str, Any]:
    """Return the content of an array's `.zarray` file (zarr storage specification, version 2)."""
    dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str  # For example "bfloat16" or "<f4".
    return {
        "zarr_format": 2,
        "shape": array.shape,
        "chunks": array.chunk,
        "dtype": dtype,
        "compressor": {"id": "zstd", "level": 1},
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }


def own_part(folder: AnyPath) -> str:
    """Return the path of the database that this process writes, relative to the folder of the save."""
    return _part(folder, jax.process_index())


def _part(folder: AnyPath, process: int) -> str:
    """Return the path of the database that `process` writes.

    A single process in a bucket writes the final database, so no merge is needed.
    """
    return STATE if is_bucket(folder) and jax.process_count() == 1 else f"{STATE}/ocdbt.process_{process}"


def _chunk(shard: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Return the shape of chunks of at most `CHUNK_BYTES` that tile a shard."""
    chunk = [max(1, size) for size in shard]
    for axis, size in enumerate(shard):
        parts = math.ceil(math.prod(chunk) * item_bytes / CHUNK_BYTES)
        chunk[axis] = next((size // n for n in range(parts, size) if size % n == 0), 1) if parts > 1 else chunk[axis]
    return tuple(chunk)
