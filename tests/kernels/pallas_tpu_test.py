"""Pallas TPU kernels in the TPU interpreter, with its race detector on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from difftx.kernels import pallas_tpu
from difftx.kernels.backend import AttentionCall
from kernels import oracle

# Axes: as in difftx/kernels/pallas_tpu.py.

pytestmark = pytest.mark.interpreter

BLOCK = 128
# Relative errors in the Frobenius norm. In float32, they come from the rounding of sums of 300 terms. In bfloat16, they
# come from the 8 bits of probabilities and results.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    t: int
    d: int = 64
    b: int = 1
    h: int = 2
    kv_heads: int = 2
    dtype: type = jnp.float32
    segments: str | None = None  # "packed", "one", "interleaved", "early" or "late"
    window: int | None = None
    structured: bool = False  # Large norms, a sink, repeated keys.
    lam: float | None = None  # None: random per token and head, including 0 and 1.

    def __str__(self):
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        changed = {n: x for n, x in vars(self).items() if x != defaults[n]}
        return "-".join(f"{n}={getattr(x, '__name__', x)}" for n, x in changed.items())


CASES = [
    Case(1),
    Case(63, b=2, lam=0.0),
    Case(130, window=1),
    Case(130, dtype=jnp.bfloat16, structured=True, b=2),
    Case(300),
    Case(300, dtype=jnp.bfloat16, lam=-0.7),
    Case(300, d=96, h=1, kv_heads=1, window=150),
    Case(300, d=128, h=1, kv_heads=1, dtype=jnp.bfloat16, lam=1.0),
    Case(300, b=2, h=2, kv_heads=1, segments="packed"),
    Case(300, b=2, h=3, kv_heads=1, segments="packed", window=70, dtype=jnp.bfloat16),
    Case(300, segments="interleaved"),
    Case(300, h=1, kv_heads=1, segments="early"),
    Case(300, h=1, kv_heads=1, segments="late"),
    Case(520, h=1, kv_heads=1, window=140),
    Case(520, h=1, kv_heads=1, segments="one"),
    Case(300, structured=True, b=2),
]
TWO_KERNEL_CASES = [(case, 2) for case in CASES if case.segments == "packed"]


def make_inputs(case):
    rng = np.random.default_rng(case.t)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    b, t, h, k, d = case.b, case.t, case.h, case.kv_heads, case.d
    q, key, v, dout = normal(b, t, h, 2, d), normal(b, t, k, 2, d), normal(b, t, k, 2 * d), normal(b, t, h, 2 * d)
    if case.structured:
        q *= 2.0  # logits 8 +- 5, up to 40
        q[..., :2] += (12.0, 8.0)
        key[..., 1] += 8.0
        key[:, 0, ..., 0] += 4.0  # A sink: 6 is added to the logits of the first key.
        key[:, t // 2 : t // 2 + 16] = key[:, t // 2 : t // 2 + 1]
        v[:, 0] += 4.0
    lam = np.full((b, t, h), case.lam, np.float32) if case.lam is not None else normal(b, t, h)
    if case.lam is None:
        lam[:, ::5], lam[:, 1::5] = 0.0, 1.0
    token = np.broadcast_to(np.arange(t, dtype=np.int32), (b, t))
    start = np.arange(b, dtype=np.int32)[:, None] * 7
    ids = {
        None: None,
        "one": token * 0 + 3,
        "packed": (token + start) // 90,  # One boundary inside each tile of 128.
        "interleaved": token % 3,
        "early": (token >= 100).astype(np.int32),  # Tile 0 has two segments, later tiles one.
        "late": (token >= 200).astype(np.int32),  # Tile 1 has two segments, other tiles one.
    }[case.segments]
    cast = [jnp.asarray(x, case.dtype) for x in (q, key, v)]
    segment_ids = None if ids is None else jnp.asarray(ids)
    return *cast, jnp.asarray(lam), segment_ids, jnp.asarray(dout, case.dtype)


def rounding_limit(case, inputs, seen_BTT):
    """Return the relative errors of dq, dk and dv in float64 arithmetic if only O and O2 are rounded.

    The backward pass computes delta = rowsum(dO * O) from outputs in q's dtype. If keys share a large component, the
    terms of dQ nearly cancel, and this rounding alone can cause an error of 1 %.
    """
    q, k, v, lam, _, dout = (x if x is None else np.asarray(x.astype(jnp.float32), np.float64) for x in inputs)
    group = case.h // case.kv_heads
    wide_k, wide_v = k.repeat(group, axis=2), v.repeat(group, axis=2)
    out, out2, lse = oracle.outputs(*inputs[:4], seen_BTT)
    s = np.einsum("bthgd,bshgd->bhgts", q, wide_k) / np.sqrt(case.d)
    p1, p2 = np.moveaxis(np.where(seen_BTT[:, None, None], np.exp(s - lse[..., None]), 0), 2, 0)
    dp = np.einsum("bthe,bshe->bhts", dout, wide_v)

    def column(x_BTH):
        return np.moveaxis(x_BTH, 1, 2)[..., None]

    def gradients(out, out2):
        delta2 = (dout * out2).sum(axis=-1)
        delta1 = (dout * out).sum(axis=-1) + lam * delta2
        ds1 = p1 * (dp - column(delta1))
        ds2 = column(lam) * p2 * (column(delta2) - dp)
        ds = np.stack([ds1, ds2], axis=2) / np.sqrt(case.d)
        dq = np.einsum("bhgts,bshgd->bthgd", ds, wide_k)
        dk = np.einsum("bhgts,bthgd->bshgd", ds, q)
        return dq, dk.reshape(*k.shape[:3], group, 2, case.d).sum(axis=3)

    rounded = (np.asarray(jnp.asarray(x, case.dtype).astype(jnp.float32)) for x in (out, out2))
    pairs = zip(gradients(*rounded), gradients(out, out2), strict=True)
    return [relative_error(got, want) for got, want in pairs] + [0.0]  # dV needs no delta


def run(case, inputs):
    """Return (out, out2, lse) and (dq, dk, dv, dlam), and assert that the interpreter found no race."""
    interpret = pltpu.InterpretParams(detect_races=True)
    options = {"window": case.window, "interpret": interpret}

    @jax.jit
    def both(q, k, v, lam, segment_ids, dout):
        out, saved = pallas_tpu.forward(q, k, v, lam, segment_ids, **options)
        grads = pallas_tpu.backward(q, k, v, lam, segment_ids, out, saved, dout, **options)
        out2_BHTE, lse = (saved.by_head[0], saved.by_group[0])
        return (out, jnp.moveaxis(out2_BHTE, 1, 2), lse), grads

    results = jax.block_until_ready(both(*inputs))
    assert not interpret_pallas_call.races.races_found
    return results


def use_backward(monkeypatch, kernels):
    """Make the backward pass use one kernel or two, whatever the length of the rows."""
    tiles = pallas_tpu.Tiles(BLOCK, vmem_mib=16, dq_mib={1: 8, 2: 0}[kernels])
    monkeypatch.setattr(pallas_tpu, "_tiles", lambda d: tiles)


def relative_error(got, want):
    # Some gradients are 0 in exact arithmetic, as in a row with one visible key. They require the floor.
    floor = 0.1 * np.sqrt(want.size)
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), floor)


def assert_close(name, got, want, tolerance):
    got, want = (np.asarray(x.astype(np.float32), np.float64) for x in (got, want))
    assert np.isfinite(got).all(), name
    error = relative_error(got, want)
    assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance}"


@pytest.mark.parametrize(("case", "backward_kernels"), [(case, 1) for case in CASES] + TWO_KERNEL_CASES, ids=str)
def test_forward_and_gradients_equal_the_oracle(case, backward_kernels, monkeypatch):
    use_backward(monkeypatch, backward_kernels)
    inputs = make_inputs(case)
    q, k, v, lam, segment_ids, dout = inputs
    seen = oracle.visible_keys(case.b, case.t, segment_ids, case.window)
    outputs, grads = run(case, inputs)
    tolerance = TOLERANCE[case.dtype]
    for name, got, want in zip(("out", "out2", "lse"), outputs, oracle.outputs(q, k, v, lam, seen), strict=True):
        assert_close(name, got, want, tolerance)
    assert [x.dtype for x in outputs] == [case.dtype, case.dtype, jnp.float32]

    wide = [x.astype(jnp.float32) for x in (q, k, v, lam)]
    want_grads = jax.vjp(lambda *xs: oracle.naive(*xs, seen), *wide)[1](dout.astype(jnp.float32))
    limits = [*rounding_limit(case, inputs, seen), 0.0]
    names = ("dq", "dk", "dv", "dlam")
    for name, got, want, limit in zip(names, grads, want_grads, limits, strict=True):
        assert_close(name, got, want, tolerance + limit)
    assert [x.dtype for x in grads[:3]] == [case.dtype] * 3


@pytest.mark.parametrize("backward_kernels", [1, 2])
def test_two_runs_are_bitwise_equal(backward_kernels, monkeypatch):
    use_backward(monkeypatch, backward_kernels)
    case = Case(300, dtype=jnp.bfloat16, h=2, kv_heads=1, segments="packed")
    inputs = make_inputs(case)
    for first, second in zip(*(jax.tree.leaves(run(case, inputs)) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_future_token_changes_nothing(monkeypatch):
    use_backward(monkeypatch, 2)
    case = Case(200, h=1, kv_heads=1)
    q, k, v, lam, segment_ids, dout = make_inputs(case)
    (before, _, _), _ = run(case, (q, k, v, lam, segment_ids, dout))
    (after, _, _), _ = run(case, (q, k.at[:, 150:].add(1), v.at[:, 150:].add(1), lam, None, dout))
    np.testing.assert_array_equal(before[:, :150], after[:, :150])
    assert (before[:, 150:] != after[:, 150:]).any()


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 400])
def test_visits_are_the_tiles_with_a_visible_score(window):
    tiles, block = 5, 128
    i = np.arange(tiles * block)
    distance = i[:, None] - i[None, :]
    seen = (distance >= 0) & (distance < (window or np.inf))
    by_tile = seen.reshape(tiles, block, tiles, block)
    for keys_outer in (False, True):
        visits = pallas_tpu.kernels.list_visits(tiles, block, window, keys_outer=keys_outer)
        pairs = [(pallas_tpu.kernels.query_tile(x), pallas_tpu.kernels.key_tile(x)) for x in visits]
        assert sorted(pairs) == list(zip(*np.nonzero(by_tile.any(axis=(1, 3))), strict=True))
        masked = {p for p, x in zip(pairs, visits, strict=True) if x & pallas_tpu.kernels.MASKED}
        assert masked == {p for p in pairs if not by_tile[p[0], :, p[1]].all()}


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "reason"),
    [
        (8, 64, jnp.float16, "bfloat16 and float32"),
        (8, 256, jnp.bfloat16, "up to 128"),
        (2**20, 64, jnp.bfloat16, "scalar"),
    ],
)
def test_unsupported_names_the_reason(tokens, width, dtype, reason):
    def why(tokens, width, dtype):
        shapes = ((1, tokens, 2, 2, width), (1, tokens, 2, 2, width), (1, tokens, 2, 2 * width))
        return pallas_tpu.unsupported(AttentionCall(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))

    assert why(8, 64, jnp.bfloat16) is None
    assert reason in why(tokens, width, dtype)
