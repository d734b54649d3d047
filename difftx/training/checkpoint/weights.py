"""Checkpoints that only have parameters. They are written and read one layer at a time to save memory."""

import dataclasses
import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from difftx.config import Config
from difftx.files import write_atomically
from difftx.model.lora import LORA, product_subscripts
from difftx.parallel.heartbeat import report_progress
from difftx.training.checkpoint.arrays import STATE, Shards, open_array, read_part, write_shards
from difftx.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    WeightsPart,
    adapters_of,
    describe_files,
    manifest_text,
    read_manifest,
)

CACHE_BYTES = 2**31  # Cache for chunks that contain several layers, as training saves them.
STEP = 0  # Step of an imported checkpoint.


@dataclasses.dataclass(frozen=True)
class Streamed:
    """An array, usually float32, that is read in blocks of rows while it is written."""

    shape: tuple[int, ...]
    rows: int  # Number of rows per block. The last block may be smaller.
    read: Callable[[slice], np.ndarray]  # Returns the given rows.
    dtype: np.dtype = np.dtype(np.float32)  # noqa: RUF009 (immutable)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def parts(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Read the array block by block. Yield the row range and the values of each block."""
        for start in range(0, self.shape[0], self.rows):
            rows = slice(start, min(start + self.rows, self.shape[0]))
            yield rows, self.read(rows)


def save_params(workdir: Path, arrays: Mapping[str, Streamed], config: Config, data: dict[str, Any]) -> Manifest:
    """Write parameters as the checkpoint of step 0 of a new run, and return its manifest.

    The keys of `arrays` are names such as "blocks/mlp/up_DF". `data` is the data signature for the manifest:
    {"tokenizer": fingerprint}.
    """
    folder, contents = workdir / "checkpoints" / str(STEP), uuid.uuid4().hex
    streamed = {f"params/{name}": array for name, array in arrays.items()}
    write_shards(
        folder / contents / STATE,
        {n: Shards(a.shape, (a.rows, *a.shape[1:]), a.dtype, a.parts()) for n, a in streamed.items()},
    )
    described = {name: (array.shape, str(array.dtype)) for name, array in streamed.items()}
    text = manifest_text(
        describe_files(folder / contents),
        step=STEP,
        weights=f"{contents}/{STEP}",
        run_id=None,
        arrays=described,
        config=config,
        loader={"signature": data},
        contents=contents,
    )
    write_atomically(folder / MANIFEST, text)
    return read_manifest(folder)


class ParamsReader:
    """A reader that loads a checkpoint's parameters, or their average, one layer at a time."""

    def __init__(self, checkpoint: Manifest, part: WeightsPart = "params"):
        self._folder, self._part = checkpoint.contents, part
        self._opened: dict[str, ts.TensorStore] = {}
        self._names, self._alpha = checkpoint.arrays.keys(), adapters_of(checkpoint, part)["lora_alpha"]
        self._adapter: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def read(self, name: str, index: int | slice) -> np.ndarray:
        """Return one layer of a stacked array, or rows of another array such as "embedding_VD".

        If the array has an adapter, merge it into the result.
        """
        path = f"{LORA}/{name}"
        if f"{self._part}/{path}/a" not in self._names:
            return self.stored(name, index)
        if name not in self._adapter:
            a, b = (self.stored(f"{path}/{each}", slice(None)) for each in ("a", "b"))
            self._adapter = {name: (a, b)}
        weight, (a, b) = self.stored(name, index), (each[index] for each in self._adapter[name])
        return weight + np.float32(self._alpha / a.shape[-1]) * np.einsum(product_subscripts(weight, a, b), a, b)

    def stored(self, name: str, index: int | slice) -> np.ndarray:
        """Return a part of an array like `read`, but without its adapter."""
        if name not in self._opened:
            store = open_array(self._folder, f"{self._part}/{name}", cache_bytes=0)
            chunk = store.chunk_layout.read_chunk.shape
            if chunk is not None and chunk[0] != 1:
                store = open_array(self._folder, f"{self._part}/{name}", cache_bytes=CACHE_BYTES)
            self._opened = {name: store}  # Drop the previous array to free its cache.
        part = read_part(self._folder, self._opened[name], index)
        report_progress()  # A training run may export its weights, which takes longer than a step. Reset the watchdog.
        return part
