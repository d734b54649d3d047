"""Check the results of attention backends on this device, and measure their speed.

Compilers and libraries have returned wrong gradients with correct outputs (TransformerEngine#3216, cudnn-frontend#160),
and which backend is fastest depends on the device. `measure` therefore compares a backend with the reference and times
it, for the shapes of a run. `api.use` then makes "auto" follow the results.
"""
# Axes: B = batch, T = tokens, H = query heads, K = key/value heads, G = 2 groups of queries and keys,
#   d = width of a query/key (sub-)head, E = width of a value head, N = blocks of `BLOCK_TOKENS` tokens

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from difftx.kernels import api
from difftx.kernels.backend import AttentionCall, visible_keys

# Largest accepted relative error of a block of tokens. bfloat16 causes errors of 0.01, wrong kernels more than 0.05.
TOLERANCE = 0.05
BLOCK_TOKENS = 64  # Compute errors per block, because one wrong tile of a long row hardly changes the row's norm.
REFERENCE_TOKENS = 4096  # The reference needs O(T²) memory. Compare longer rows with "xla" in float32.
ARGUMENTS, OUTPUT = ("q", "k", "v", "lam"), "the output"
# Share of a device's memory that q, k and v may use. Gradients, the results of two calls and float32 temporaries need
# about 6 times as much as q, k and v.
MEMORY_SHARE = 1 / 12
CPU_BYTES = 2**27  # Limit for q, k and v on CPUs, where larger calls take many seconds.
REPEATS, REPEAT_SECONDS = 5, 0.05  # Report the median of 5 repeats that last at least 0.05 s each.
LONG_SECONDS = 1.0  # A longer call is timed once.


class WrongResultError(Exception):
    """A backend's output or gradients differ from those of the reference."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The shapes of one call of an attention function on one device."""

    function: Literal["diff_attention", "attention"]
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int  # d.
    dtype: str
    has_segments: bool
    window: int | None = None

    def call(self) -> AttentionCall:
        """Return the call with `jax.ShapeDtypeStruct`s as arrays."""
        groups = 2 if self.function == "diff_attention" else 1

        def struct(heads: int, *widths: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.batch, self.tokens, heads, *widths), self.dtype)

        q, k = struct(self.heads, groups, self.width), struct(self.kv_heads, groups, self.width)
        ids_BT = jax.ShapeDtypeStruct((self.batch, self.tokens), jnp.int32) if self.has_segments else None
        return AttentionCall(q, k, struct(self.kv_heads, groups * self.width), ids_BT, self.window)

    @property
    def flops(self) -> float:
        """FLOPs in matrix products of a forward and a backward pass, over the unmasked pairs of tokens.

        A product of width d has 2 d FLOPs per pair. A softmax head needs 2 products in the forward pass and 5 in the
        backward pass. A differential head needs 6 and 10, since kernels with an online softmax compute A1 V and A2 V.
        """
        products = 16 if self.function == "diff_attention" else 7
        visible_pairs = self.batch * self.heads * self.tokens * visible_keys(self.tokens, self.window)
        return products * 2 * self.width * visible_pairs

    def fitting(self) -> "Workload":
        """Return this workload with fewer rows if the memory of this process's first device requires it."""
        device, call = jax.local_devices()[0], self.call()
        memory = (device.memory_stats() or {}).get("bytes_limit")
        limit = CPU_BYTES if memory is None else memory * MEMORY_SHARE
        row_bytes = sum(x.size * x.dtype.itemsize for x in (call.q, call.k, call.v)) // self.batch
        return dataclasses.replace(self, batch=min(self.batch, max(1, int(limit) // row_bytes)))

    def candidates(self) -> list[str]:
        """Return the backends that "auto" may select on this platform and that support the call."""
        backends = api.candidates(self.function)
        return [backend.name for backend in backends if backend.why_unsupported(self.call()) is None]


def measure(workload: Workload, name: str) -> float:
    """Return the milliseconds of a forward and a backward pass of a backend.

    If only some rows fit into the device's memory (`Workload.fitting`), their time is scaled to all rows. Raise
    `WrongResultError` if the output or a gradient is wrong. Errors of compilers and devices propagate.
    """
    full_batch, workload = workload.batch, workload.fitting()
    inputs, dout_BTHE = _inputs(workload)
    program = jax.jit(_with_gradients(workload, name)).lower(inputs, dout_BTHE).compile()
    results = program(inputs, dout_BTHE)
    check(workload, results)

    call = functools.partial(program, inputs, dout_BTHE)
    median = seconds_per_call(call, 1)
    if median < LONG_SECONDS:
        calls = max(1, int(REPEAT_SECONDS / median))
        median = statistics.median(seconds_per_call(call, calls) for _ in range(REPEATS))
    return 1e3 * median * full_batch / workload.batch


def seconds_per_call(call: Callable[[], Any], calls: int) -> float:
    """Return the mean seconds per call over `calls` consecutive calls, without host synchronisation between them."""
    start = time.perf_counter()
    for _ in range(calls - 1):
        call()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) / calls


def check(workload: Workload, results: dict[str, jax.Array]) -> None:
    """Compare the results for the first row and the first key/value head with the reference, block by block.

    Raise `WrongResultError` if a block differs by more than `TOLERANCE`, or if any value is not finite.
    """
    expected = _expected(workload)
    for name in sorted(expected, key=lambda name: name != OUTPUT):  # Output first: if wrong, so are the gradients.
        value = results[name].astype(jnp.float32)
        if not bool(jnp.isfinite(value).all()):
            raise WrongResultError(f"{name} has values that are not finite")
        error = float(_largest_error(value[:1, :, : expected[name].shape[2]], expected[name]))
        if not error < TOLERANCE:
            raise WrongResultError(f"{name} is off by {error:.1%}")


def _largest_error(value: jax.Array, expected: jax.Array) -> jax.Array:
    """Split `[1, T, …]` into blocks of `BLOCK_TOKENS` tokens and return the largest relative error of a block."""

    def norms(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x[0].reshape(x.shape[1], -1), ((0, -x.shape[1] % BLOCK_TOKENS), (0, 0)))
        return jnp.linalg.norm(padded.reshape(-1, BLOCK_TOKENS * padded.shape[1]), axis=1)

    expected_norm_N = norms(expected)
    # Rounding causes larger relative errors in blocks with small values, such as the gradients of the last keys.
    scale_N = jnp.maximum(expected_norm_N, jnp.sqrt(jnp.mean(expected_norm_N**2)) / 4)
    return jnp.max(norms(value - expected) / scale_N)


@functools.cache
def _inputs(workload: Workload) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return random inputs by name and a random gradient of the output."""
    call = workload.call()
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (
        jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys[:3], (call.q, call.k, call.v), strict=True)
    )
    inputs = {"q": q, "k": k, "v": v}
    rows = (workload.batch, workload.tokens, workload.heads)
    if workload.function == "diff_attention":
        inputs["lam"] = jax.random.uniform(keys[3], rows, jnp.float32, 0.2, 0.8)
    return inputs, jax.random.normal(keys[4], (*rows, v.shape[-1]), v.dtype)


def _with_gradients(workload: Workload, name: str) -> Callable[..., dict[str, jax.Array]]:
    """Return a function that maps (inputs, output gradient) to the output and the gradients of the inputs, by name."""
    function = functools.partial(api.attend, workload.function)

    def results(inputs: dict[str, jax.Array], dout_BTHE: jax.Array) -> dict[str, jax.Array]:
        ids_BT = None
        if workload.has_segments:  # Documents of 384 tokens end inside the kernels' tiles.
            ids_BT = jnp.broadcast_to(jnp.arange(workload.tokens, dtype=jnp.int32) // 384, dout_BTHE.shape[:2])
        call = functools.partial(function, segment_ids_BT=ids_BT, window=workload.window, implementation=name)
        out_BTHE, pull = jax.vjp(lambda inputs: call(*(inputs.get(name) for name in ARGUMENTS)), inputs)
        (gradients,) = pull(dout_BTHE)
        return {OUTPUT: out_BTHE} | {f"the gradient of {name}": x for name, x in gradients.items()}

    return results


@functools.cache
def _expected(workload: Workload) -> dict[str, jax.Array]:
    """Compute the reference results in float32 for the first row, the first key/value head and its query heads."""
    inputs, dout_BTHE = _inputs(workload)
    heads = {"k": 1, "v": 1}
    queries = workload.heads // workload.kv_heads
    first = {name: x[:1, :, : heads.get(name, queries)].astype(jnp.float32) for name, x in inputs.items()}
    name = "reference" if workload.tokens <= REFERENCE_TOKENS else "xla"
    with jax.default_matmul_precision("highest"):
        return jax.jit(_with_gradients(workload, name))(first, dout_BTHE[:1, :, :queries].astype(jnp.float32))
