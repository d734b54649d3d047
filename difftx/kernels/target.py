"""Properties of the device to compile for: the current abstract mesh's device, or JAX's default device."""

import re

import jax

HOPPER = 9  # Major compute capability. 8 is Ampere and Ada, 10 and 12 are Blackwell.

# Compute capability of NVIDIA GPUs (developer.nvidia.com/cuda-gpus). A key is a part of JAX's device kind.
_COMPUTE_CAPABILITIES = {
    "A100": (8, 0),
    "L4": (8, 9),
    "RTX 4090": (8, 9),
    **dict.fromkeys(("H100", "H200", "H800", "H20"), (9, 0)),
    "B200": (10, 0),
}
LARGE_MEMORY_BYTES = 40e9
# Matches the device kinds with at least this much memory. "TPU v5" is v5p, and "TPU v5 lite" is v5e.
_LARGE_MEMORY = re.compile("A100|H100|H200|H800|H20|B200|TPU v5(?! lite)|TPU7x")


def platform() -> str:
    """Return the platform of the target device: "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = device.platform if device is not None else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def device_kind() -> str:
    """Return JAX's name for the kind of the target device, such as "TPU v5" or "NVIDIA H200"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def has_large_memory() -> bool:
    """Return whether the target has at least `LARGE_MEMORY_BYTES`. For an attached device, count what JAX may use."""
    kind, attached = device_kind(), jax.local_devices()[0]
    if attached.device_kind == kind:
        return (attached.memory_stats() or {}).get("bytes_limit", 0) >= LARGE_MEMORY_BYTES
    return _LARGE_MEMORY.search(kind) is not None


def compute_capability(kind: str | None = None) -> tuple[int, int]:
    """Return the compute capability (major, minor) of a kind of NVIDIA GPU, or (0, 0) if it is unknown.

    `kind` defaults to the target's. If such a GPU is attached, ask it.
    """
    kind, attached = kind or device_kind(), jax.devices()[0]
    if attached.device_kind == kind:
        stated = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(attached, "compute_capability", "")))
        return (int(stated[1]), int(stated[2])) if stated else (0, 0)
    return next((capability for part, capability in _COMPUTE_CAPABILITIES.items() if part in kind), (0, 0))
