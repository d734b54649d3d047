"""The device for which a computation is compiled: that of the current abstract mesh, or else JAX's default device."""

import jax


def platform() -> str:
    """Return the platform of the target device: "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = device.platform if device is not None else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def device_kind() -> str:
    """Return JAX's name for the kind of the target device, such as "TPU v5" or "NVIDIA H200"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind
