"""The shapes of a config's attention calls, and the backend that serves them."""

import jax

from difftx import kernels
from difftx.config import Config
from difftx.kernels.context import SequenceSharding
from difftx.kernels.measure import Workload
from difftx.model.abstract import count_parameters
from difftx.model.architectures import ARCHITECTURES, heads_of
from difftx.parallel.mesh import mesh_sizes
from difftx.parallel.presets import apply_preset


def kernel_function(config: Config) -> str:
    """Return the name of the attention function that the model calls."""
    if config.model.attention_logit_bits is not None:
        return "weighted_attention"
    return ARCHITECTURES[config.model.architecture].kernel


def attention_workload(config: Config, kind: str, devices: int) -> Workload:
    """Return the shapes of a microbatch's attention on one of `devices` devices of this kind."""
    config = apply_preset(config, kind=kind, devices=devices, parameters=count_parameters(config.model).total)
    model, heads, sizes = config.model, heads_of(config.model), mesh_sizes(config.mesh, devices)
    is_differential = kernel_function(config) == "diff_attention"
    # With context method "heads", each device attends over whole rows for some of the heads. With the other methods,
    # each device has some of the tokens and all heads. A single device cannot run those, so use the shapes of whole
    # rows.
    shards = sizes["tensor"] * (sizes["context"] if config.mesh.context_method == "heads" else 1)
    return Workload(
        function="diff_attention" if is_differential else "attention",
        batch=max(1, config.batch_rows // config.train.accumulation // (sizes["data"] * sizes["fsdp"])),
        tokens=config.data.sequence_length,
        heads=max(1, (model.num_heads if heads.groups == 2 else heads.query_heads) // shards),
        kv_heads=max(1, heads.kv_heads // shards),
        width=heads.d_head,
        dtype=model.compute_dtype,
        has_segments=config.data.document_mask,
        window=None if None in model.windows else model.window,  # Layers without a window are the slowest.
    )


def attention_call(config: Config, mesh: jax.sharding.Mesh) -> kernels.AttentionCall:
    """Return the arguments of the attention function in a train step on the mesh, with shapes instead of arrays."""
    call = attention_workload(config, mesh.devices.flat[0].device_kind, mesh.size).call()
    if config.mesh.context_method == "heads" or mesh.shape["context"] == 1:
        return call
    zigzag = config.mesh.context_method == "zigzag"
    return call._replace(sharding=SequenceSharding("context", mesh.shape["context"], zigzag))


def attention_kernel(config: Config, mesh: jax.sharding.Mesh) -> str:
    """Return the attention backend of a train step on the mesh. Its devices need not be attached."""
    with jax.set_mesh(mesh):
        call = attention_call(config, mesh)
        return kernels.choose(kernel_function(config), config.model.attention_implementation, call).name
