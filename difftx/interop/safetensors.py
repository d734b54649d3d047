"""Reading of safetensors files by rows, and writing by tensor (https://huggingface.co/docs/safetensors).

The `safetensors` library can write only tensors that are in memory, and its error for a truncated file names no tensor.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from difftx.errors import UserError
from difftx.files import open_file, write_atomically
from difftx.json_files import read_json, schema_error
from difftx.training.checkpoint.weights import Streamed

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Dtypes whose values float32 represents exactly.
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
MAX_HEADER_BYTES = 100_000_000  # Maximum size of a header, as in the `safetensors` library.


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The location of a tensor in a file."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # Position in the file of the tensor's first byte.

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def read(self, rows: slice = slice(None)) -> np.ndarray:
        """Return the tensor, or some rows of its first axis, as float32. Raise `UserError` for NaN or infinity."""
        start, stop, _ = rows.indices(self.shape[0])
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        raw = np.fromfile(self.file, np.uint8, (stop - start) * width, offset=self.offset + start * width)
        if len(raw) < (stop - start) * width:
            raise UserError(f"{self.file} was truncated while it was read: {self.name} is incomplete")
        values = raw.view(self.dtype).reshape(stop - start, *self.shape[1:]).astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise UserError(f"{self.file}: {self.name} has values that are not finite; use another checkpoint")
        return values


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Return a model folder's tensors by name, from `model.safetensors` or from the files that its index lists."""
    if not (folder / INDEX).is_file():
        if (folder / FILE).is_file():
            return _read_header(folder / FILE)
        others = [path.name for path in sorted(folder.glob("*")) if path.suffix in (".bin", ".pt", ".pth")]
        hint = f"; convert {others[0]} to safetensors first" if others else ""
        raise UserError(f"{folder} has neither {FILE} nor {INDEX}{hint}")
    index = read_json(folder / INDEX)
    if why := schema_error(index, {"weight_map": {str: str}}):
        raise UserError(f"{folder / INDEX}: {why}")
    tensors: dict[str, Tensor] = {}
    files: dict[str, str] = index["weight_map"]
    for name, file in sorted(files.items(), key=lambda entry: entry[1]):
        if Path(file).name != file:
            raise UserError(f"{folder / INDEX}: {name} is in {file!r}, which is not a file of this folder")
        if not (folder / file).is_file():
            raise UserError(f"{folder / file} is missing; {INDEX} says that it contains {name}")
    for file in sorted(set(files.values())):
        tensors |= _read_header(folder / file)
    for name, file in files.items():
        if name not in tensors or tensors[name].file.name != file:
            raise UserError(f"{folder / file} does not contain {name}, though {INDEX} says that it does")
    return tensors


def _read_header(file: Path) -> dict[str, Tensor]:
    size = file.stat().st_size
    with open_file(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if 8 + length <= size and length <= MAX_HEADER_BYTES else b""
    try:
        header: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a safetensors file, or its header is truncated") from error
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    if why := schema_error(header, {str: {"dtype": str, "shape": [int], "data_offsets": [int]}}):
        raise UserError(f"{file}: header: {why}")
    tensors = {name: _tensor(file, size, 8 + length, name, entry) for name, entry in header.items()}
    _check_tiling(file, size, 8 + length, tensors.values())
    return tensors


def _check_tiling(file: Path, size: int, data: int, tensors: Iterable[Tensor]) -> None:
    """Raise `UserError` unless the tensors follow each other without overlap or gap, up to the end of the file."""
    end, before = data, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.end)):
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise UserError(f"{file}: {tensor.name} {what} {before}: it begins at byte {tensor.offset}, not {end}")
        end, before = tensor.end, tensor.name
    if end != size:
        raise UserError(f"{file}: {size - end} bytes after {before}, the last tensor, belong to no tensor")


def _tensor(file: Path, size: int, data: int, name: str, entry: Mapping[str, Any]) -> Tensor:
    if entry["dtype"] not in DTYPES:
        raise UserError(f"{file}: {name} has dtype {entry['dtype']}; only {', '.join(DTYPES)} can be converted")
    dtype, shape, offsets = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise UserError(f"{file}: {name}: the size of {entry['dtype']} {shape} is not that of the bytes {offsets}")
    if data + offsets[1] > size:
        raise UserError(f"{file} is truncated: {name} ends at byte {data + offsets[1]}, but the file has {size}")
    return Tensor(name, file, dtype, shape, data + offsets[0])


def write_folder(folder: Path, tensors: Mapping[str, Streamed], shard_bytes: int) -> list[str]:
    """Write tensors as float32 to one file or, above `shard_bytes`, to several with an index. Return the file names."""
    shards: list[dict[str, Streamed]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and 4 * tensor.size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= 4 * tensor.size
    count = len(shards)
    files = [FILE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for file, shard in zip(files, shards, strict=True):
        _write_file(folder / file, shard)
    if count > 1:
        total = sum(4 * tensor.size for tensor in tensors.values())
        file_of = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2)
        write_atomically(folder / INDEX, text + "\n")
    return files


def _write_file(path: Path, tensors: Mapping[str, Streamed]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires this entry.
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (end, end + 4 * tensor.size)}
        end += 4 * tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Aligns the tensors to 8 bytes.
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            for block in tensor.blocks():
                file.write(np.ascontiguousarray(block, DTYPES["F32"]).data)
            assert file.tell() == 8 + len(text) + header[name]["data_offsets"][1], name
