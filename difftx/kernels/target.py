"""Which device a call is traced for: the one at hand, or the one a program is compiled for ahead of time."""

import jax


def platform() -> str:
    """Return "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = device.platform if device is not None else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def device_kind() -> str:
    """Return the device's kind as jax names it, such as "TPU v5" or "NVIDIA H200"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind
