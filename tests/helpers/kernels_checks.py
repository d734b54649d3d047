"""Tolerances, array helpers and abstract devices that the tests of several attention kernels share."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from difftx.kernels.cached import EMPTY, SegmentMask

# Largest error relative to the largest value. bfloat16 has 8 bits, and its gradients also round P and dS.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2}


def relative_error(actual, expected) -> float:
    """Return the largest error relative to the largest expected value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30)


def split(x_BS, slots, new):
    """Put all but the last `new` tokens into a cache `[B, K, …, S, width]` with empty slots before and after them."""
    old = np.moveaxis(np.asarray(x_BS[:, :-new], np.float64), 1, -2)
    full = np.full((*old.shape[:-2], slots, old.shape[-1]), 7.0)  # The contents of empty slots must not matter.
    full[..., 2 : 2 + old.shape[-2], :] = old
    return jnp.asarray(full, x_BS.dtype), x_BS[:, -new:]


def split_segments(segment_BS, slots, new):
    """Return the mask of the last `new` tokens and of a cache of `split`, in which token i is in slot 2 + i."""
    B, S = segment_BS.shape
    slots_BS = np.full((B, slots), EMPTY, np.int32)
    slots_BS[:, 2 : 2 + S - new] = segment_BS[:, :-new]
    positions_BT = np.tile(2 + np.arange(S - new, S, dtype=np.int32), (B, 1))
    return SegmentMask(*map(jnp.asarray, (segment_BS[:, -new:], np.zeros_like(positions_BT), positions_BT, slots_BS)))


def targeting(kind: str, platform: str = "cuda") -> contextlib.AbstractContextManager:
    """Return a context in which computations are traced for a device of this kind, such as "NVIDIA H200"."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))
