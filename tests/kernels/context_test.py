"""Attention over rows that are sharded along their tokens equals the reference on whole rows of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import marked
from jax import P
from jax.experimental.pallas import tpu as pltpu

from difftx import kernels
from difftx.kernels import context, pallas_tpu, pallas_tpu_kernels, weight_functions
from difftx.kernels.context import SequenceSharding
from difftx.kernels.rows import attention_rows

B, H, K, d = 2, 4, 2, 8  # Query heads share keys, so fewer key heads than query heads are gathered.


def operands(kind, tokens, segments, seed=0):
    """Return q, k, v and λ or None, and segment ids or None."""
    keys = jax.random.split(jax.random.key(seed), 4)
    groups, width = ((2,), 2 * d) if kind == "diff" else ((), d)
    q = jax.random.normal(keys[0], (B, tokens, H, *groups, d))
    k = jax.random.normal(keys[1], (B, tokens, K, *groups, d))
    v = jax.random.normal(keys[2], (B, tokens, K, width))
    lam = jax.random.uniform(keys[3], (B, tokens, H)) if kind == "diff" else None
    # Documents have random lengths. They end inside chunks and may span several chunks.
    ends = np.sort(np.random.default_rng(seed).integers(1, tokens, (B, 5)), axis=1)
    ids = (np.arange(tokens) >= ends[:, :, None]).sum(axis=1).astype(np.int32) + 1
    return q, k, v, lam, jnp.asarray(ids) if segments else None


def attend(kind, implementation, window, zigzag, q, k, v, lam, ids):
    options = {"segment_ids_BT": ids, "window": window, "zigzag": zigzag, "implementation": implementation}
    if kind == "diff":
        return kernels.diff_attention(q, k, v, lam, **options)
    if kind == "softmax":
        return kernels.attention(q, k, v, **options)
    return kernels.weighted_attention(weight_functions.softmax, q, k, v, **options)


def output_and_gradients(kind, implementation, window, zigzag, inputs, weights):
    *arrays, ids = inputs

    def loss(arrays):
        q, k, v, *lam = arrays
        out = attend(kind, implementation, window, zigzag, q, k, v, lam[0] if lam else None, ids)
        return jnp.sum(out * weights), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))([x for x in arrays if x is not None])
    return out, *grads


def check(mesh, kind, implementation, *, tokens, zigzag, segments, window=None):
    inputs = operands(kind, tokens, segments)
    q, _, v, *_ = inputs
    weights = np.random.default_rng(9).normal(size=(*q.shape[:3], v.shape[3])).astype(np.float32)
    expected = output_and_gradients(kind, "reference", window, False, inputs, weights)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda x: jax.device_put(x, P("data", "context", *(("tensor",) * (x.ndim > 2)))), (*inputs, weights)
        )
        if zigzag:
            placed = jax.jit(functools.partial(jax.tree.map, context.to_zigzag))(placed)
        found = output_and_gradients(kind, implementation, window, zigzag, placed[:-1], placed[-1])
        if zigzag:
            found = jax.jit(functools.partial(jax.tree.map, context.from_zigzag))(found)
    for name, actual, wanted in zip(("out", "dq", "dk", "dv", "dλ"), found, expected, strict=False):
        np.testing.assert_allclose(actual, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize("kind", marked(["diff", "softmax", "weighted"], fast=["diff"]))
def test_sharded_rows_equal_whole_ones(mesh_of, monkeypatch, kind):
    monkeypatch.setattr("difftx.kernels.xla.CHUNK_WEIGHTS", 96 * 5)  # Several chunks, one partly filled.
    mesh = mesh_of(context=4, tensor=2)
    check(mesh, kind, "xla", tokens=96, zigzag=True, segments=True)


@pytest.mark.long
@pytest.mark.parametrize("zigzag", [False, True])
def test_a_window_crosses_the_shards(mesh_of, zigzag):
    check(mesh_of(data=2, context=4), "diff", "xla", tokens=64, zigzag=zigzag, segments=False, window=11)


@pytest.mark.parametrize("zigzag", [False, True])
def test_two_mesh_axes_shard_the_tokens(zigzag):
    inputs, mesh = operands("diff", 24, True), jax.make_mesh((2, 3), ("a", "b"), devices=jax.devices()[:6])
    q, _, v, *_ = inputs
    weights = np.random.default_rng(9).normal(size=(*q.shape[:3], v.shape[3])).astype(np.float32)
    expected = output_and_gradients("diff", "reference", None, False, inputs, weights)
    with jax.set_mesh(mesh):
        placed = jax.device_put((*inputs, weights), P(None, ("a", "b")))
        if zigzag:
            placed = jax.jit(functools.partial(jax.tree.map, context.to_zigzag))(placed)
        found = output_and_gradients("diff", "xla", None, zigzag, placed[:-1], placed[-1])
        if zigzag:
            found = jax.jit(functools.partial(jax.tree.map, context.from_zigzag))(found)
    for actual, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0)


@pytest.mark.interpreter
@pytest.mark.parametrize("implementation", ["pallas_tpu", "splash_wide", "splash"])
def test_tpu_kernels_over_sharded_rows(mesh_of, monkeypatch, implementation):
    if implementation == "splash":  # Use its backward pass for long rows.
        monkeypatch.setattr("difftx.kernels.splash.FUSED_TOKENS", 0)
    kind = "softmax" if implementation == "splash" else "diff"
    check(mesh_of(context=4), kind, implementation, tokens=1024, zigzag=True, segments=True)


@pytest.mark.interpreter
def test_tpu_kernels_with_two_backward_kernels(mesh_of, monkeypatch):
    monkeypatch.setattr("difftx.kernels.pallas_tpu._dq_bytes", lambda _: 2**60)
    check(mesh_of(context=2), "diff", "pallas_tpu", tokens=1024, zigzag=True, segments=True, window=200)


@pytest.mark.interpreter
def test_tpu_kernels_with_one_backward_kernel(mesh_of, monkeypatch):
    """Run the backward pass in Pallas's interpreter for TPUs.

    Unwritten memory is NaN. As on a TPU, a block of dQ that the grid leaves and revisits loses its contents.
    """
    tiles = pallas_tpu.Tiles(128, vmem_mib=16, dq_mib=64)
    monkeypatch.setattr(pallas_tpu, "_tiles", lambda _: tiles)
    backends = kernels.BACKENDS["diff_attention"]
    backward = functools.partial(pallas_tpu.backward, interpret=pltpu.InterpretParams())
    interpreted = dataclasses.replace(backends["pallas_tpu"], backward=backward)
    monkeypatch.setitem(backends, "pallas_tpu", interpreted)
    check(mesh_of(context=2), "diff", "pallas_tpu", tokens=1024, zigzag=True, segments=False)


@pytest.mark.parametrize("devices", [3, 8])
def test_text_order_to_zigzag_order_and_back(mesh_of, devices):
    mesh = jax.make_mesh((devices,), ("context",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:devices])
    x_BT = jnp.arange(4 * devices * 3).reshape(3, 4 * devices)
    with jax.set_mesh(mesh):
        x_BT = jax.device_put(x_BT, P(None, "context"))
        there = jax.jit(context.to_zigzag)(x_BT)
        chunks = np.asarray(x_BT).reshape(3, 2 * devices, 2)
        expected = np.concatenate([chunks[:, [i, 2 * devices - 1 - i]].reshape(3, 4) for i in range(devices)], axis=1)
        np.testing.assert_array_equal(there, expected)
        np.testing.assert_array_equal(jax.jit(context.from_zigzag)(there), x_BT)
        sharding = SequenceSharding.of(there, zigzag=True)
        assert sharding == SequenceSharding("context", devices, True)
        whole = functools.partial(jax.shard_map, in_specs=P(None, "context"), check_vma=False)
        np.testing.assert_array_equal(whole(sharding.gather, out_specs=P())(there), x_BT)
        positions = whole(lambda x: x + sharding.positions(4)[None] - x, out_specs=P(None, "context"))(there)
        np.testing.assert_array_equal(positions[0], there[0])


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("keys_outer", [False, True])
def test_zigzag_visits_visible_tiles_and_balances_devices(keys_outer, window):
    """Each device visits the tiles that its queries can see. Without a window, all devices visit equally many tiles.

    If keys are the outer loop, each device starts every key tile once, in order.
    """
    tiles, block, sharding = 16, 128, SequenceSharding("context", 4, True)
    visits = pallas_tpu_kernels.list_visits(tiles, block, window, sharding, keys_outer=keys_outer)
    for device, row in enumerate(visits):
        positions = np.concatenate([start + np.arange(2) for start in sharding.starts(device, 2)])
        real = row[row & pallas_tpu_kernels._EMPTY == 0]
        seen = {
            (int(positions[pallas_tpu_kernels.query_tile(v)]), int(pallas_tpu_kernels.key_tile(v)))
            for v in real.tolist()
        }
        reach = tiles if window is None else -(-(window - 1) // block)
        assert seen == {(i, j) for i in positions.tolist() for j in range(tiles) if 0 <= i - j <= reach}
        assert len(seen) == len(real)
        if window is None:
            assert len(real) == tiles * (tiles + 1) // 2 // sharding.devices
        if keys_outer:
            firsts = row[row & pallas_tpu_kernels._FIRST != 0]
            np.testing.assert_array_equal(pallas_tpu_kernels.key_tile(firsts), np.arange(tiles))


def test_functions_of_whole_rows_reject_sharded_rows(mesh_of):
    q, k, *_ = operands("diff", 32, False)
    with jax.set_mesh(mesh_of(context=4)):
        q, k = (jax.device_put(x, P(None, "context")) for x in (q, k))
        queries_BC = jnp.zeros((B, 1), jnp.int32)
        with pytest.raises(ValueError, match="but q is sharded along its tokens over 'context'"):
            attention_rows(weight_functions.difference, q, k, queries_BC, weight_argument=jnp.float32(0.5))
