"""Checkpoints of tiny states on disks and in buckets, and faults in their files."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from difftx.files import describe_below, open_file, read_file
from difftx.json_files import json_sha256
from difftx.storage import objects
from difftx.storage.paths import is_bucket
from difftx.training.checkpoint.manifest import MANIFEST, read_manifest
from difftx.training.checkpoint.restoring import restore_state
from difftx.training.state import TrainState

LOADER = {"examples": 8, "signature": {"seed": 0}}


def state_at(step, size=3):
    params = {"layer": {"w": jnp.full((size, 2), step, jnp.float32)}}
    return TrainState(jnp.int32(step), params, {"mu": jnp.full((size, 2), 2 * step, jnp.float32)})


def restored(checkpointer, step, mesh, size=3):
    return restore_state(checkpointer.read(step), jax.eval_shape(lambda: state_at(0, size)), mesh)


def check(checkpointer, step, mesh):
    """Assert that a run starts with the checkpoint of a step, and that it has the right values."""
    assert checkpointer.newest() == step
    jax.tree.map(np.testing.assert_array_equal, restored(checkpointer, step, mesh), state_at(step))
    assert checkpointer.read(step).loader == LOADER


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def largest_file(folder):
    """Return the file with the arrays."""
    contents = read_manifest(folder).contents
    return contents / max(describe_below(contents).items(), key=lambda item: item[1].size)[0]


def put(path, content):
    """Create or replace a file on a disk or in a bucket."""
    if is_bucket(path):
        return objects.write(path, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def flip_a_bit(path):
    with open_file(path) as file:
        content = bytearray(file.read())
    content[len(content) // 2] ^= 1
    put(path, bytes(content))


def edit_manifest(folder, change, sign=True):
    content = json.loads(read_file(folder / MANIFEST))
    del content["sha256"]
    change(content)
    signature = json_sha256(content) if sign else "0" * 64
    put(folder / MANIFEST, json.dumps(content | {"sha256": signature}).encode())
