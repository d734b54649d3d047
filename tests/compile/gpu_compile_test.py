"""The Mosaic GPU kernels, compiled by ptxas for an H200 on a machine without one.

Requires `pip install jax-cuda13-plugin==<jax's version>`, without nvidia-* wheels, and ptxas 13 on the PATH.
"""

#   B = batch, T = S = length, H = query heads, K = key/value heads, G = 2 groups, d = width, E = 2·d

import dataclasses
import os
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # The plugin only compiles here. JAX cannot start CUDA.

import jax
import jax.numpy as jnp
import pytest

from compile import h200
from difftx.kernels import cudnn, pallas_gpu
from difftx.kernels.backend import ShardedArrays
from difftx.kernels.pallas_gpu_tiles import REGISTERS_AT_ENTRY

pytestmark = h200.needs_plugin

# ptxas reports serialised wgmma as C7507 (a function call), C7510 (control flow, or conflicting use of registers) or
# C7512 (too few registers).
SERIALISED = re.compile(r"C7507|C7510|C7512|wgmma\.mma_async instructions are serialized")
COLLECTIVES = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")
KERNELS = {"forward": {"difftx_forward"}, "backward": {"difftx_dkv", "difftx_dq"}}


@dataclasses.dataclass(frozen=True)
class Kernel:
    registers: int
    spilled_bytes: int
    shared_memory_bytes: int


def forward(q, k, v, lam, segment_ids, out, saved, dout, *, window):
    del out, saved, dout
    return pallas_gpu.forward(q, k, v, lam, segment_ids, window=window, interpret=False)


def backward(q, k, v, lam, segment_ids, out, saved, dout, *, window):
    return pallas_gpu.backward(q, k, v, lam, segment_ids, out, saved, dout, window=window, interpret=False)


FUNCTIONS = {"forward": forward, "backward": backward}


def arguments(mesh, *, width, length=4096, batch=2, heads=12, kv_heads=12, segments=False):
    """Return the arguments of `backward`, with the batch sharded over "data" and the heads over "tensor"."""

    def struct(dtype, *shape, spec):
        return h200.struct(mesh, shape, dtype, jax.P(*spec))

    bf16, f32, sequences = jnp.bfloat16, jnp.float32, ("data", None, "tensor")
    statistics = struct(f32, batch, length, heads, spec=sequences)
    out = struct(bf16, batch, length, heads, 2 * width, spec=sequences)
    return (
        struct(bf16, batch, length, heads, 2, width, spec=sequences),
        struct(bf16, batch, length, kv_heads, 2, width, spec=sequences),
        struct(bf16, batch, length, kv_heads, 2 * width, spec=sequences),
        statistics,
        struct(jnp.int32, batch, length, spec=("data",)) if segments else None,
        out,
        ShardedArrays(by_token=(out,), by_group=(struct(f32, batch, heads, 2, length, spec=("data", "tensor")),)),
        out,
    )


def compile_and_report(which, args, *, window, capfd, monkeypatch):
    """Compile one pass, and return what ptxas and Mosaic report about each of its kernels."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_HOST_LLVM", "1")
    capfd.readouterr()

    def attention(*args):
        return FUNCTIONS[which](*args, window=window)

    jax.jit(attention).lower(*args).compile()
    text = "".join(capfd.readouterr())
    assert not SERIALISED.search(text), text
    assert "multicast::cluster" in text  # Two CTAs of the forward and of the dQ kernel share their loads.
    names = re.findall(r"Compiling entry function '(\w+)_mosaic_gpu_kernel' for 'sm_90a'", text)
    registers = re.findall(r"Used (\d+) registers", text)
    # mosaic_gpu_{launch_kernel,build_kernel_spec}(kernel, grid x3, cluster x3, block = 384, 1, 1, shared memory, ...)
    launch = r"call [^\n]*@mosaic_gpu_\w+\(ptr [^,]+(?:, i32 \d+){6}, i32 384, i32 1, i32 1, i32 (\d+)"
    shared = re.findall(launch, text)
    spills = re.findall(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    return {
        name: Kernel(int(regs), int(stores) + int(loads), int(smem))
        for name, regs, (stores, loads), smem in zip(names, registers, spills, shared, strict=True)
    }


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("width", [64, 128])  # Smaller models have 64, and the paper's have 128.
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"kv_heads": 4},
        {"length": 1000, "batch": 1},
        {"segments": True},
        {"segments": True, "kv_heads": 4, "length": 4000},
        {"window": 1024},
        {"window": 1000, "segments": True, "kv_heads": 4},
        {"length": 65536, "batch": 1, "heads": 2, "kv_heads": 2, "segments": True},
    ],
    ids=lambda call: "_".join(f"{k}={v}" for k, v in call.items()) or "causal",
)
def test_no_spills_no_serialised_wgmma(which, width, call, capfd, monkeypatch):
    shapes = dict(call)
    window = shapes.pop("window", None)
    args = arguments(h200.mesh((1, 1), ("data", "tensor")), width=width, **shapes)
    kernels = compile_and_report(which, args, window=window, capfd=capfd, monkeypatch=monkeypatch)
    assert kernels.keys() == KERNELS[which]
    for name, kernel in kernels.items():
        assert kernel.registers == REGISTERS_AT_ENTRY, (name, kernel)  # `Registers` shares these.
        assert kernel.spilled_bytes == 0, (name, kernel)
        assert kernel.shared_memory_bytes <= h200.SHARED_MEMORY_BYTES, (name, kernel)
        with capfd.disabled():
            print(f"\n{name} d={width} {call}: {kernel}", end="")


def compile_on(mesh, which, *, in_shard_map):
    """Compile one pass over a mesh, and return the kinds of collectives in its HLO."""
    args = arguments(mesh, width=128, length=1000, batch=4, kv_heads=4, segments=True)

    def attention(*args):
        return FUNCTIONS[which](*args, window=512)

    if in_shard_map:
        specs = jax.tree.map(lambda struct: struct.sharding.spec, args)
        outputs = specs[:4] if which == "backward" else (specs[5], specs[6])
        attention = jax.shard_map(attention, mesh=mesh, in_specs=specs, out_specs=outputs)
    hlo = jax.jit(attention).lower(*args).compile().as_text()
    assert hlo.count('custom_call_target="mosaic_gpu_v2"') == len(KERNELS[which])
    return set(COLLECTIVES.findall(hlo))


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2)])
def test_shard_map_needs_no_collective(which, shape):
    mesh = h200.mesh(shape, ("data", "tensor"))
    assert compile_on(mesh, which, in_shard_map=True) == set()


def test_without_shard_map_the_inputs_are_gathered():
    """XLA gathers the inputs without the wrapper, so the wrapper is needed, and the test above can fail."""
    mesh = h200.mesh((2, 2), ("data", "tensor"))
    assert compile_on(mesh, "forward", in_shard_map=False) == {"all-gather"}


def test_cudnn_path_compiles_with_its_gradient():
    """The program has cuDNN's calls and shapes. XLA leaves the plans to the GPU, where cuDNN may still reject calls."""
    mesh = h200.mesh((2, 2), ("data", "tensor"))
    q, k, v, lam, *_ = arguments(mesh, width=128, length=1000, kv_heads=4)
    spec = q.sharding.spec

    def loss(*args):
        return cudnn.attention(*args, window=512).astype(jnp.float32).sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4)
    with cudnn.checked_for_target(91900):
        hlo = jax.jit(sharded).lower(q, k, v, lam).compile().as_text()
    assert hlo.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert hlo.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1
    assert not COLLECTIVES.findall(hlo)
