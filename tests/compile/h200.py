"""Helpers to compile for H200 GPUs on a machine without them."""

import shutil

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from difftx.launch.topology import gpu_target, has_cuda_plugin

SHARED_MEMORY_BYTES = 232448


needs_plugin = pytest.mark.skipif(
    not has_cuda_plugin() or shutil.which("ptxas") is None,
    reason="jax-cuda13-plugin is not installed, or ptxas is not on the PATH: nothing can be compiled for Hopper",
)


def mesh(devices, axis_names):
    """Return a mesh of H200s on one host with the shape `devices`, such as (2, 2). Requires jax-cuda13-plugin."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu_target("h200"), topology=f"1x1x{np.prod(devices)}"
    )
    return topologies.make_mesh(topology, devices, axis_names)


def struct(mesh, shape, dtype, spec):
    """Return the shape, dtype and sharding of an array, as an argument for lowering."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))
