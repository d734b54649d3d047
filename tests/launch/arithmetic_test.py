"""FLOPs counted from jaxprs, compared with counts by hand and with XLA's own count of programs without loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels_checks import targeting
from jax import P
from jax.extend import core

from difftx import kernels
from difftx.kernels import cudnn, pallas_gpu, pallas_tpu, splash
from difftx.kernels.backend import window_scope
from difftx.launch.arithmetic import executed_flops
from difftx.launch.estimate import trace_step
from difftx.parallel.mesh import make_mesh


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def differential(b, t, h, k, d):
    """Return q, k, v and λ of differential attention with `h` query heads and `k` key heads."""
    return struct(b, t, h, 2, d), struct(b, t, k, 2, d), struct(b, t, k, 2 * d), struct(b, t, h, dtype="float32")


def flops(function, *arguments):
    return executed_flops(jax.jit(function).trace(*arguments).jaxpr)


def test_loops_count_as_often_as_they_run():
    def twice(x):
        return x @ x @ x

    def loop(function, length):
        return lambda x: jax.lax.scan(lambda c, _: (function(c), None), x, length=length)[0]

    x = struct(8, 8)
    assert flops(twice, x) == 2 * 2 * 8**3
    assert flops(loop(loop(twice, 3), 5), x) == 15 * 2 * 2 * 8**3
    assert flops(lambda x: jax.lax.cond(x[0, 0] > 0, twice, lambda x: x @ x, x), x) == 2 * 2 * 8**3
    assert flops(jax.checkpoint(jax.jit(twice)), x) == 2 * 2 * 8**3


def test_a_device_of_a_mesh_counts_its_share(mesh_of):
    mesh = mesh_of(fsdp=2, tensor=2)

    def placed(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))

    def project(x, w):
        return jnp.einsum("bd,df->bf", x, w, out_sharding=P("fsdp", "tensor"))

    x, w = placed(P("fsdp", None), 8, 16), placed(P("fsdp", "tensor"), 16, 32)
    full = 2 * 8 * 16 * 32
    with jax.set_mesh(mesh):
        assert flops(project, x, w) == full / 4
        gradients = jax.grad(lambda x, w: jnp.sum(project(x, w) ** 2), argnums=(0, 1))
        assert flops(gradients, x, w) == 3 * full / 4
        # Each device multiplies whole arrays if no axis shards them, and its own rows inside shard_map.
        assert flops(lambda x, w: x @ w, placed(P(), 8, 16), placed(P(), 16, 32)) == full
        local = jax.shard_map(lambda x, w: x @ w, in_specs=(P("fsdp", None), P()), out_specs=P("fsdp", None))
        assert flops(local, placed(P("fsdp", None), 8, 16), placed(P(), 16, 32)) == full / 2


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["diff", "transformer"])
def test_the_step_agrees_with_xla_where_nothing_loops(config, architecture):
    """With one layer, chunk and device, XLA's own count is correct. It includes more than matrix products."""
    c = config(architecture, model__num_layers=1, model__d_model=128, model__mlp_dim=256)
    mesh = make_mesh(c.mesh, jax.devices()[:1])
    traced = trace_step(c, mesh)
    once = executed_flops(traced.jaxpr)
    assert once == pytest.approx(traced.lower().compile().cost_analysis()["flops"], rel=0.15)

    c = config(architecture, model__num_layers=3, model__d_model=128, model__mlp_dim=256)
    layer = 256 * (6 * (4 * 128**2 + 3 * 128 * 256) + 12 * 32 * 128)  # Tokens × (6 N + 12 T d).
    assert executed_flops(trace_step(c, mesh).jaxpr) - once == pytest.approx(2 * layer, rel=0.01)


def pallas_calls(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params
        else:
            for value in equation.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(inner, (core.ClosedJaxpr, core.Jaxpr)):
                        yield from pallas_calls(getattr(inner, "jaxpr", inner))


# With `copies` = 2, a kernel contains its body twice, for tiles with and without a mask, and a step runs one copy. If
# the window crosses all tiles, the kernel contains one copy.
@pytest.mark.parametrize(("window", "block", "copies"), [(None, 128, 2), (None, 256, 2), (300, 128, 2), (300, 256, 1)])
def test_tpu_kernels_state_the_flops_of_their_bodies(window, block, copies, monkeypatch):
    monkeypatch.setattr(pallas_tpu, "_tiles", lambda _: pallas_tpu.Tiles(block, vmem_mib=16, dq_mib=0))
    b, t, h, k, d = 2, 640, 4, 2, 64
    q, key, v, lam = differential(b, t, h, k, d)

    def both(q, k, v, lam):
        call = functools.partial(dict, window=window, interpret=True)
        out, saved = pallas_tpu.forward(q, k, v, lam, None, **call())
        return pallas_tpu.backward(q, k, v, lam, None, out, saved, out, **call())

    calls = list(pallas_calls(jax.jit(both).trace(q, key, v, lam).jaxpr))
    assert len(calls) == 3
    for params in calls:
        stated, steps = params["cost_estimate"], np.prod(params["grid_mapping"].grid)
        assert stated.flops == executed_flops(params["jaxpr"]) * steps / copies
        assert 0 < stated.bytes_accessed < stated.flops


def test_splash_counts_only_causal_tiles():
    b, t, h, d = 2, 2048, 3, 64
    q, v = struct(b, t, h, 1, d), struct(b, t, h, d)

    def both(q, k, v):
        call = functools.partial(splash.attention, lam_BTH=None, segment_ids_BT=None, window=None)
        out, back = jax.vjp(call, q, k, v)
        return back(out)

    tiles = 4 * 5 / 2  # Tiles of 512 × 512 on and below the diagonal.
    assert flops(both, q, q, v) == pytest.approx(b * h * tiles * 512**2 * 2 * d * (2 + 5), rel=1e-3)


def test_windows_reduce_the_flops():
    """Compare with counts by hand of tiles (splash) and of pairs of tokens (other kernels).

    `kernels.attention` traces the programs with splash and cuDNN.
    """
    b, t, h, d, window = 2, 2048, 3, 64, 500
    q = struct(b, t, h, d)

    def both(implementation):
        def call(q, k, v):
            attention = functools.partial(kernels.attention, window=window, implementation=implementation)
            out, back = jax.vjp(attention, q, k, v)
            return back(out)

        return call

    tiles = 1 + 2 + 2 + 2  # Tiles of 512 × 512. A tile of queries sees its own keys and the tile before.
    assert flops(both("splash"), q, q, q) == pytest.approx(b * h * tiles * 512**2 * 2 * d * (2 + 5), rel=1e-3)
    pairs = sum(min(i + 1, window) for i in range(t))
    with targeting("NVIDIA H200"), cudnn.checked_for_target(91900):
        assert flops(both("cudnn"), q, q, q) == pytest.approx(2 * d * pairs * b * h * (2 + 5), rel=1e-3)

    def forward(q, k, v, lam):
        with window_scope(window):
            return pallas_gpu.forward(q, k, v, lam, None, window=window, interpret=False)

    assert flops(forward, *differential(b, t, h, h, d)) == pytest.approx(2 * d * pairs * b * h * 6, rel=1e-3)


def test_cudnn_calls_are_counted_by_name():
    b, t, h, d = 2, 512, 3, 64
    q, v = struct(b, t, h, 1, d), struct(b, t, h, d)

    def both(q, k, v):
        out, back = jax.vjp(lambda *a: cudnn.attention(*a, None, window=None), q, k, v)
        return back(out)

    with targeting("NVIDIA H200"), cudnn.checked_for_target(91900):
        assert flops(both, q, q, v) == (2 + 5) * b * h * t**2 * d


def test_mosaic_gpu_kernels_are_counted_by_name():
    b, t, h, k, d = 2, 256, 4, 2, 64
    q, key, v, lam = differential(b, t, h, k, d)
    out = struct(b, t, h, 2 * d)

    def forward(q, k, v, lam):
        return pallas_gpu.forward(q, k, v, lam, None, window=None, interpret=False)

    def backward(q, k, v, lam, out, saved, dout):
        return pallas_gpu.backward(q, k, v, lam, None, out, saved, dout, window=None, interpret=False)

    half = b * h * t**2 * d  # A product of width d over the causal half of T × T.
    assert flops(forward, q, key, v, lam) == 6 * half
    saved = jax.eval_shape(forward, q, key, v, lam)[1]
    assert flops(backward, q, key, v, lam, out, saved, out) == (8 + 6) * half
