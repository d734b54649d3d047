"""Checkpoints that have only parameters. They are written and read one layer at a time, to limit the use of memory."""

import contextlib
import dataclasses
import functools
import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from difftx.config import Config
from difftx.parallel.heartbeat import report_progress
from difftx.storage.paths import AnyPath
from difftx.training.checkpoint.arrays import open_array, read_part
from difftx.training.checkpoint.manifest import WeightsPart, contents_of, manifest_text, write_manifest

DATA_FILE_BYTES = 2**28  # Size at which orbax writes a data file, which it collects in memory.
CACHE_BYTES = 2**31  # Size of the cache for chunks that have several layers, as training saves them.
STEP = 0  # Step of a checkpoint that difftx did not train.


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A float32 array whose blocks are produced while it is written."""

    shape: tuple[int, ...]
    rows: int  # Number of rows of a block, along the first axis.
    blocks: Callable[[], Iterable[np.ndarray]]  # Yields the blocks in order. The last one may be smaller.

    dtype = np.dtype(np.float32)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def save_params(workdir: Path, arrays: Mapping[str, Streamed], config: Config, data: dict[str, Any]) -> None:
    """Write parameters, keyed by names such as "blocks/mlp/up_DF", as the checkpoint of step 0 of a new run.

    `data` is the data signature for the manifest: {"tokenizer": fingerprint}.
    """
    folder = workdir.resolve() / "checkpoints" / str(STEP)
    folder.parent.mkdir(parents=True)
    unfinished = folder.with_name(f"{STEP}{ocp.step.TMP_DIR_SUFFIX}")
    weights = f"{uuid.uuid4().hex}/{STEP}"
    described = {f"params/{name}": (array.shape, str(array.dtype)) for name, array in arrays.items()}
    describe = functools.partial(manifest_text, STEP, weights, described, config, data, None)
    options = ocp.AsyncOptions(
        timeout_secs=24 * 3600, post_finalization_callback=lambda: write_manifest(unfinished, describe)
    )
    registry = ocp.type_handlers.create_type_handler_registry((Streamed, _StreamedHandler()))
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(type_handler_registry=registry), config=ocp.JsonCheckpointHandler()
    )
    tree = {"params": flax.traverse_util.unflatten_dict(dict(arrays), sep="/")}
    with contextlib.closing(ocp.AsyncCheckpointer(handler, async_options=options)) as writer:
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=DATA_FILE_BYTES),
            config=ocp.args.JsonSave(json.loads(config.to_json())),
        )
        writer.save(folder, args=args)
        writer.wait_until_finished()


class ParamsReader:
    """A reader of a checkpoint's parameters, or of their average, that loads one layer at a time."""

    def __init__(self, folder: AnyPath, part: WeightsPart = "params"):
        self._folder, self._part = contents_of(folder), part
        self._opened: dict[str, ts.TensorStore] = {}

    def read(self, name: str, index: int | slice) -> np.ndarray:
        """Return one layer of an array with all layers, or rows of another array, such as "embedding_VD"."""
        if name not in self._opened:
            store = open_array(self._folder, f"{self._part}/{name}", cache_bytes=0)
            chunk = store.chunk_layout.read_chunk.shape
            if chunk is not None and chunk[0] != 1:
                store = open_array(self._folder, f"{self._part}/{name}", cache_bytes=CACHE_BYTES)
            self._opened = {name: store}  # Frees the cache of the previous array.
        part = read_part(self._folder, self._opened[name], index)
        report_progress()  # A training may export its weights, which takes longer than a step.
        return part


class _StreamedHandler(ocp.type_handlers.NumpyHandler):
    """An orbax handler that writes `Streamed` arrays one after the other. Each block becomes one chunk on disk."""

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ocp.type_handlers.ParamInfo], args: Any = None
    ) -> Sequence[ocp.future.Future]:
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._write(values, infos), name="params")]

    async def _write(self, values: Sequence[Streamed], infos: Sequence[ocp.type_handlers.ParamInfo]) -> None:
        for array, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            spec = ocp.type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=True,
                global_shape=array.shape,
                local_shape=(array.rows, *array.shape[1:]),
                dtype=array.dtype,
                process_index=0,
            )
            # Pass the dtype explicitly, because orbax 0.12.3 omits it from the specification.
            store = await ts.open(ts.Spec(spec), dtype=array.dtype, create=True, open=True, context=info.ts_context)
            start = 0
            for block in array.blocks():
                await store[start : start + len(block)].write(block)
                start += len(block)
            assert start == array.shape[0], info.name
