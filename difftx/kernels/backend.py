"""The `Backend` class, its custom gradient (`jax.custom_vjp`), and its execution on a mesh (`jax.shard_map`).

`jax.custom_vjp` wraps `jax.shard_map`, not the reverse. If the custom gradient were inside `shard_map`, JAX would sum
gradients over devices although each device owns its own shard (jax issue 21855).
"""
# Axes: B = batch, T = query tokens, S = key tokens, H = query heads, K = key/value heads,
#   G = groups (2 for A1 and A2, 1 for softmax attention), d = width of a query/key sub-head, E = width of a value head

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.ad_checkpoint import checkpoint_name

from difftx.kernels.context import SequenceSharding, automatic_axes, is_explicit_mesh, with_whole_keys

Struct = jax.Array | jax.ShapeDtypeStruct
WINDOW_SCOPE = "window_"  # Prefix of the scope names that `window_scope` sets.
# Checkpoint name of the arrays that attention's backward pass reads: rotated queries and keys, the output, and the
# arrays saved with it. A remat policy that saves this name avoids a second run of the forward kernel.
SAVED = "saved_attention"
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"  # JAX's primitive for cuDNN's forward pass has no SAVED name.


class AttentionCall(NamedTuple):
    """The arguments of an attention call that determine whether a backend supports it."""

    q: Struct  # [B, T, H, G, d].
    k: Struct  # [B, S, K, G, d].
    v: Struct  # [B, S, K, E].
    segment_ids_BT: Struct | None = None
    window: int | None = None
    sharding: SequenceSharding | None = None


class ShardedArrays(NamedTuple):
    """Arrays grouped by the order of their axes, which tells `per_shard` how to shard them."""

    by_token: Any = ()  # Arrays [B, T, H, …].
    by_head: Any = ()  # Arrays [B, H, T, …].
    by_group: Any = ()  # Arrays [B, H, G, T].


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation of an attention function. It computes the rows and heads of one device."""

    name: str
    # `forward(q, k, v, weight_argument, segment_ids, window=…)` returns the output. Queries and keys have the axis G.
    # The weight argument, such as λ, is [B, T, H] or None. If `backward` is set, `forward` also returns a
    # `ShardedArrays` that is passed to it. If rows are sharded along their tokens, both functions receive `sharding=…`
    # and the keys and values of whole rows.
    forward: Callable[..., Any]
    # Called with the operands, the output, the saved arrays and the output's gradient. None: JAX differentiates
    # `forward`.
    backward: Callable[..., Any] | None = None
    unsupported: Callable[[AttentionCall], str | None] = lambda call: None  # Why the backend rejects a call, or None.
    platform: str | None = None  # The only platform for which the backend compiles. None: all.
    whole_rows: bool = False  # Whether the backend requires whole rows on each device.
    is_pallas: bool = False  # Whether the backend is a Pallas kernel, which XLA cannot partition.
    auto: bool = True  # Whether "auto" may select the backend.

    def why_unsupported(self, call: AttentionCall) -> str | None:
        """Return why the backend cannot serve a call, or None if it can."""
        if self.whole_rows and call.sharding is not None:
            return f"it requires whole rows, but these rows are sharded along their tokens over {call.sharding.axis!r}"
        if self.is_pallas and (axes := automatic_axes(call.q)):
            return (
                f"XLA cannot partition a Pallas kernel over the mesh axes {', '.join(map(repr, axes))}; make the axes "
                "explicit, or call this function inside jax.shard_map"
            )
        return self.unsupported(call)

    def run(self, *operands: jax.Array | None, window: int | None, sharding: SequenceSharding | None) -> jax.Array:
        """Run the backend on each device's shards of q, k, v, the weight argument and the segment ids."""
        if self.backward is not None:
            return _attend(self, window, sharding, *operands)
        with window_scope(window):
            return per_shard(functools.partial(self.forward, window=window), *operands, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The backends of an attention function that were measured on a device. "auto" tries them in this order."""

    function: str  # Such as "diff_attention".
    # What the measurement depends on: "devices" (with the driver), "versions", "kernel source files" and "shapes".
    conditions: dict[str, str]
    milliseconds: dict[str, float]  # Backend → time of a forward and a backward pass, fastest backend first.
    rejected: dict[str, str]  # Backend → reason why "auto" does not try it.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(backend, window, sharding, *inputs):
    return _forward(backend, window, sharding, *inputs)[0]


def _forward(backend, window, sharding, *inputs):
    call = functools.partial(backend.forward, window=window)
    with window_scope(window):
        found = per_shard(call, *inputs, returns_more=True, sharding=sharding)
    out_BTHE, saved = checkpoint_name(found, SAVED)
    return out_BTHE, (*inputs, out_BTHE, saved)


def _backward(backend, window, sharding, residuals, dout_BTHE):
    segment_ids_BT = residuals[-3]  # The last two are the output and the saved arrays.
    call = functools.partial(backend.backward, window=window)

    def with_summed_keys(*operands, sharding):
        """Call the backward pass. Sum dK and dV over devices, because each device has only some of the queries."""
        dq, dk, dv, *rest = call(*operands, sharding=sharding)
        return dq, sharding.scatter(dk), sharding.scatter(dv), *rest

    with window_scope(window):
        grads = per_shard(with_summed_keys if sharding else call, *residuals, dout_BTHE, sharding=sharding)
    # JAX requires the dtype float0 for the gradients of integer inputs.
    no_grad = None if segment_ids_BT is None else np.zeros(segment_ids_BT.shape, jax.dtypes.float0)
    return *grads, no_grad


_attend.defvjp(_forward, _backward)


def window_scope(window: int | None) -> contextlib.AbstractContextManager:
    """Record the window in the scope names of a traced program, from which `plan` counts a kernel's FLOPs."""
    return contextlib.nullcontext() if window is None else jax.named_scope(f"{WINDOW_SCOPE}{window}")


def visible_keys(tokens: int, window: int | None) -> float:
    """Return how many keys a query of a causal row attends to on average, with an error of at most 1/2.

    For a row of T tokens, this is T / 2 without a window, and W (1 - W / 2 T) with a window of W tokens.
    """
    return tokens / 2 if window is None else window * (1 - window / (2 * tokens))


def broadcast_to_tokens(value: jax.Array, q_BTHGd: jax.Array) -> jax.Array:
    """Broadcast a value such as λ from `[]`, `[H]` or `[B, T, H]` to float32 (or wider) `[B, T, H]`, sharded like q."""
    value = value.astype(np.promote_types(value.dtype, jnp.float32))
    if not is_explicit_mesh():
        return jnp.broadcast_to(value, q_BTHGd.shape[:3])
    spec = P(*jax.typeof(q_BTHGd).sharding.spec[:3])
    if value.ndim:  # Reshard before `_attend`, because its gradients are sharded like its operands.
        value = jax.sharding.reshard(value, P(*spec[3 - value.ndim :]))
    return jnp.broadcast_to(value, q_BTHGd.shape[:3], out_sharding=spec)


def deltas(out_BTHE, out2_BTHE, lam_BTH, dout_BTHE) -> tuple[jax.Array, jax.Array]:
    """Return rowsum(dO ∘ O1) and rowsum(dO ∘ O2), float32 `[B, T, H]`. `out_BTHE` is O = O1 - λ O2."""
    dout_BTHE, out_BTHE = dout_BTHE.astype(jnp.float32), out_BTHE.astype(jnp.float32)
    products = (jnp.sum(dout_BTHE * x_BTHE, axis=-1) for x_BTHE in (out_BTHE, out2_BTHE.astype(jnp.float32)))
    # Callers transpose the sums. Without the barrier, XLA on GPUs fuses a sum with its transposition and reads memory
    # uncoalesced. On an H100, this took 0.3 ms of a 3.35 ms backward pass (B = 4, T = 4,096, H = 12, d = 128). The
    # effect on TPUs is not measured.
    product_BTH, delta2_BTH = lax.optimization_barrier(tuple(products))
    return product_BTH + lam_BTH * delta2_BTH, delta2_BTH


def difference(out1_BTHE, out2_BTHE, lam_BTH) -> jax.Array:
    """Compute O1 - λ O2 in float32 and return it in the dtype of O1."""
    out_BTHE = out1_BTHE.astype(jnp.float32) - lam_BTH[..., None] * out2_BTHE.astype(jnp.float32)
    return out_BTHE.astype(out1_BTHE.dtype)


def pad_to(x: jax.Array, length: int, *, axis: int, **options: Any) -> jax.Array:
    """Pad the end of `axis` to `length`, with zeros by default. `options` go to `jnp.pad`, such as mode="edge"."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, **options)


def per_shard(call: Callable[..., Any], *operands, returns_more=False, sharding: SequenceSharding | None = None) -> Any:
    """Run `call` on each device with its shard of batch rows, heads and, if `sharding` is given, tokens.

    The first operand is q. Operands are arrays `[B, T or S, H or K, …]`, arrays `[B, T]`, `ShardedArrays`, or None.
    If `returns_more`, `call` returns an output and a `ShardedArrays`. If not, it returns arrays shaped like operands.
    If `sharding` is None, `call` requires whole rows: raise `ValueError` if rows are sharded along their tokens.
    """
    if not is_explicit_mesh():
        return call(*operands)
    batch, tokens, heads = jax.typeof(operands[0]).sharding.spec[:3]
    if sharding is None and SequenceSharding.of(operands[0], zigzag=False) is not None:
        raise ValueError(
            f"this attention function requires whole rows on each device, but q is sharded along its tokens over "
            f"{tokens!r}; reshard q, k and v first"
        )
    if sharding is not None:
        call = with_whole_keys(call, sharding)
    by_token, row = P(batch, tokens, heads), P(batch, tokens)
    specs: Any = ShardedArrays(by_token, P(batch, heads, tokens), P(batch, heads, None, tokens))

    def spec(operand: Any) -> Any:
        if operand is None:
            return None
        if isinstance(operand, ShardedArrays):
            return specs
        return row if operand.ndim == 2 else by_token

    def is_small(operand: Any) -> bool:
        return operand is not None and not isinstance(operand, ShardedArrays) and operand.ndim <= 3

    # Segment ids and λ are small, so reshard them like the queries. Larger operands must already have this sharding.
    operands = tuple(jax.sharding.reshard(x, spec(x)) if is_small(x) else x for x in operands)
    in_specs, out_specs = tuple(map(spec, operands)), (by_token, specs) if returns_more else by_token
    # With check_vma=True, backends would have to mark each zero-initialised accumulator as device-varying.
    return jax.shard_map(call, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*operands)
