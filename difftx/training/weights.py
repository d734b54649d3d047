"""Checkpoints of parameters alone, written and read a layer at a time: what converts weights never holds them all.

The folder is one that `restore_params` reads; there is no optimizer's state in it, and no place in the data.
"""

import contextlib
import dataclasses
import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from difftx.config import Config
from difftx.training.manifest import write_manifest

type_handlers = ocp.type_handlers

DATA_FILE_BYTES = 2**28  # Of orbax's files, which are collected in memory, and of the chunks that are read at once.
CACHE_BYTES = 2**31  # Of decoded chunks, where these hold several layers, as those of a training do.
SAVE_SECONDS = 24 * 3600
STEP = 0  # Of a checkpoint that was not trained here.


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A float32 array that is made while it is written."""

    shape: tuple[int, ...]
    rows: int  # Of a block, along the first axis.
    blocks: Callable[[], Iterable[np.ndarray]]  # One after the other; the last may have fewer rows.

    @property
    def dtype(self) -> np.dtype:
        """float32."""
        return np.dtype(np.float32)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def save_params(workdir: Path, arrays: Mapping[str, Streamed], config: Config, data: dict[str, Any]) -> None:
    """Write the checkpoint of step 0 of a run.

    Args:
        workdir: of the run.
        arrays: by name, such as "blocks/mlp/up_DF".
        config: of the run.
        data: what the manifest says of it: {"tokenizer": fingerprint}.
    """
    folder = workdir.resolve() / "checkpoints" / str(STEP)
    folder.parent.mkdir(parents=True)
    unfinished = folder.with_name(f"{STEP}{ocp.step.TMP_DIR_SUFFIX}")
    weights = f"{uuid.uuid4().hex}/{STEP}"
    described = {f"params/{name}": (array.shape, str(array.dtype)) for name, array in arrays.items()}
    options = ocp.AsyncOptions(
        timeout_secs=SAVE_SECONDS,
        post_finalization_callback=lambda: write_manifest(unfinished, STEP, weights, described, config, data),
    )
    registry = type_handlers.create_type_handler_registry((Streamed, _StreamedHandler()))
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(type_handler_registry=registry), config=ocp.JsonCheckpointHandler()
    )
    tree = {"params": _nested(arrays)}
    with contextlib.closing(ocp.AsyncCheckpointer(handler, async_options=options)) as writer:
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=DATA_FILE_BYTES),
            config=ocp.args.JsonSave(json.loads(config.to_json())),
        )
        writer.save(folder, args=args)
        writer.wait_until_finished()


class ParamsReader:
    """The parameters of a checkpoint, by layers."""

    def __init__(self, folder: Path):
        self._state = epath.Path(folder.resolve() / "state")
        self._opened: dict[str, ts.TensorStore] = {}

    def read(self, name: str, index: int | slice) -> np.ndarray:
        """Return a layer of a stacked array, or rows of another, such as "embedding_VD"."""
        if name not in self._opened:
            store = self._open(name, cache_bytes=0)
            chunk = store.chunk_layout.read_chunk.shape
            if chunk is not None and chunk[0] != 1:
                store = self._open(name, cache_bytes=CACHE_BYTES)
            self._opened = {name: store}  # And the cache of the last one goes.
        return self._opened[name][index].read().result()

    def _open(self, name: str, *, cache_bytes: int) -> ts.TensorStore:
        limits = {"cache_pool": cache_bytes, "cache_pool#ocdbt": 10**8}
        context = ts.Context({pool: {"total_bytes_limit": size} for pool, size in limits.items()})
        info = type_handlers.ParamInfo(
            name=f"params.{name.replace('/', '.')}",
            parent_dir=self._state,
            is_ocdbt_checkpoint=True,
            ts_context=context,
        )
        spec = type_handlers.get_json_tspec_read(info, use_ocdbt=True)
        return ts.open(ts.Spec(spec), open=True, context=context).result()


class _StreamedHandler(type_handlers.NumpyHandler):
    """How orbax writes `Streamed`: one array after the other, a block at a time, each block a chunk of the file's."""

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[type_handlers.ParamInfo], args: Any = None
    ) -> Sequence[ocp.future.Future]:
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._write(values, infos), name="params")]

    async def _write(self, values: Sequence[Streamed], infos: Sequence[type_handlers.ParamInfo]) -> None:
        for array, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            spec = type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=True,
                global_shape=array.shape,
                local_shape=(array.rows, *array.shape[1:]),
                dtype=array.dtype,
                process_index=0,
            )
            # With the dtype again: orbax 0.12.3 leaves it out of the specification.
            store = await ts.open(ts.Spec(spec), dtype=array.dtype, create=True, open=True, context=info.ts_context)
            start = 0
            for block in array.blocks():
                await store[start : start + len(block)].write(block)
                start += len(block)
            assert start == array.shape[0], info.name


def _nested(arrays: Mapping[str, Streamed]) -> dict[str, Any]:
    """Turn {"a/b": x} into {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = array
    return tree
