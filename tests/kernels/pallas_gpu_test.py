"""The Mosaic GPU kernels in Pallas's interpreter, with race detection, against independent references.

The interpreter runs wgmma synchronously and requires its operands in shared memory. It therefore detects no race with
an unfinished matrix product, and does not test the register operands of the compiled kernels.
"""

#   B = batch, T = S = length, H = query heads, K = key/value heads, G = 2 groups, d = width, E = 2·d

import dataclasses
import heapq
import os

# Three warpgroups wait for each other in callbacks on XLA's CPU thread pool. The pool has one thread per core, so two
# cores deadlock. JAX reads NPROC when it creates its CPU client, so it must be set before any test uses a device.
os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels_checks import targeting
from jax.experimental.pallas import mosaic_gpu as plgpu

from difftx.kernels import pallas_gpu, pallas_gpu_tiles
from difftx.kernels.backend import AttentionCall
from kernels import oracle

pytestmark = pytest.mark.interpreter

# Relative error of a whole tensor, ‖a - b‖ / ‖b‖. bfloat16 rounds P, dS and the results by 2^-9 each.
TOLERANCE = {"bfloat16": 6e-3, "float32": 2e-6}
# With values of 30 and sharp attention weights, dP - delta cancels, and delta is computed from O rounded to bfloat16.
# In float32, the same case has the usual TOLERANCE.
TOLERANCE_CANCELLING = {"bfloat16": 1.2e-2, "float32": 2e-6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    length: int
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    width: int = 32
    segments: str | None = None
    window: int | None = None
    lam: float | None = None  # None: random per token and head, of both signs, some zero.
    structured: bool = False
    dtype: str = "bfloat16"


CASES = {
    "one_token": Case(length=1, batch=2),
    "under_a_tile": Case(length=63, batch=2, heads=2),
    "one_tile_d64": Case(length=64, width=64),
    "three_tiles_d96": Case(length=130, width=96),
    "two_tiles_d128": Case(length=70, width=128),
    "grouped_queries": Case(length=130, heads=4, kv_heads=2),
    "packed_segments": Case(length=200, batch=2, segments="packed"),
    "five_tiles": Case(length=260),  # More than twice as many tiles as buffers, so each buffer is filled again.
    "window_over_tiles": Case(length=260, window=70),
    "everything": Case(length=200, batch=2, heads=2, segments="packed", window=50, width=64),
    "large_norms_float32": Case(length=130, structured=True, dtype="float32"),
    "float32": Case(length=130, heads=2, segments="packed", dtype="float32"),
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    q_BTHGd: jax.Array
    k_BSKGd: jax.Array
    v_BSKE: jax.Array
    lam_BTH: jax.Array
    segment_ids_BT: jax.Array | None
    dout_BTHE: jax.Array

    def attention(self):
        return self.q_BTHGd, self.k_BSKGd, self.v_BSKE, self.lam_BTH, self.segment_ids_BT


def make_inputs(case):
    rng = np.random.default_rng(0)
    b, t, h, k, d = case.batch, case.length, case.heads, case.kv_heads, case.width
    q_BTHGd, k_BSKGd = rng.normal(size=(b, t, h, 2, d)), rng.normal(size=(b, t, k, 2, d))
    v_BSKE, dout_BTHE = rng.normal(size=(b, t, k, 2 * d)), rng.normal(size=(b, t, h, 2 * d))
    if case.structured:
        # Logits of tens, a sink at the first key, and a repeated key. Rows of attention weights are one-hot to tied.
        q_BTHGd, k_BSKGd = 4 * q_BTHGd, 2 * k_BSKGd
        k_BSKGd[:, 0] = 3 * q_BTHGd.mean(axis=(1, 2), keepdims=False)[:, None]
        k_BSKGd[:, 5::7] = k_BSKGd[:, 5:6]
        v_BSKE[:, :10] *= 30
    lam_BTH = rng.normal(size=(b, t, h)) * (rng.random((b, t, h)) > 0.2)
    if case.lam is not None:
        lam_BTH = np.full((b, t, h), case.lam)
    ids_BT = {
        None: lambda: None,
        "packed": lambda: jnp.asarray(np.sort(rng.integers(0, 4, (b, t)), axis=1), jnp.int32),
        "unordered": lambda: jnp.asarray(rng.integers(-1, 2, (b, t)), jnp.int32),
    }[case.segments]()
    q, k_, v, dout = (jnp.asarray(x, case.dtype) for x in (q_BTHGd, k_BSKGd, v_BSKE, dout_BTHE))
    return Inputs(q, k_, v, jnp.asarray(lam_BTH, jnp.float32), ids_BT, dout)


def run_kernels(case, x):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    static = {"window": case.window, "interpret": interpret}
    out, saved = pallas_gpu.forward(*x.attention(), **static)
    gradients = pallas_gpu.backward(*x.attention(), out, saved, x.dout_BTHE, **static)
    return (out, *saved.by_token, *saved.by_group), gradients


def assert_close(name, actual, expected, tolerance, scale):
    """Check the relative error. If the expected tensor is almost zero, check the error relative to `scale`."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, name
    assert np.isfinite(actual).all(), name
    norm = np.linalg.norm(expected)
    error = np.linalg.norm(actual - expected) / (norm if norm > 1e-5 * scale else scale)
    assert error < tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_equal_the_oracle_without_races(name, capfd):
    case = CASES[name]
    x = make_inputs(case)
    outputs, gradients = run_kernels(case, x)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())

    tolerance = TOLERANCE[case.dtype]
    seen = oracle.visible_keys(case.batch, case.length, x.segment_ids_BT, case.window)
    out, out2, lse = oracle.outputs(*x.attention()[:4], seen)
    assert_close("out", outputs[0], out, tolerance, scale=1.0)
    assert_close("out2", outputs[1], out2, tolerance, scale=1.0)
    assert_close("lse", outputs[2], lse, TOLERANCE["float32"], scale=1.0)

    def loss(q, k, v, lam):
        return jnp.vdot(oracle.naive(q, k, v, lam, seen), x.dout_BTHE.astype(jnp.float32))

    if case.structured:
        tolerance = TOLERANCE_CANCELLING[case.dtype]
    as_float32 = (a.astype(jnp.float32) for a in x.attention()[:4])
    expected = jax.grad(loss, argnums=(0, 1, 2, 3))(*as_float32)
    for which, actual, reference in zip(("dq", "dk", "dv", "dlam"), gradients, expected, strict=True):
        # With one visible key, dq and dk are zero, except that delta is computed from a rounded O.
        assert_close(which, actual, reference, tolerance, scale=jnp.linalg.norm(x.dout_BTHE))
    for gradient, argument in zip(gradients, x.attention(), strict=False):
        assert gradient.dtype == argument.dtype


@pytest.mark.parametrize("segments", [None, "packed", "unordered"])
@pytest.mark.parametrize("window", [None, 1, 2, 63, 64, 65, 66, 128, 129, 130, 1000])
def test_tile_ranges_cover_the_visible_tiles(segments, window):
    tile = pallas_gpu_tiles.TILE
    case = Case(length=6 * tile, batch=3, segments=segments, window=window)
    ids_BT = make_inputs(case).segment_ids_BT
    keys_BN2, queries_BN2 = map(np.asarray, pallas_gpu_tiles.tile_ranges(ids_BT, batch=3, tiles=6, window=window))
    tiles_BNPNS = np.asarray(oracle.visible_keys(3, case.length, ids_BT, window)).reshape(3, 6, tile, 6, tile)
    some_BNN, all_BNN = tiles_BNPNS.any((2, 4)), tiles_BNPNS.all((2, 4))
    for b, i, j in np.ndindex(3, 6, 6):
        (first, q_full), (k_full, end) = keys_BN2[b, i], queries_BN2[b, j]
        if some_BNN[b, i, j]:
            assert first <= j <= i
            assert j <= i < end
        if q_full <= j < i:
            assert all_BNN[b, i, j]
        if j < i < k_full:
            assert all_BNN[b, i, j]
        if segments is None and first <= j < i:  # Without segments, no tile is masked or visited in vain.
            assert some_BNN[b, i, j]
            assert (j >= q_full) == (i < k_full) == all_BNN[b, i, j]


def idle_share(costs, sms=132):
    """Start CTAs in the given order, each on the SM that is free first; return the share of time that SMs are idle."""
    free = [0] * sms
    for cost in costs:
        heapq.heappush(free, heapq.heappop(free) + cost)
    return 1 - sum(costs) / (max(free) * sms)


@pytest.mark.parametrize(
    ("batch", "length", "most", "row_by_row"), [(4, 4096, 0.002, 0.03), (16, 1024, 0.012, 0.04), (4, 1024, 0.012, 0.16)]
)
def test_ctas_start_in_an_order_that_leaves_few_sms_idle(batch, length, most, row_by_row):
    heads, width = 12, 128
    count = length // pallas_gpu_tiles.TILE
    grid = pallas_gpu_tiles.grid_of(batch * heads, count, row_bytes=length * 4 * width * 2)
    costs = [count - tile for _, tile, _ in np.ndindex(grid)]  # Tile 0 attends to all tiles, or all attend to it.
    assert len(costs) == batch * heads * count
    assert idle_share(costs) < most
    assert idle_share([count - tile for _, tile in np.ndindex(batch * heads, count)]) > row_by_row


def test_rows_that_run_together_fit_in_l2():
    for rows, row_bytes in [(48, 4 * 2**20), (12, 16 * 2**20), (7, 2**20), (12, 2**30)]:
        groups, _, group = pallas_gpu_tiles.grid_of(rows, 64, row_bytes=row_bytes)
        assert groups * group == rows
        assert group == 1 or group * row_bytes <= 32 * 2**20


def call_of_width(width, dtype):
    shapes = ((1, 64, 2, 2, width), (1, 64, 2, 2, width), (1, 64, 2, 2 * width))
    return AttentionCall(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def test_unsupported_names_the_reason():
    assert pallas_gpu.unsupported(call_of_width(64, jnp.float32)) is None  # The interpreter runs any dtype.
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"):
        with targeting(kind):
            assert pallas_gpu.unsupported(call_of_width(64, jnp.bfloat16)) is None
            assert "bfloat16, not float32" in pallas_gpu.unsupported(call_of_width(64, jnp.float32))
            assert "head width 80" in pallas_gpu.unsupported(call_of_width(80, jnp.bfloat16))
    others = ["NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA GeForce RTX 4090", "NVIDIA B200", "Tesla V100-SXM2-16GB"]
    for kind in others:
        with targeting(kind):
            assert f"found {kind}" in pallas_gpu.unsupported(call_of_width(64, jnp.bfloat16))


@pytest.mark.parametrize(("softmax", "producer", "fits"), [(184, 136, True), (184, 144, False), (240, 32, False)])
def test_warpgroups_ask_for_no_more_registers_than_the_cta_has(softmax, producer, fits):
    """(184, 144) made a kernel hang on an H100: benchmarks/records/2026-11-26_h100_first_run.md."""
    if fits:
        pallas_gpu_tiles.Registers(softmax, producer)
    else:
        with pytest.raises(AssertionError, match="the counts of 3 warpgroups sum to"):
            pallas_gpu_tiles.Registers(softmax, producer)
