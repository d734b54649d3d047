"""Descriptions of devices for which XLA compiles programs without having them: TPU slices, H200s and virtual CPUs."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from difftx.errors import UserError, did_you_mean, install_hint

if TYPE_CHECKING:
    import jax

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Memory and bandwidths of one JAX device. Its peak FLOP/s is in `model.flops.PEAK_FLOPS`."""

    hbm_bytes: float
    interconnect: float | None  # Bytes/s that a device sends within its TPU slice or GPU host, or None if unknown.
    network: float | None  # Bytes/s that a device sends to other TPU slices or GPU hosts, or None if unknown.


# Sources for TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. `interconnect` is half of the "Bidirectional
# ICI bandwidth per chip". `network` is the "DCN bandwidth per chip" (for v5e and v6e, 1/256 of that of a pod).
# `hbm_bytes` is the memory that libtpu 0.0.50 gives a program, a little less than the data sheet's. JAX counts a tpu7x
# chip as two devices. Source for the H200: NVIDIA's data sheet (NVLink with 900 GB/s in both directions together), and
# one 400 Gbit/s ConnectX-7 network adapter per GPU.
CHIPS = {
    "v4": Chip(hbm_bytes=30.75 * GIB, interconnect=300e9, network=3.125e9),
    "v5e": Chip(hbm_bytes=15.75 * GIB, interconnect=200e9, network=3.125e9),
    "v5p": Chip(hbm_bytes=95.73 * GIB, interconnect=600e9, network=6.25e9),
    "v6e": Chip(hbm_bytes=31.24 * GIB, interconnect=400e9, network=12.5e9),
    "tpu7x": Chip(hbm_bytes=94.74 * GIB, interconnect=300e9, network=6.25e9),
    "h200": Chip(hbm_bytes=141e9, interconnect=450e9, network=50e9),
}

# Properties of an H200 under CUDA 13, as an xla.GpuTargetConfigProto for JAX's CUDA plugin. libtpu needs only a name.
H200_TARGET = """
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


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind, in one or more slices."""

    kind: str  # A key of CHIPS, or "cpu".
    shape: tuple[int, ...]  # Number of chips along each axis of a slice's torus, or the number of GPUs or CPUs.
    slices: int

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}" + f"*{self.slices}" * (self.slices > 1)

    @property
    def chip(self) -> Chip:
        """Memory and bandwidths of a device. A virtual CPU has a share of the host's memory and unknown bandwidths."""
        if self.kind == "cpu":
            host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return Chip(hbm_bytes=host / math.prod(self.shape), interconnect=None, network=None)
        return CHIPS[self.kind]


def parse_topology(text: str) -> Topology:
    """Parse a topology such as `v5p:4x4x4`, `v5e:16x16*2` (two slices), `h200:8` or `cpu:8`."""
    match = re.fullmatch(r"([\w-]+):(\d+(?:x\d+)*)(?:\*(\d+))?", text.strip())
    if match is None:
        raise UserError(f"--topology={text}: write kind:shape, such as v5p:4x4x4, v5e:16x16*2 (slices), h200:8, cpu:8")
    kind, shape, slices = match[1].lower(), tuple(map(int, match[2].split("x"))), int(match[3] or 1)
    if kind not in CHIPS and kind != "cpu":
        raise UserError(f"--topology={text}: unknown kind of device.{did_you_mean(kind, [*CHIPS, 'cpu'])}")
    if min(*shape, slices, 1) < 1:
        raise UserError(f"--topology={text}: sizes must be positive")
    if kind in ("cpu", "h200") and (len(shape) > 1 or slices > 1):
        raise UserError(f"--topology={text}: {kind} takes one number, such as {kind}:{math.prod(shape) * slices}")
    return Topology(kind, shape, slices)


def prepare(topology: Topology) -> None:
    """Set the environment variables that JAX and libtpu read at start. Call this before the first use of JAX."""
    # JAX only compiles for the TPU. libtpu must not ask a metadata server, and several processes may load it.
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ.update(TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_HOSTNAMES="localhost")  # libtpu needs some value.
    if topology.kind == "cpu":
        flag = f"--xla_force_host_platform_device_count={math.prod(topology.shape)}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    elif topology.kind == "h200":
        if not has_cuda_plugin():
            raise UserError(f"--topology={topology}: JAX's CUDA plugin is not installed: {install_hint('cuda')}")
    elif importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--topology={topology}: libtpu is not installed: {install_hint('tpu')}")


def has_cuda_plugin() -> bool:
    """Return whether JAX's plugin for CUDA 13 is installed. It can compile for GPUs on a machine without one."""
    return importlib.util.find_spec("jax_plugins") is not None and (
        importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    )


def find_devices(topology: Topology) -> "Sequence[jax.Device]":
    """Return the devices of a topology, after a call of `prepare`."""
    import jax
    from jax.experimental import topologies

    count = math.prod(topology.shape)
    if topology.kind == "cpu":
        return jax.devices("cpu")[:count]
    if topology.kind == "h200":
        name = f"1x1x{count}"
        return topologies.get_topology_desc(platform="cuda", target_config=H200_TARGET, topology=name).devices
    name = f"{topology.kind}:{'x'.join(map(str, topology.shape))}"
    options: dict[str, object] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if topology.kind == "v4":
        options["chip_config_name"] = "megacore"  # One device per chip, as on real v4; the default is one per core.
    try:
        return topologies.get_topology_desc(name, "tpu", **options).devices
    except Exception as error:  # libtpu raises various types, for unknown slices and for its own lock file.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"--topology={topology}: {reason}") from error
