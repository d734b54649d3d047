"""Compiling for H200 GPUs on a machine that has none."""

import importlib.util
import shutil

import jax
import numpy as np
import pytest
from jax.experimental import topologies

# An xla.GpuTargetConfigProto; the numbers are an H200's device properties under CUDA 13.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
SHARED_MEMORY_BYTES = 232448


def _has_plugin() -> bool:
    return importlib.util.find_spec("jax_plugins") is not None and (
        importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    )


needs_plugin = pytest.mark.skipif(
    not _has_plugin() or shutil.which("ptxas") is None,
    reason="jax-cuda13-plugin is not installed, or ptxas is not on the PATH: nothing can be compiled for Hopper",
)


def mesh(devices, axis_names):
    """A mesh of H200s, one host, `devices` an array shape such as (2, 2); needs jax-cuda13-plugin."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology=f"1x1x{np.prod(devices)}")
    return topologies.make_mesh(topology, devices, axis_names)


def struct(mesh, shape, dtype, spec):
    """An array's shape, dtype and place, to lower with."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))
