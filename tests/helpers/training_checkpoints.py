"""Checkpoints of tiny states, and faults in their files."""

import jax.numpy as jnp

from difftx.training.state import TrainState

LOADER = {"examples": 8, "signature": {"seed": 0}}


def state_at(step, size=3):
    params = {"layer": {"w": jnp.full((size, 2), step, jnp.float32)}}
    return TrainState(jnp.int32(step), params, {"mu": jnp.full((size, 2), 2 * step, jnp.float32)})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def largest_file(folder):
    """Return the file with the arrays."""
    return max((path for path in folder.glob("state/**/*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
