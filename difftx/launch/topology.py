"""Descriptions of TPU slices, GPUs and virtual CPUs, for which XLA can compile programs without the devices."""

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
# Share of a GPU's memory that training reserves at its start. JAX's default of 0.75 leaves 20 GB of an H100 unused.
# CUDA, cuDNN, cuBLAS and NCCL allocate from the remaining memory.
GPU_MEMORY_SHARE = 0.92


def take_gpu_memory() -> str:
    """Set the share of GPU memory that JAX reserves, unless the user has set it. Return the share in effect."""
    older = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX accepts either name, but not both.
    return older or os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Memory and bandwidths of one JAX device. Its peak FLOP/s is in `model.flops.PEAK_FLOPS`."""

    hbm_bytes: float
    hbm_bandwidth: float | None  # Bytes/s between the device and its memory, or None if unknown.
    interconnect: float | None  # Bytes/s that a device sends within its TPU slice or GPU host, or None if unknown.
    network: float | None  # Bytes/s that a device sends to other TPU slices or GPU hosts, or None if unknown.
    host_devices: int | None = None  # Largest number of GPUs that share a host. None for TPUs and CPUs.


# Sources for TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. `interconnect` is half of the "Bidirectional
# ICI bandwidth per chip". `network` is the "DCN bandwidth per chip" (for v5e and v6e, 1/256 of the bandwidth per pod).
# `hbm_bytes` is the memory that libtpu 0.0.50 lets a program use, a little less than the data sheet states. JAX counts
# a tpu7x chip as two devices.
#
# Sources for GPUs: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM, DGX B200 (1,440 GB and 64 TB/s for eight)
# and L4, and for the RTX 4090 the whitepaper of the Ada GPU architecture. `interconnect` is half of the NVLink
# bandwidth, which counts both directions, or PCIe 4.0 x16 in one direction. `network`: DGX A100 has 200 Gbit/s per GPU,
# and DGX H100, H200 and B200 have 400 Gbit/s per GPU. Eight L4 share the 100 Gbit/s of Google's g2-standard-96. For the
# RTX 4090, hosts with four cards and 100 Gbit/s are assumed.
CHIPS = {
    "v4": Chip(hbm_bytes=30.75 * GIB, hbm_bandwidth=1.2e12, interconnect=300e9, network=3.125e9),
    "v5e": Chip(hbm_bytes=15.75 * GIB, hbm_bandwidth=0.8e12, interconnect=200e9, network=3.125e9),
    "v5p": Chip(hbm_bytes=95.73 * GIB, hbm_bandwidth=2.765e12, interconnect=600e9, network=6.25e9),
    "v6e": Chip(hbm_bytes=31.24 * GIB, hbm_bandwidth=1.6e12, interconnect=400e9, network=12.5e9),
    "tpu7x": Chip(hbm_bytes=94.74 * GIB, hbm_bandwidth=3.69e12, interconnect=300e9, network=6.25e9),
    "a100": Chip(hbm_bytes=80e9, hbm_bandwidth=2.039e12, interconnect=300e9, network=25e9, host_devices=8),
    "h100": Chip(hbm_bytes=80e9, hbm_bandwidth=3.35e12, interconnect=450e9, network=50e9, host_devices=8),
    "h200": Chip(hbm_bytes=141e9, hbm_bandwidth=4.8e12, interconnect=450e9, network=50e9, host_devices=8),
    "b200": Chip(hbm_bytes=180e9, hbm_bandwidth=8e12, interconnect=900e9, network=50e9, host_devices=8),
    "l4": Chip(hbm_bytes=24e9, hbm_bandwidth=0.3e12, interconnect=32e9, network=1.5625e9, host_devices=8),
    "rtx4090": Chip(hbm_bytes=24e9, hbm_bandwidth=1.008e12, interconnect=32e9, network=3.125e9, host_devices=4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Properties of a GPU that XLA needs to compile for it."""

    name: str  # JAX's device kind.
    cores: int  # Number of streaming multiprocessors.
    clock_ghz: float  # Largest clock rate.
    l2_bytes: int
    fpus: int = 128  # Float32 units per core.
    shared_kib: int = 228  # Shared memory per core. A block can use 1 KiB less.
    threads: int = 2048  # Largest number of resident threads per core.


# Sources for shared memory and threads: "Compute Capabilities" in NVIDIA's CUDA C++ Programming Guide. Sources for all
# other values: the output of CUDA's sample deviceQuery, and OpenXLA's xla/backends/gpu/target_config/specs.
GPUS = {
    "a100": Gpu(name="NVIDIA A100-SXM4-80GB", cores=108, clock_ghz=1.41, l2_bytes=40 * 2**20, fpus=64, shared_kib=164),
    "h100": Gpu(name="NVIDIA H100 80GB HBM3", cores=132, clock_ghz=1.98, l2_bytes=50 * 2**20),
    "h200": Gpu(name="NVIDIA H200", cores=132, clock_ghz=1.98, l2_bytes=60 * 2**20),
    "b200": Gpu(name="NVIDIA B200", cores=148, clock_ghz=1.965, l2_bytes=132_644_864),
    "l4": Gpu(name="NVIDIA L4", cores=58, clock_ghz=2.04, l2_bytes=48 * 2**20, shared_kib=100, threads=1536),
    "rtx4090": Gpu(
        name="NVIDIA GeForce RTX 4090", cores=128, clock_ghz=2.52, l2_bytes=72 * 2**20, shared_kib=100, threads=1536
    ),
}
CUDNN_VERSION = 91900  # cuDNN 9.19.0 is assumed for GPUs that are not attached.


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind, in one or more slices."""

    kind: str  # A key of CHIPS, or "cpu".
    shape: tuple[int, ...]  # Number of chips along each axis of a slice's torus, or the number of GPUs or CPUs.
    slices: int

    def __str__(self) -> str:
        text = f"{self.kind}:{'x'.join(map(str, self.shape))}"
        return f"{text}*{self.slices}" if self.slices > 1 else text

    @property
    def chip(self) -> Chip:
        """Memory and bandwidths of a device. Virtual CPUs share the host's memory and have unknown bandwidths."""
        if self.kind == "cpu":
            host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return Chip(hbm_bytes=host / math.prod(self.shape), hbm_bandwidth=None, interconnect=None, network=None)
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
    if kind in ("cpu", *GPUS) and (len(shape) > 1 or slices > 1):
        raise UserError(f"--topology={text}: {kind} takes one number, such as {kind}:{math.prod(shape) * slices}")
    return Topology(kind, shape, slices)


def prepare(topology: Topology) -> None:
    """Set the options that JAX and libtpu read when they start. Call this before JAX opens its devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # JAX_PLATFORMS has no effect after JAX is imported.
    # There is no TPU, so libtpu must not ask a metadata server, and several processes may load libtpu.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ.update(TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_HOSTNAMES="localhost")  # Any valid value works.
    if topology.kind == "cpu":
        flag = f"--xla_force_host_platform_device_count={math.prod(topology.shape)}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    elif topology.kind in GPUS:
        if not has_cuda_plugin():
            raise UserError(f"--topology={topology}: JAX's CUDA plugin is not installed: {install_hint('cuda')}")
    elif importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--topology={topology}: libtpu is not installed: {install_hint('tpu')}")


def has_cuda_plugin() -> bool:
    """Return whether JAX's CUDA 13 plugin is installed. It can compile for GPUs on machines without a GPU."""
    return importlib.util.find_spec("jax_plugins") is not None and (
        importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    )


def find_devices(topology: Topology) -> "Sequence[jax.Device]":
    """Return the devices of a topology. Call `prepare` first."""
    import jax
    from jax.experimental import topologies

    count = math.prod(topology.shape)
    if topology.kind == "cpu":
        return jax.devices("cpu")[:count]
    if topology.kind in GPUS:
        target, shape = gpu_target(topology.kind), f"1x1x{count}"
        return topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices
    name = f"{topology.kind}:{'x'.join(map(str, topology.shape))}"
    options: dict[str, object] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if topology.kind == "v4":
        options["chip_config_name"] = "megacore"  # One device per chip, as on real v4; the default is one per core.
    try:
        return topologies.get_topology_desc(name, "tpu", **options).devices
    except Exception as error:  # libtpu raises various types: for unknown slices, for its lock file.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"--topology={topology}: {reason}") from error


def gpu_target(kind: str) -> str:
    """Return the xla.GpuTargetConfigProto (text) of a GPU, with which JAX's CUDA 13 plugin can compile for it."""
    from difftx.kernels import target  # Import here, because importing JAX is slow.

    gpu, chip = GPUS[kind], CHIPS[kind]
    major, minor = target.compute_capability(gpu.name)
    shared = gpu.shared_kib * 1024
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared - 1024}
  shared_memory_per_core: {shared}
  threads_per_core_limit: {gpu.threads}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {chip.hbm_bandwidth:.0f}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {chip.hbm_bytes:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN_VERSION // 10_000} minor: {CUDNN_VERSION // 100 % 100} }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.name}"
"""
