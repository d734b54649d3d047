"""Compilation of the Pallas TPU kernels by libtpu, for absent TPUs.

jax 0.12.0.1 pins libtpu 0.0.50.*, jax 0.11.2 pins 0.0.48.*. Without libtpu, all tests here are skipped.
"""

import functools
import os
import re

os.environ.update(  # Must be set before libtpu loads. Without the last variable, a second process aborts.
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import PartitionSpec

from difftx.kernels import diff_attention, pallas_tpu, splash

pytest.importorskip("libtpu", reason="libtpu is not installed: nothing can be compiled for TPU")

TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
COLLECTIVE = re.compile(r"all-gather|all-reduce|reduce-scatter|collective-|all-to-all")
HBM_BYTES = 32 * 2**30  # v6e, the smaller memory of the two chips.


def attention(q, k, v, lam, segment_ids, dout, *, window=None):
    """Return the results of the forward and the backward pass of one call."""
    out, saved = pallas_tpu.forward(q, k, v, lam, segment_ids, window=window)
    return out, pallas_tpu.backward(q, k, v, lam, segment_ids, out, saved, dout, window=window)


def splash_wide(q, k, v, lam, segment_ids, dout, *, window=None):
    """Return the results of the forward and the backward pass of two splash calls."""
    call = functools.partial(splash.attention, segment_ids_BT=segment_ids, window=window)
    out, vjp = jax.vjp(call, q, k, v, lam)
    return out, vjp(dout)


def shapes(b, t, h, kv_heads, d, dtype=jnp.bfloat16, *, segments=False, sharding=None):
    def array(shape, dtype, heads=True):
        spec = None
        if sharding is not None:
            axes = ("data", None, "heads") if heads else ("data",)
            spec = (
                jax.NamedSharding(sharding, PartitionSpec(*axes))
                if isinstance(sharding, jax.sharding.Mesh)
                else sharding
            )
        return jax.ShapeDtypeStruct(shape, dtype, sharding=spec)

    return (
        array((b, t, h, 2, d), dtype),
        array((b, t, kv_heads, 2, d), dtype),
        array((b, t, kv_heads, 2 * d), dtype),
        array((b, t, h), jnp.float32),
        array((b, t), jnp.int32, heads=False) if segments else None,
        array((b, t, h, 2 * d), dtype),
    )


def compile_for(chip, function, arguments):
    """Compile a function for one device of `chip`. `arguments` maps a sharding to the arguments."""
    device = topologies.get_topology_desc(TOPOLOGIES[chip], "tpu").devices[0]
    kind = jax.sharding.AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(lambda *xs: function(*xs)).lower(*arguments(jax.sharding.SingleDeviceSharding(device)))
    return lowered.compile()


def kernels_in(compiled):
    return set(re.findall(r"splash_mqa_[a-z]+|diff_attention_\w+?(?=[.\" /)])", compiled.as_text()))


@pytest.mark.parametrize("d", [64, 96, 128])
def test_forward_and_backward_compile(d):
    compiled = compile_for("v5p", attention, lambda s: shapes(1, 1000, 2, 2, d, sharding=s))
    assert kernels_in(compiled) == {"diff_attention_forward", "diff_attention_dqkv"}


@pytest.mark.parametrize("d", [64, 96, 128])
def test_two_kernel_backward_compiles(d, monkeypatch):
    monkeypatch.setattr(pallas_tpu, "_tiles", lambda d: pallas_tpu.Tiles(512, vmem_mib=16, dq_mib=0))
    compiled = compile_for("v5p", attention, lambda s: shapes(1, 1024, 2, 2, d, sharding=s))
    names = {"diff_attention_forward", "diff_attention_dkv", "diff_attention_dq"}
    assert kernels_in(compiled) == names


@pytest.mark.parametrize("d", [64, 96, 128])
def test_segments_window_and_groups_compile(d):
    compiled = compile_for(
        "v5p", lambda *xs: attention(*xs, window=700), lambda s: shapes(2, 2048, 8, 2, d, segments=True, sharding=s)
    )
    assert kernels_in(compiled) == {"diff_attention_forward", "diff_attention_dqkv"}


def test_64k_tokens_compile_without_quadratic_memory():
    compiled = compile_for("v5p", attention, lambda s: shapes(1, 65536, 4, 1, 128, segments=True, sharding=s))
    assert "diff_attention_forward" in kernels_in(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes < HBM_BYTES / 8


@pytest.mark.parametrize(
    ("attend", "kernels"),
    [
        (attention, {"diff_attention_forward", "diff_attention_dqkv"}),
        (splash_wide, {"splash_mqa_fwd", "splash_mqa_dkv"}),
    ],
)
def test_sharded_over_batch_and_heads_without_collectives(attend, kernels):
    devices = topologies.get_topology_desc(TOPOLOGIES["v5p"], "tpu").devices
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("data", "heads"))
    by_head, by_row = PartitionSpec("data", None, "heads"), PartitionSpec("data")
    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(by_head, by_head, by_head, by_head, by_row, by_head),
        out_specs=by_head,
        check_vma=False,
    )
    arguments = shapes(4, 1024, 8, 4, 128, segments=True, sharding=mesh)
    compiled = jax.jit(sharded).lower(*arguments).compile()
    assert kernels_in(compiled) == kernels
    assert COLLECTIVE.findall(compiled.as_text()) == []


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
@pytest.mark.parametrize(
    ("call", "segments", "window", "passes"),
    [
        ((1, 1000, 2, 2, 64, jnp.float32), False, None, {"fwd", "dkv"}),
        ((1, 4096, 2, 2, 128), False, None, {"fwd", "dkv"}),
        ((1, 2048, 8, 2, 96), True, 700, {"fwd", "dkv"}),
        ((1, 65536, 4, 1, 128), True, None, {"fwd", "dkv", "dq"}),
    ],
    ids=["float32", "one backward kernel", "segments, window and groups", "two backward kernels"],
)
def test_splash_wide_compiles(chip, call, segments, window, passes):
    attend = functools.partial(splash_wide, window=window)
    compiled = compile_for(chip, attend, lambda s: shapes(*call, segments=segments, sharding=s))
    assert kernels_in(compiled) == {f"splash_mqa_{name}" for name in passes}
    assert compiled.memory_analysis().temp_size_in_bytes < HBM_BYTES / 8


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("pallas_tpu_1024", {"diff_attention_forward", "diff_attention_dqkv"}),
        ("splash_wide_1024", {"splash_mqa_fwd", "splash_mqa_dkv"}),
    ],
)
def test_tiles_of_1024_tokens_compile(chip, name, kernels):
    def attend(q, k, v, lam, segment_ids, dout):
        call = functools.partial(diff_attention, segment_ids_BT=segment_ids, implementation=name)
        out, vjp = jax.vjp(call, q, k, v, lam)
        return out, vjp(dout)

    compiled = compile_for(chip, attend, lambda s: shapes(1, 4096, 2, 2, 128, segments=True, sharding=s))
    assert kernels_in(compiled) == kernels
