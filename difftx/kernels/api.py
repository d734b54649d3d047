"""The attention functions, and the selection of a backend for each call.

If the caller names a backend, that backend serves the call or raises an error with the reason. "auto" selects the first
backend that runs on the platform and supports the call, and logs the choice once. It tries backends in the order of the
measured ranking (`use`), or in the order of `BACKENDS` if there is no ranking.

Under a mesh with explicit axes, a backend runs inside `jax.shard_map` over batch and heads. The shardings come from the
arrays' types. If rows are sharded along their tokens, each device gathers the keys and values of whole rows. Under a
mesh with automatic axes, XLA partitions the backend's operations, so Pallas backends cannot be used. Inside the
caller's own `jax.shard_map`, a backend computes the shard of its device.

If the caller names a Pallas backend of another platform, the Pallas interpreter runs it. Since a training step would
then take minutes, `why_unavailable` rejects such a backend for training.
"""
# Axes: B = batch, T = query tokens, S = key tokens (= T), H = query heads, K = key/value heads,
#   G = groups of queries and keys: 2 in differential attention (group 0 computes the attention weights A1, group 1
#   computes A2), 1 in softmax attention,
#   d = width of a query/key sub-head, E = width of a value head (G d, except in `weighted_attention`)

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from difftx.kernels import reference, target, weight_functions, xla
from difftx.kernels.backend import AttentionCall, Backend, Ranking, broadcast_to_tokens, per_shard
from difftx.kernels.context import SequenceSharding, is_explicit_mesh
from difftx.kernels.weight_functions import WeightFunction

type Function = Literal["diff_attention", "attention", "weighted_attention"]


def _imported(name: str, **options: Any) -> Callable[..., Any]:
    """Return the function named "module:function" with `options` bound. Its module is imported at the first call.

    Pallas takes more than half a second to import, and commands on CPUs do not need it.
    """
    module, function = name.split(":")

    def call(*args: Any, **more: Any) -> Any:
        return getattr(importlib.import_module(f"difftx.kernels.{module}"), function)(*args, **more, **options)

    return call


def _pallas_tpu(name: str, **tiles: int) -> Backend:
    functions = (_imported(f"pallas_tpu:{function}", **tiles) for function in ("forward", "backward", "unsupported"))
    return Backend(name, *functions, platform="tpu", is_pallas=True)


def _splash(name: str, **tiles: int) -> Backend:
    functions = _imported("splash:attention", **tiles), None, _imported("splash:unsupported", **tiles)
    return Backend(name, *functions, platform="tpu", is_pallas=True)


def _pallas_gpu_unsupported(call: AttentionCall) -> str | None:
    try:
        from difftx.kernels import pallas_gpu
    except ImportError:  # Some jaxlib builds lack Mosaic GPU.
        return "this jaxlib has no Mosaic GPU"
    return pallas_gpu.unsupported(call)


_PALLAS_GPU = Backend(
    "pallas_gpu",
    _imported("pallas_gpu:forward"),
    _imported("pallas_gpu:backward"),
    _pallas_gpu_unsupported,
    platform="gpu",
    whole_rows=True,
    is_pallas=True,
)
_CUDNN = Backend(
    "cudnn", _imported("cudnn:attention"), None, _imported("cudnn:unsupported"), platform="gpu", whole_rows=True
)
_XLA = Backend("xla", xla.forward, xla.backward)

# The backends of each attention function. Without a ranking, "auto" tries them in this order. The order for Hopper was
# measured (an H100, d = 64 and 128, causal rows of 4,096 tokens). Elsewhere, library kernels come before ours. "auto"
# never selects "reference", which exists for tests.
_LISTS = {
    "diff_attention": (
        Backend("reference", functools.partial(reference.weighted_attention, weight_functions.difference), auto=False),
        _splash("splash_wide"),
        _splash("splash_wide_1024", max_side=1024),
        _pallas_tpu("pallas_tpu"),
        _pallas_tpu("pallas_tpu_1024", max_side=1024),
        _PALLAS_GPU,
        _CUDNN,
        _XLA,
    ),
    "attention": (
        Backend("reference", functools.partial(reference.weighted_attention, weight_functions.softmax), auto=False),
        _splash("splash"),
        _splash("splash_1024", max_side=1024),
        _CUDNN,
        _XLA,
    ),
    "weighted_attention": (
        Backend("reference", reference.weighted_attention, auto=False),
        Backend("xla", xla.weighted_attention),
    ),
}
BACKENDS = {function: {backend.name: backend for backend in backends} for function, backends in _LISTS.items()}

_SHAPES = {
    "diff_attention": "query [B, T, H, 2, d], key [B, S, K, 2, d] and value [B, S, K, 2 d], twice as wide as a key",
    "attention": "query [B, T, H, d] and key, value [B, S, K, d]",
    "weighted_attention": "query [B, T, H, G, d], key [B, S, K, G, d], value [B, S, K, E], or query and key without G",
}

log = logging.getLogger(__name__)

_rankings: dict[str, Ranking] = {}  # Attention function → the ranking of backends that "auto" follows.


def diff_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lam: jax.typing.ArrayLike,
    *,
    scale: jax.typing.ArrayLike | None = None,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
    zigzag: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Compute causal differential attention, (softmax(Q1 K1ᵀ/√d) - λ softmax(Q2 K2ᵀ/√d)) V (arXiv 2410.05258, Eq. 1).

    Args:
        query: Queries `[B, T, H, 2, d]`, float32 or bfloat16. Index 0 of the fourth axis holds Q1, index 1 holds Q2.
        key: Keys `[B, S, K, 2, d]`, with S = T. Query head n uses key/value head n // (H / K).
        value: Values `[B, S, K, 2 d]`, twice as wide as a query/key sub-head.
        lam: λ as a scalar, per head `[H]`, or per token and head `[B, T, H]`. A Python number or an array of any real
            dtype; the computation uses float32 or wider.
        scale: Scalar by which Q Kᵀ is multiplied, as in `jax.nn.dot_product_attention`. None: 1/√d. The queries are
            multiplied by `scale` √d and rounded to their dtype.
        segment_ids_BT: Integers `[B, T]`. A token attends only to tokens of its own segment. None: each row is one
            segment.
        window: A token attends to itself and the `window - 1` tokens before it. None: it attends to all tokens up to
            itself.
        zigzag: Whether tokens are in zig-zag order (`context.to_zigzag`), if rows are sharded along their tokens.
        implementation: Name of a backend, or "auto".

    Returns:
        `[B, T, H, E]` in the dtype of the values.

    Raises:
        ValueError: Shapes or dtypes do not match, or no backend can serve the call.
    """
    options = {"segment_ids_BT": segment_ids_BT, "window": window, "zigzag": zigzag, "implementation": implementation}
    return attend("diff_attention", query, key, value, lam, scale=scale, **options)


def attention(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """Compute causal softmax attention, as used by the baseline Transformer.

    `query` is `[B, T, H, d]`, and `key` and `value` are `[B, S, K, d]`. The result is `[B, T, H, d]` in the dtype of
    the values. It equals `jax.nn.dot_product_attention` with `is_causal=True`. Keyword arguments and errors are the
    same as for `diff_attention`.
    """
    return attend("attention", query, key, value, None, **options)


def weighted_attention(
    weight_function: WeightFunction,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    weight_argument: jax.typing.ArrayLike | None = None,
    **options: Any,
) -> jax.Array:
    """Compute causal attention with any function from logits to attention weights (`difftx.kernels.weight_functions`).

    Fused kernels do not support such functions, so "auto" uses XLA operations on chunks of queries. Other keyword
    arguments, errors and the pairing of query heads with key/value heads are the same as for `diff_attention`.

    Args:
        weight_function: Function from logits to attention weights, such as `weight_functions.softmax_with_sink`.
        query: Queries `[B, T, H, d]`, or `[B, T, H, G, d]` if `weight_function` takes G arrays of logits.
        key: Keys `[B, S, K, d]` or `[B, S, K, G, d]`.
        value: Values `[B, S, K, E]` of any width E.
        weight_argument: Last argument of `weight_function` after the logits, such as λ or the logit of a sink, if it
            takes one. A real number, or a real array of shape `[]`, `[H]` or `[B, T, H]`.

    Returns:
        `[B, T, H, E]` in the dtype of the values.
    """
    options |= {"weight_function": weight_function}
    return attend("weighted_attention", query, key, value, weight_argument, **options)


def attend(
    function: Function,
    q: jax.Array,
    k: jax.Array,
    v_BSKE: jax.Array,
    weight_argument: jax.typing.ArrayLike | None,
    *,
    weight_function: WeightFunction | None = None,
    scale: jax.typing.ArrayLike | None = None,
    segment_ids_BT: jax.typing.ArrayLike | None = None,
    window: int | None = None,
    zigzag: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Call an attention function by name. Queries and keys may have the group axis G for every function.

    `weight_argument` is λ for `diff_attention` and None for `attention`. Only `weighted_attention` uses
    `weight_function`. `diff_attention` documents the other arguments.
    """
    q_BTHGd, k_BSKGd = (x[:, :, :, None] if x.ndim == 4 else x for x in (q, k))
    if scale is not None:  # Scale the queries, because backends always multiply the logits by 1/√d.
        factor = jnp.asarray(scale, np.promote_types(q.dtype, jnp.float32)) * q.shape[-1] ** 0.5
        q_BTHGd = (q_BTHGd.astype(factor.dtype) * factor).astype(q.dtype)
    if segment_ids_BT is not None:
        segment_ids_BT = jnp.asarray(segment_ids_BT)
        if not jnp.issubdtype(segment_ids_BT.dtype, jnp.integer):
            raise ValueError(f"segment_ids_BT must be integers, one per segment; got {segment_ids_BT.dtype}")
        segment_ids_BT = segment_ids_BT.astype(jnp.int32)
    call = AttentionCall(q_BTHGd, k_BSKGd, v_BSKE, segment_ids_BT, window, SequenceSharding.of(q_BTHGd, zigzag=zigzag))
    _check_shapes(function, call, (q, k, v_BSKE))
    backend = choose(function, implementation, call)
    if weight_argument is not None:
        weight_argument = jnp.asarray(weight_argument)
        _check_broadcastable(function, weight_argument, q_BTHGd)
        weight_argument = broadcast_to_tokens(weight_argument, q_BTHGd)
    if 0 in q.shape[:2]:  # No rows or no tokens. Backends require at least one token.
        sharding = jax.P(*jax.typeof(q_BTHGd).sharding.spec[:3]) if is_explicit_mesh() else None
        return jnp.zeros((*q.shape[:3], v_BSKE.shape[3]), v_BSKE.dtype, out_sharding=sharding)
    if function == "weighted_attention":
        backend = dataclasses.replace(backend, forward=functools.partial(backend.forward, weight_function))
    operands = q_BTHGd, k_BSKGd, v_BSKE, weight_argument, segment_ids_BT
    return backend.run(*operands, window=window, sharding=call.sharding)


def largest_logits(
    q_BTHGd: jax.Array,
    k_BSKGd: jax.Array,
    *,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
    zigzag: bool = False,
) -> jax.Array:
    """Return the largest unmasked logit of each head and group, float32 `[H, G]`.

    Backends do not return their logits, so XLA computes Q Kᵀ / √d again, in chunks of queries. The result has no
    gradient. The arguments have the same meaning as in `attend`.
    """
    call, sharding = functools.partial(xla.largest_logits, window=window), SequenceSharding.of(q_BTHGd, zigzag=zigzag)
    q_BTHGd, k_BSKGd = jax.lax.stop_gradient((q_BTHGd, k_BSKGd))
    by_query_BTHG = per_shard(call, q_BTHGd, k_BSKGd, k_BSKGd, None, segment_ids_BT, sharding=sharding)
    return jnp.max(by_query_BTHG, axis=(0, 1))


def why_unavailable(function: str, implementation: str, call: AttentionCall) -> str | None:
    """Return why a backend cannot train or generate on this device, or None if it can or is "auto"."""
    if implementation == "auto":
        return None
    backend = BACKENDS[function][implementation]
    platform = target.platform()
    if backend.platform is not None and backend.platform != platform:
        return f"this backend requires a {backend.platform.upper()}, and JAX runs on {platform.upper()} here"
    return backend.why_unsupported(call)


def use(ranking: Ranking) -> None:
    """Make "auto" follow a ranking in all later calls of this process."""
    _rankings[ranking.function] = ranking


def rankings() -> Mapping[str, Ranking]:
    """Return the measured rankings of backends that "auto" follows, by attention function."""
    return _rankings


def candidates(function: str) -> list[Backend]:
    """Return the backends that "auto" may select on this platform, in the order of `BACKENDS`."""
    platforms = (None, target.platform())
    return [backend for backend in BACKENDS[function].values() if backend.auto and backend.platform in platforms]


def choose(function: str, implementation: str, call: AttentionCall) -> Backend:
    """Return the backend for a call, or raise `ValueError` if the call is invalid or no backend can serve it."""
    _check_common(call.q, call.k, call.v, call.segment_ids_BT, call.window)
    if implementation != "auto":
        backend = BACKENDS[function].get(implementation)
        if backend is None:
            names = ", ".join(BACKENDS[function])
            raise ValueError(f"{function}: implementation={implementation!r} is not one of auto, {names}")
        if reason := backend.why_unsupported(call):
            raise ValueError(f"{function}: {implementation} cannot serve this call: {reason}")
        return backend
    by_name = {backend.name: backend for backend in candidates(function)}
    ranking = _rankings.get(function, Ranking(function, {}, {}, {}))
    rejected: list[str] = []
    for name in dict.fromkeys((*ranking.milliseconds, *by_name)):
        if name not in by_name:
            continue
        reason = ranking.rejected.get(name) or by_name[name].why_unsupported(call)
        if reason is None:
            _log_once(function, name, target.device_kind(), "; ".join(rejected))
            return by_name[name]
        rejected.append(f"{name}: {reason}")
    raise ValueError(f"{function}: no backend can serve this call: {'; '.join(rejected)}")


@functools.cache
def _log_once(function: str, name: str, device: str, rejected: str) -> None:
    log.info("%s: 'auto' selects %r on %s%s", function, name, device, rejected and f" (rejected: {rejected})")


def _check_shapes(function: Function, call: AttentionCall, given: Sequence[jax.Array]) -> None:
    q, k, v = call.q.shape, call.k.shape, call.v.shape
    fits = len(q) == len(k) == 5 and len(v) == 4 and q[3:] == k[3:] and v[:3] == k[:3]
    groups = {"diff_attention": 2, "attention": 1}.get(function)  # In these functions, values have width `groups` d.
    if not fits or (groups is not None and (groups, groups * q[4]) != (q[3], v[3])):
        raise ValueError(f"{function} expects {_SHAPES[function]}; got {', '.join(str(x.shape) for x in given)}")


def _check_broadcastable(function: str, value: jax.Array, q: jax.Array) -> None:
    if value.shape not in ((), q.shape[2:3], q.shape[:3]) or not jnp.isrealobj(value):
        name = "lam" if function == "diff_attention" else "weight_argument"
        raise ValueError(
            f"{function} requires a real {name}: a scalar, [H] = {q.shape[2:3]} or [B, T, H] = {q.shape[:3]}; "
            f"got {value.dtype}{list(value.shape)}"
        )


def _check_common(q, k, v, segment_ids_BT, window) -> None:
    if k.shape[:2] != q.shape[:2]:
        raise ValueError(f"queries and keys must cover the same tokens; got {q.shape[:2]} and {k.shape[:2]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key/value heads; use a multiple")
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in dtypes:
        raise ValueError(f"query, key and value must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if segment_ids_BT is not None and segment_ids_BT.shape != q.shape[:2]:
        raise ValueError(f"segment_ids must be [B, T] = {q.shape[:2]}; got {segment_ids_BT.shape}")
    if window is not None and (not isinstance(window, int | np.integer) or window < 1):
        raise ValueError(f"window={window} must be an integer of at least 1, the token itself")
