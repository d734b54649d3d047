"""Read safetensors files by rows, and write them tensor by tensor (https://huggingface.co/docs/safetensors).

The writer streams tensors. The `safetensors` library can write only tensors that are all in memory.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (registers bfloat16 with numpy)
import numpy as np
from safetensors import SafetensorError, safe_open

from difftx.errors import UserError
from difftx.files import write_atomically
from difftx.json_files import read_json, schema_error
from difftx.training.checkpoint.weights import Streamed

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")  # float32 represents all values of these dtypes exactly.
_NAMES = {"float32": "F32", "int32": "I32", "int64": "I64"}  # Dtypes that difftx writes → name in the file.


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a safetensors file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    values: Any  # Memory-mapped: indexing with rows reads only these rows.

    def read(self, rows: slice = slice(None)) -> np.ndarray:
        """Return the tensor, or some rows of its first axis, as float32. Raise `UserError` for NaN or infinity."""
        values = self.values[rows].astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise UserError(f"{self.file}: {self.name} has values that are not finite; use another checkpoint")
        return values


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Return a model folder's tensors by name, from `model.safetensors` or from the files in its index."""
    if not (folder / INDEX).is_file():
        if (folder / FILE).is_file():
            return _read_header(folder / FILE)
        others = [path.name for path in sorted(folder.glob("*")) if path.suffix in (".bin", ".pt", ".pth")]
        hint = f"; convert {others[0]} to safetensors first" if others else "; put the weights there"
        raise UserError(f"{folder} has neither {FILE} nor {INDEX}{hint}")
    index = read_json(folder / INDEX)
    if why := schema_error(index, {"weight_map": {str: str}}):
        raise UserError(f"{folder / INDEX}: {why}")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        if Path(file).name != file:
            raise UserError(f"{folder / INDEX}: {file!r} is not a file of this folder")
        tensors |= _read_header(folder / file)
    return tensors


def _read_header(file: Path) -> dict[str, Tensor]:
    try:
        opened = safe_open(file, "numpy")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error}); copy or download it again") from error
    tensors = {}
    for name in opened.keys():  # noqa: SIM118  # It is not a mapping.
        values = opened.get_slice(name)
        if values.get_dtype() not in DTYPES:
            raise UserError(f"{file}: {name} has dtype {values.get_dtype()}; only {', '.join(DTYPES)} can be converted")
        tensors[name] = Tensor(name, file, tuple(values.get_shape()), values)
    return tensors


def write_folder(folder: Path, tensors: Mapping[str, Streamed], shard_bytes: int) -> list[str]:
    """Write tensors to one file. Above `shard_bytes`, write several files and an index. Return the file names."""
    shards: list[dict[str, Streamed]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    count = len(shards)
    files = [FILE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for file, shard in zip(files, shards, strict=True):
        write_tensors(folder / file, shard)
    if count > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        file_of = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2)
        write_atomically(folder / INDEX, text + "\n")
    return files


def write_tensors(path: Path, tensors: Mapping[str, Streamed]) -> None:
    """Write tensors to one file, each in its dtype."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires this entry.
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": (end, end + tensor.nbytes),
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Align the tensors to 8 bytes.
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            for _, block in tensor.parts():
                file.write(np.ascontiguousarray(block, tensor.dtype.newbyteorder("<")).data)
            assert file.tell() == 8 + len(text) + header[name]["data_offsets"][1], name
