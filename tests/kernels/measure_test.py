"""The comparison of backends with the reference before a run uses them."""

import dataclasses
import itertools
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from difftx import kernels
from difftx.kernels import api, measure, xla
from difftx.kernels.backend import Ranking
from difftx.kernels.measure import Workload, WrongResultError

WORKLOADS = {
    "plain": Workload("diff_attention", 2, 200, 2, 2, 16, "bfloat16", has_segments=False),
    "grouped, segments": Workload("diff_attention", 1, 500, 4, 2, 16, "bfloat16", has_segments=True),
    "window": Workload("diff_attention", 1, 200, 2, 1, 8, "float32", has_segments=False, window=70),
    "softmax": Workload("attention", 2, 500, 4, 2, 16, "bfloat16", has_segments=True),
}


@pytest.fixture
def backend(monkeypatch):
    """Replace parts of the backend "xla" in both functions."""

    def replace(**fields):
        for function in ("diff_attention", "attention"):
            changed = dataclasses.replace(kernels.BACKENDS[function]["xla"], **fields)
            monkeypatch.setitem(kernels.BACKENDS[function], "xla", changed)

    return replace


@pytest.mark.long
@pytest.mark.parametrize("name", ["grouped, segments", "softmax"])
def test_a_correct_backend_is_timed(name):
    workload = WORKLOADS[name]
    assert "xla" in workload.candidates()
    assert 0 < measure.measure(workload, "xla") < 60_000


@pytest.mark.long
def test_a_row_that_is_too_long_for_the_reference_is_measured(monkeypatch):
    monkeypatch.setattr(measure, "REFERENCE_TOKENS", 100)
    workload = dataclasses.replace(WORKLOADS["plain"], batch=1)
    assert measure.measure(workload, "reference") > 0


def test_rows_that_do_not_fit_are_not_measured(monkeypatch):
    """The microbatch of configs/diff_3b.py on one device has 1,024 rows, whose q, k and v need 77 GB."""
    paper = Workload("diff_attention", 1024, 4096, 12, 12, 128, "bfloat16", has_segments=False)
    assert paper.fitting() == dataclasses.replace(paper, batch=1)
    assert WORKLOADS["plain"].fitting() == WORKLOADS["plain"]
    stats = {"bytes_limit": 60 * 10**9}
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    assert paper.fitting().batch == 60 * 10**9 // 12 // (3 * 4096 * 12 * 256 * 2)

    stats["bytes_limit"] = 10**6
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=2.0).__next__)  # A call takes two seconds.
    tiny = Workload("attention", 40, 32, 2, 2, 16, "bfloat16", has_segments=False)
    rows = tiny.fitting().batch
    assert rows == 10**6 // 12 // (3 * 32 * 2 * 16 * 2)
    assert measure.measure(tiny, "xla") == 2000 * 40 / rows


def backward_with(change):
    def backward(*operands, **options):
        return change(*xla.backward(*operands, **options))

    return backward


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda dq, dk, dv, dlam: (dq, -dk, dv, dlam), "the gradient of k is off by 200.0%"),
        pytest.param(
            lambda dq, dk, dv, dlam: (dq, dk, dv * jnp.nan, dlam),
            "the gradient of v has values that are not finite",
            marks=pytest.mark.long,
        ),
        pytest.param(
            lambda dq, dk, dv, dlam: (dq, dk, dv, 1.1 * dlam),
            "the gradient of lam is off by 10",
            marks=pytest.mark.long,
        ),
        # One wrong tile changes the norm of a row of 4,096 tokens by less than the tolerance.
        (lambda dq, dk, dv, dlam: (dq.at[:, 128:192].set(0), dk, dv, dlam), "the gradient of q is off by 100.0%"),
        # A wrong second row is found if it is not finite. Its values are not compared.
        (lambda dq, dk, dv, dlam: (dq.at[1, 0].set(jnp.inf), dk, dv, dlam), "the gradient of q has values that are"),
    ],
)
def test_wrong_gradients_are_found(backend, change, error):
    backend(backward=backward_with(change))
    with pytest.raises(WrongResultError, match=error):
        measure.measure(WORKLOADS["plain"], "xla")


@pytest.mark.parametrize("name", ["grouped, segments", "softmax"])
def test_a_backend_that_ignores_documents_is_found(backend, name):
    workload = WORKLOADS[name]
    real = kernels.BACKENDS[workload.function]["xla"].forward

    def forward(*operands, **options):
        *others, _ = operands
        return real(*others, None, **options)

    backend(forward=forward)
    with pytest.raises(WrongResultError, match="the output is off by"):
        measure.measure(workload, "xla")


@pytest.mark.long
def test_a_backend_that_ignores_the_window_is_found(backend):
    backend(forward=lambda *operands, window: xla.forward(*operands, window=None))
    with pytest.raises(WrongResultError, match="the output is off by"):
        measure.measure(WORKLOADS["window"], "xla")


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "name"),
    [("diff_attention", "pallas_tpu_1024"), ("diff_attention", "splash_wide_1024"), ("attention", "splash_1024")],
)
def test_tiles_of_1024_tokens_are_right_and_measured_only_for_longer_rows(function, name):
    workload = Workload(function, 1, 1100, 2, 1, 16, "float32", has_segments=True)
    backend = kernels.BACKENDS[function][name]
    assert backend.why_unsupported(workload.call()) is None
    assert measure.measure(workload, name) > 0  # Runs in the interpreter. Wrong results raise an error.
    short = dataclasses.replace(workload, tokens=400)
    assert "rows of 400 tokens get" in backend.why_unsupported(short.call())


def test_auto_follows_a_ranking(monkeypatch):
    monkeypatch.setattr(api, "_rankings", {})
    right = kernels.BACKENDS["attention"]["xla"]
    for name in ("first", "second"):
        monkeypatch.setitem(kernels.BACKENDS["attention"], name, dataclasses.replace(right, name=name))
    call = WORKLOADS["softmax"].call()

    def selected():
        return kernels.choose("attention", "auto", call).name

    assert selected() == "xla"
    kernels.use(Ranking("attention", {}, {"second": 1.0, "xla": 2.0}, {"first": "it is wrong"}))
    assert selected() == "second"
    kernels.use(Ranking("attention", {}, {"xla": 2.0}, {"second": "it is wrong"}))
    assert selected() == "xla"
    # A backend that was not measured serves the calls that no measured backend supports.
    kernels.use(Ranking("attention", {}, {"xla": 2.0}, {"second": "it is wrong"}))
    monkeypatch.setitem(
        kernels.BACKENDS["attention"], "xla", dataclasses.replace(right, unsupported=lambda call: "a reason")
    )
    assert selected() == "first"
    kernels.use(Ranking("attention", {}, {}, dict.fromkeys(["first", "second"], "it is wrong")))
    with pytest.raises(ValueError, match="xla: a reason; first: it is wrong; second: it is wrong"):
        jax.eval_shape(lambda: kernels.attention(*(jnp.zeros(x.shape, x.dtype) for x in call[:3])))
