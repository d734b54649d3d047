"""safetensors files that difftx writes and reads. In parity_test.py, the library reads them."""

import json

import numpy as np
import pytest
import safetensors

from difftx.interop.safetensors import INDEX, read_folder, write_folder
from difftx.training.checkpoint.weights import Streamed

VALUES = {f"t{i}": np.random.default_rng(i).normal(size=(5 + i, 3)).astype(np.float32) for i in range(7)}


def write(folder, shard_bytes):
    tensors = {n: Streamed(v.shape, 3, v.__getitem__) for n, v in VALUES.items()}
    return write_folder(folder, tensors, shard_bytes)


@pytest.mark.parametrize(("shard_bytes", "count"), [(10**6, 1), (200, 5), (1, 7)])
def test_files_of_a_limited_size_and_their_index(tmp_path, shard_bytes, count):
    files = write(tmp_path, shard_bytes)
    assert len(files) == count
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == sorted(files)
    assert (tmp_path / INDEX).exists() == (count > 1)
    if count > 1:
        total = sum(value.nbytes for value in VALUES.values())
        assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == total
    for file in files:
        with safetensors.safe_open(tmp_path / file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}  # Without it, transformers refuses the file.
    back = read_folder(tmp_path)
    assert back.keys() == VALUES.keys()
    for name, value in VALUES.items():
        np.testing.assert_array_equal(back[name].read(), value)
        np.testing.assert_array_equal(back[name].read(slice(2, 4)), value[2:4])
