"""Every backend of differential attention, against the oracle and against autodiff of the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import marked
from helpers.kernels_checks import TOLERANCE, relative_error

from difftx import kernels
from difftx.kernels import api, xla
from kernels import oracle

# The interpreter of the GPU kernels takes minutes and requires NPROC (see pallas_gpu_test.py). `make test-compile`
# runs it.
INTERPRETED = [pytest.param(name, marks=pytest.mark.long) for name in ("pallas_tpu", "splash_wide")]
BACKENDS = ["reference", "xla", *INTERPRETED, pytest.param("pallas_gpu", marks=pytest.mark.interpreter)]
WIDTH = {"pallas_gpu": 32}  # The smallest head width that the backend supports. The other backends get 8.
SOFTMAX_BACKENDS = ["reference", "xla", "splash"]
# Scale of q and k for logits up to about 200. float32 rounds such logits by up to 200 · 2**-24, which is then the
# relative error of the attention weights.
LARGE = 8.0
LARGE_TOLERANCE = 2e-5
NAMES = ("out", "dq", "dk", "dv", "dlam")


def inputs(B=2, T=33, H=4, K=4, d=8, dtype="float32", lam=0.4, segments=False, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.normal(size=s) * m for s, m in [((B, T, H, 2, d), scale), ((B, T, K, 2, d), scale), ((B, T, K, 2 * d), 1)]
    )
    lam = rng.normal(size=(B, T, H)) if lam == "per token" else lam
    ids = np.sort(rng.integers(0, 4, (B, T))).astype(np.int32) if segments else None
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    return q, k, v, jnp.asarray(lam, jnp.float32), None if ids is None else jnp.asarray(ids)


def output_and_gradients(backend, q, k, v, lam, ids, window):
    weights = jax.random.normal(jax.random.key(9), (*v.shape[:2], q.shape[2], v.shape[3]))

    def loss(q, k, v, lam):
        out = kernels.diff_attention(q, k, v, lam, segment_ids_BT=ids, window=window, implementation=backend)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    lam_BTH = np.broadcast_to(lam, q.shape[:3])  # Each token's own gradient: their sum may cancel.
    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, lam_BTH)
    return jax.tree.map(np.asarray, (out, *grads))


CASES = {
    "plain": {},
    "one token": {"T": 1},
    "T=130": {"T": 130, "B": 1, "H": 1, "K": 1},
    "T=1000": {"T": 1000, "B": 1, "H": 1, "K": 1},
    "window, segments, groups": {"window": 7, "segments": True, "K": 2, "T": 50},
    "lambda per token": {"lam": "per token", "K": 2},
    "large logits": {"scale": LARGE},
}
RUNS = marked([(case, "float32") for case in CASES], fast=[(case, "float32") for case in CASES if case != "T=1000"])
RUNS += [(case, "bfloat16") for case in ("plain", "window, segments, groups", "lambda per token")]


def arguments_of(case, dtype):
    """Return q, k, v, lam, segment ids and window."""
    options = CASES[case] | {"dtype": dtype}
    window = options.pop("window", None)
    return *inputs(**options), window


@functools.cache  # All backends are compared with the same reference.
def results_of_reference_in_float32(case, dtype):
    """Return the output and gradients of the reference for inputs that are rounded to `dtype`."""
    q, k, v, *others = arguments_of(case, dtype)
    return output_and_gradients("reference", *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), *others)


# For the GPU kernels, pallas_gpu_test.py runs such cases at the sizes of their tiles.
@pytest.mark.parametrize(("case", "dtype"), RUNS)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("reference", marks=pytest.mark.long),  # The oracle of the other backends' gradients.
        "xla",
        *INTERPRETED,
    ],
)
def test_output_and_gradients_equal_the_reference(backend, case, dtype):
    tolerance = LARGE_TOLERANCE if CASES[case].get("scale") == LARGE else TOLERANCE[dtype]
    arguments = arguments_of(case, dtype)
    actual = output_and_gradients(backend, *arguments)
    assert actual[0].dtype == dtype
    assert relative_error(actual[0], oracle.diff_attention(*arguments)) < tolerance
    # The reference gets the same rounded inputs in float32, so the rounding of inputs is not an error of the kernel.
    expected = results_of_reference_in_float32(case, dtype)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        if np.abs(e).max() > 1e-6:  # With one token, dq and dk are 0: the attention weight is always 1.
            assert relative_error(a, e) < tolerance, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_keys_and_a_sink(backend):
    q, k, v, lam, _ = inputs(T=48, d=WIDTH.get(backend, 8))
    k = k.at[:, 8:].set(k[:, 8:9]).at[:, 0].mul(30.0)  # Token 0 has large logits. Keys 8 on are equal.
    actual = output_and_gradients(backend, q, k, v, lam, None, None)
    expected = output_and_gradients("reference", q, k, v, lam, None, None)
    assert relative_error(actual[0], oracle.diff_attention(q, k, v, lam)) < TOLERANCE["float32"]
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert relative_error(a, e) < 1e-5, name  # The terms of dq nearly cancel and have 30 times the rounding errors.


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_twice_gives_the_same_bits(backend):
    arguments = (*inputs(lam="per token", segments=True, d=WIDTH.get(backend, 8)), None)
    first, second = (output_and_gradients(backend, *arguments) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


# With this seed, a segment contains the first query of the second span and all keys of its window.
LAMBDA_PER_TOKEN = inputs(lam="per token", segments=True, K=2, seed=5)


@functools.cache
def output_of_whole_row(window):
    return output_and_gradients("xla", *LAMBDA_PER_TOKEN, window)


@pytest.mark.parametrize(("window", "elements", "split"), [(9, 33 * 40, 20), (None, 33 * 5, 20), (9, 40, 99)])
def test_chunks_and_spans_do_not_change_the_result(monkeypatch, window, elements, split):
    whole = output_of_whole_row(window)
    jax.clear_caches()
    monkeypatch.setattr(xla, "CHUNK_WEIGHTS", elements)
    monkeypatch.setattr(xla, "SPLIT_TOKENS", split)
    for name, a, b in zip(NAMES, output_and_gradients("xla", *LAMBDA_PER_TOKEN, window), whole, strict=True):
        assert relative_error(a, b) < TOLERANCE["float32"], name
    jax.clear_caches()


def test_memory_of_a_long_row_is_not_quadratic():
    T = 16_384
    shapes = [(1, T, 1, 2, 64), (1, T, 1, 2, 64), (1, T, 1, 128)]
    q, k, v = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)

    def loss(q, k, v):
        out = kernels.diff_attention(q, k, v, jnp.float32(0.5), implementation="xla")
        return jnp.sum(out.astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * T  # A quarter of one T × T array in float32.


@pytest.mark.parametrize("backend", SOFTMAX_BACKENDS)
@pytest.mark.parametrize("case", [{}, {"segments": True, "window": 6, "K": 2}])
def test_softmax_attention_equals_differential_attention_at_lambda_zero(backend, case):
    """At λ = 0, differential attention equals softmax attention on each half of V."""
    arguments = dict(case)
    window = arguments.pop("window", None)
    q, k, v, _, ids = inputs(**arguments)
    d = q.shape[-1]
    for half in (v[..., :d], v[..., d:]):
        attend = functools.partial(kernels.attention, window=window, implementation=backend)
        out = jax.jit(attend)(q[:, :, :, 0], k[:, :, :, 0], half, segment_ids_BT=ids)
        both_halves = jnp.concatenate([half, half], axis=-1)
        expected = oracle.diff_attention(q, k, both_halves, 0.0, ids, window)[..., :d]
        assert relative_error(out, expected) < TOLERANCE["float32"]


@pytest.mark.parametrize("backend", BACKENDS[1:3])
@pytest.mark.parametrize(
    "lam",
    [0.5, 1, True, np.float64(0.5), np.asarray(0.5, jnp.bfloat16), np.float32([0.1, 0.2, 0.3, 0.4]), jnp.bfloat16(0.5)],
    ids=lambda lam: f"{type(lam).__name__}{np.shape(lam)}",
)
def test_lambda_is_any_number_or_one_per_head(backend, lam):
    q, k, v, _, _ = inputs()
    wide = np.broadcast_to(np.asarray(lam, np.float64)[..., :], q.shape[:3]) if np.ndim(lam) else np.float64(lam)
    expected = oracle.diff_attention(q, k, v, wide)
    call = functools.partial(kernels.diff_attention, implementation=backend)
    assert relative_error(call(q, k, v, lam), expected) < TOLERANCE["float32"]
    assert relative_error(jax.jit(lambda q: call(q, k, v, lam))(q), expected) < TOLERANCE["float32"]


def test_lambda_per_head_and_in_bfloat16_has_a_gradient_under_jit_and_vmap():
    q, k, v, _, _ = inputs()
    lam_H = jnp.asarray([0.1, 0.2, 0.3, 0.4])

    def loss(lam, backend):
        return jnp.sum(kernels.diff_attention(q, k, v, lam, implementation=backend) ** 2)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    per_token = gradient(jnp.broadcast_to(lam_H, q.shape[:3]), "reference")
    actual = gradient(lam_H, "xla")
    assert relative_error(actual, per_token.sum((0, 1))) < TOLERANCE["float32"]
    short = gradient(jnp.bfloat16(0.5), "xla")  # A scalar gets the sum of its tokens' gradients.
    assert (short.shape, short.dtype) == ((), jnp.bfloat16)
    assert relative_error(short, gradient(jnp.float32(0.5), "reference")) < 2**-8
    lams = jnp.asarray([0.2, 0.7])
    outs = jax.vmap(lambda lam: kernels.diff_attention(q, k, v, lam, implementation="xla"))(lams)
    for out, lam in zip(outs, lams, strict=True):
        assert relative_error(out, oracle.diff_attention(q, k, v, lam)) < TOLERANCE["float32"]


def test_invalid_calls_raise():
    q, k, v, lam, _ = inputs()
    bad = [
        ((q, k, v[..., :8], lam), {}, "twice as wide"),
        ((q[:, :, :, :1], k, v, lam), {}, r"\[B, T, H, 2, d\]"),
        ((q[:, :, :, :1], k[:, :, :, :1], v, lam), {}, r"\[B, T, H, 2, d\]"),
        ((q[:, :, 0], k, v, lam), {}, r"\[B, T, H, 2, d\]"),
        ((q[:, :, :3], k[:, :, :2], v[:, :, :2], lam), {}, "3 query heads cannot share 2"),
        ((q, k, v.astype(jnp.bfloat16), lam), {}, "one floating dtype"),
        ((q.astype(int), k.astype(int), v.astype(int), lam), {}, "int32"),
        ((q, k, v, jnp.ones(3)), {}, r"lam: a scalar, .*; got float32\[3\]"),
        ((q, k, v, 1j), {}, "requires a real lam"),
        ((q, k[:, :5], v[:, :5], lam), {}, "same tokens"),
        ((q, k, v, lam), {"window": 0}, "window=0"),
        ((q, k, v, lam), {"window": 2.5}, r"window=2\.5 must be an integer"),
        ((q, k, v, lam), {"segment_ids_BT": jnp.zeros((2, 3), jnp.int32)}, "segment_ids"),
        ((q, k, v, lam), {"segment_ids_BT": jnp.ones((2, 33), bool)}, "segment_ids_BT must be integers, .*; got bool"),
        ((q, k, v, lam), {"implementation": "cuda"}, "'cuda' is not one of"),
        ((q[..., :4], k[..., :4], v[..., :8], lam), {"implementation": "pallas_tpu"}, "multiple of 8 up to 128; got 4"),
    ]
    for arguments, options, message in bad:
        with pytest.raises(ValueError, match=message):
            kernels.diff_attention(*arguments, **options)
    with pytest.raises(ValueError, match=r"\[B, S, K, d\]"):
        kernels.attention(q[:, :, :, 0], k[:, :, :, 0], v)
    with pytest.raises(ValueError, match="cudnn cannot serve this call: cuDNN requires an NVIDIA GPU"):
        kernels.attention(q[:, :, :, 0], k[:, :, :, 0], v[..., :8], implementation="cudnn")


@pytest.fixture
def pallas_tpu_on_cpu(monkeypatch):
    """Let "auto" try `pallas_tpu` on CPUs, too."""
    backends = kernels.BACKENDS["diff_attention"]
    monkeypatch.setitem(backends, "pallas_tpu", dataclasses.replace(backends["pallas_tpu"], platform="cpu"))
    api._log_once.cache_clear()
    return backends


def test_auto_that_finds_nothing_gives_all_reasons(monkeypatch, pallas_tpu_on_cpu):
    q, k, v, lam, _ = inputs(d=4)
    monkeypatch.delitem(pallas_tpu_on_cpu, "xla")
    with pytest.raises(ValueError, match=r"no backend can serve this call: pallas_tpu: .* got 4"):
        kernels.diff_attention(q, k, v, lam)


def test_auto_logs_its_selection(pallas_tpu_on_cpu, caplog):
    q, k, v, lam, _ = inputs(d=4)
    with caplog.at_level("INFO", logger="difftx.kernels"):
        for _ in range(2):
            kernels.diff_attention(q, k, v, lam)
    assert len(caplog.messages) == 1
    assert "selects 'xla' on cpu (rejected: pallas_tpu: " in caplog.messages[0]
