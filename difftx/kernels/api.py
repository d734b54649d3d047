"""The attention functions, and the selection of a backend for each call.

A backend that the caller names serves the call or raises an error with the reason. "auto" selects the first backend
that runs on the platform and supports the call, in the order of a ranking (`use`), or else in that of `BACKENDS`, and
logs the choice once.

Under a mesh with explicit axes, a backend runs inside `jax.shard_map` over batch and heads. The shardings come from the
arrays' types. If rows are sharded along their tokens, each device gathers the keys and values of whole rows. Under a
mesh with automatic axes, XLA partitions a backend, which excludes Pallas backends. Inside the caller's own
`jax.shard_map`, a backend computes the shard of its device.

If the caller names a Pallas backend of another platform, the Pallas interpreter runs it. A training step would then
take minutes, so `why_unavailable` rejects such a backend.
"""
# Axes: B = batch, T = query tokens, S = key tokens (= T), H = query heads, K = key/value heads,
#   G = 2 groups of queries and keys (group 0 gives the attention weights A1, group 1 gives A2),
#   d = width of a query/key sub-head, E = 2 d = width of a value head

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from difftx.kernels import reference, target, xla
from difftx.kernels.backend import AttentionCall, Backend, Ranking, broadcast_to_tokens, per_shard
from difftx.kernels.context import SequenceSharding, is_explicit_mesh
from difftx.kernels.weight_functions import WeightFunction


def _by_name(*backends: Backend) -> dict[str, Backend]:
    return {backend.name: backend for backend in backends}


def _imported(name: str, **options: Any) -> Callable[..., Any]:
    """Return a function "module:function" of this package with some keyword arguments.

    The first call imports the module. Pallas takes more than half a second to import, and commands on CPUs do not use
    it.
    """
    module, function = name.split(":")

    def call(*args: Any, **more: Any) -> Any:
        return getattr(importlib.import_module(f"difftx.kernels.{module}"), function)(*args, **more, **options)

    return call


def _pallas_tpu(name: str, **tiles: int) -> Backend:
    forward, backward, unsupported = (
        _imported(f"pallas_tpu:{function}", **tiles) for function in ("forward", "backward", "unsupported")
    )
    return Backend(name, forward, backward, unsupported, platform="tpu", is_pallas=True)


def _splash(name: str, function: str, **tiles: int) -> Backend:
    forward, unsupported = _imported(f"splash:{function}", **tiles), _imported("splash:unsupported", **tiles)
    return Backend(name, forward, unsupported=unsupported, platform="tpu", is_pallas=True)


def _pallas_gpu_unsupported(call: AttentionCall) -> str | None:
    try:
        from difftx.kernels import pallas_gpu
    except ImportError:  # Some jaxlib builds lack Mosaic GPU.
        return "this jaxlib has no Mosaic GPU"
    return pallas_gpu.unsupported(call)


_for_gpu = functools.partial(Backend, platform="gpu", whole_rows=True)

# The backends of each attention function by name. Without a ranking, "auto" tries them in this order. The order for
# Hopper was measured (an H100, d = 64 and 128, causal rows of 4,096 tokens). Elsewhere, library kernels come before
# ours. "auto" never tries "reference", which the others are compared with.
BACKENDS = {
    "diff_attention": _by_name(
        Backend("reference", reference.diff_attention, auto=False),
        _splash("splash_wide", "diff_attention"),
        _splash("splash_wide_1024", "diff_attention", max_side=1024),
        _pallas_tpu("pallas_tpu"),
        _pallas_tpu("pallas_tpu_1024", max_side=1024),
        _for_gpu(
            "pallas_gpu",
            _imported("pallas_gpu:forward"),
            _imported("pallas_gpu:backward"),
            _pallas_gpu_unsupported,
            is_pallas=True,
        ),
        _for_gpu(
            "cudnn_wide",
            _imported("cudnn:diff_attention_wide_values"),
            unsupported=_imported("cudnn:wide_values_unsupported"),
        ),
        _for_gpu("cudnn", _imported("cudnn:diff_attention"), unsupported=_imported("cudnn:diff_unsupported")),
        Backend("xla", xla.forward, xla.backward),
    ),
    "attention": _by_name(
        Backend("reference", reference.attention, auto=False),
        _splash("splash", "attention"),
        _splash("splash_1024", "attention", max_side=1024),
        _for_gpu("cudnn", _imported("cudnn:attention"), unsupported=_imported("cudnn:unsupported")),
        Backend("xla", xla.softmax_forward, xla.softmax_backward),
    ),
    "weighted_attention": _by_name(
        Backend("reference", reference.weighted_attention, auto=False), Backend("xla", xla.weighted_attention)
    ),
}

log = logging.getLogger(__name__)

_rankings: dict[str, Ranking] = {}  # The ranking that "auto" follows, by function.


def diff_attention(
    q_BTHGd: jax.Array,
    k_BSKGd: jax.Array,
    v_BSKE: jax.Array,
    lam: jax.typing.ArrayLike,
    *,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
    zigzag: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Compute causal differential attention, (softmax(Q1 K1ᵀ/√d) - λ softmax(Q2 K2ᵀ/√d)) V (arXiv 2410.05258, Eq. 1).

    Args:
        q_BTHGd: Queries, float32 or bfloat16. Index 0 of G holds Q1, index 1 holds Q2.
        k_BSKGd: Keys, with S = T. Query head n uses key/value head n // (H / K).
        v_BSKE: Values, twice as wide as a query/key sub-head.
        lam: λ as a scalar, per head `[H]`, or per token and head `[B, T, H]`. A Python number or an array of any real
            dtype; the computation uses float32 or wider.
        segment_ids_BT: Integers. A token attends only to tokens of its own segment. None: each row is one segment.
        window: A token attends to itself and the `window - 1` tokens before it. None: to all tokens up to itself.
        zigzag: Whether rows that are sharded along their tokens are in zig-zag order (`context.to_zigzag`).
        implementation: Name of a backend, or "auto".

    Returns:
        `[B, T, H, E]` in the dtype of the values.

    Raises:
        ValueError: Shapes or dtypes do not match, or no backend can serve the call.
    """
    lam = jnp.asarray(lam)
    _check_diff_shapes(q_BTHGd, k_BSKGd, v_BSKE, lam)
    segment_ids_BT = _int32(segment_ids_BT)
    call = AttentionCall(q_BTHGd, k_BSKGd, v_BSKE, segment_ids_BT, window, SequenceSharding.of(q_BTHGd, zigzag=zigzag))
    backend = _choose("diff_attention", implementation, call)
    if call.is_empty:
        return _empty_output(call)
    lam_BTH = broadcast_to_tokens(lam, q_BTHGd)
    return backend.run(q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, segment_ids_BT, window=window, sharding=call.sharding)


def attention(
    q_BTHd: jax.Array,
    k_BSKd: jax.Array,
    v_BSKd: jax.Array,
    *,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
    zigzag: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Compute causal softmax attention, as used by the baseline Transformer.

    Arguments and errors are those of `diff_attention`, without groups and λ. The result is `[B, T, H, d]` in the dtype
    of the values.
    """
    if q_BTHd.ndim != 4 or k_BSKd.ndim != 4 or k_BSKd.shape != v_BSKd.shape or q_BTHd.shape[3] != k_BSKd.shape[3]:
        raise ValueError(
            "attention expects q [B, T, H, d] and k, v [B, S, K, d]; "
            f"got {q_BTHd.shape}, {k_BSKd.shape}, {v_BSKd.shape}"
        )
    segment_ids_BT = _int32(segment_ids_BT)
    call = AttentionCall(q_BTHd, k_BSKd, v_BSKd, segment_ids_BT, window, SequenceSharding.of(q_BTHd, zigzag=zigzag))
    backend = _choose("attention", implementation, call)
    if call.is_empty:
        return _empty_output(call)
    return backend.run(q_BTHd, k_BSKd, v_BSKd, segment_ids_BT, window=window, sharding=call.sharding)


def weighted_attention(
    weight_function: WeightFunction,
    q: jax.Array,
    k: jax.Array,
    v_BSKE: jax.Array,
    *,
    weight_argument: jax.typing.ArrayLike | None = None,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
    zigzag: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Compute causal attention whose weights come from a function of the logits (`difftx.kernels.weight_functions`).

    Fused kernels do not support these functions, so "auto" uses XLA operations on chunks of queries. Other arguments,
    errors and the pairing of query heads with key/value heads are those of `diff_attention`.

    Args:
        weight_function: Function from logits to attention weights, such as `weight_functions.softmax_with_sink`.
        q: Queries `[B, T, H, d]`, or `[B, T, H, G, d]` with one group per array of logits that `weight_function` takes.
        k: Keys `[B, S, K, d]` or `[B, S, K, G, d]`.
        v_BSKE: Values of any width E.
        weight_argument: Last argument of `weight_function`, such as λ or the logit of a sink, if it takes one: a
            scalar, per head `[H]`, or `[B, T, H]`. A Python number or an array of any real dtype.

    Returns:
        `[B, T, H, E]` in the dtype of the values.
    """
    q_BTHGd, k_BSKGd = (x if x.ndim == 5 else x[:, :, :, None] for x in (q, k))
    if k_BSKGd.shape[3:] != q_BTHGd.shape[3:] or v_BSKE.shape[:3] != k_BSKGd.shape[:3] or v_BSKE.ndim != 4:
        raise ValueError(
            "weighted_attention expects q [B, T, H, G, d], k [B, S, K, G, d] and v [B, S, K, E], or q and k without G; "
            f"got {q.shape}, {k.shape}, {v_BSKE.shape}"
        )
    segment_ids_BT = _int32(segment_ids_BT)
    call = AttentionCall(q_BTHGd, k_BSKGd, v_BSKE, segment_ids_BT, window, SequenceSharding.of(q_BTHGd, zigzag=zigzag))
    backend = _choose("weighted_attention", implementation, call)
    weight_argument_BTH = None
    if weight_argument is not None:
        weight_argument = jnp.asarray(weight_argument)
        _check_broadcastable("weighted_attention", "weight_argument", weight_argument, q_BTHGd)
        weight_argument_BTH = broadcast_to_tokens(weight_argument, q_BTHGd)
    if call.is_empty:
        return _empty_output(call)
    forward = functools.partial(backend.forward, weight_function, window=window)
    return per_shard(forward, q_BTHGd, k_BSKGd, v_BSKE, weight_argument_BTH, segment_ids_BT, sharding=call.sharding)


def why_unavailable(implementation: str, call: AttentionCall) -> str | None:
    """Return the reason why a backend cannot train or generate on this device, or None.

    "auto" is always available. Queries `[B, T, H, 2, d]` belong to `diff_attention`, and `[B, T, H, d]` to `attention`.
    """
    if implementation == "auto":
        return None
    backend = BACKENDS["diff_attention" if call.q.ndim == 5 else "attention"][implementation]
    platform = target.platform()
    if backend.platform is not None and backend.platform != platform:
        return f"this backend requires a {backend.platform.upper()}, and JAX runs on {platform.upper()} here"
    return backend.why_unsupported(call)


def use(ranking: Ranking) -> None:
    """Let "auto" follow a ranking, for all later calls in this process."""
    _rankings[ranking.function] = ranking


def rankings() -> Mapping[str, Ranking]:
    """Return the rankings that "auto" follows, by function."""
    return _rankings


def candidates(function: str) -> list[Backend]:
    """Return the backends that "auto" may select on this platform, in the order of `BACKENDS`."""
    platforms = (None, target.platform())
    return [backend for backend in BACKENDS[function].values() if backend.auto and backend.platform in platforms]


def selected(function: str, implementation: str, call: AttentionCall) -> str:
    """Return the name of the backend that serves a call, or raise `ValueError` if none can."""
    return _choose(function, implementation, call).name


def _int32(segment_ids_BT: jax.typing.ArrayLike | None) -> jax.Array | None:
    if segment_ids_BT is None:
        return None
    segment_ids_BT = jnp.asarray(segment_ids_BT)
    if not jnp.issubdtype(segment_ids_BT.dtype, jnp.integer):
        raise ValueError(f"segment_ids_BT must be integers, one per segment; got {segment_ids_BT.dtype}")
    return segment_ids_BT.astype(jnp.int32)


def _choose(function: str, implementation: str, call: AttentionCall) -> Backend:
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
    by_name, ranking = {backend.name: backend for backend in candidates(function)}, _rankings.get(function)
    reasons = {} if ranking is None else dict(ranking.rejected)
    names = dict.fromkeys([*([] if ranking is None else ranking.milliseconds), *by_name])
    rejected: list[str] = []
    for backend in (by_name[name] for name in names if name in by_name):
        reason = reasons.get(backend.name) or backend.why_unsupported(call)
        if reason is None:
            _log_once(function, backend.name, target.device_kind(), "; ".join(rejected))
            return backend
        rejected.append(f"{backend.name}: {reason}")
    raise ValueError(f"{function}: no backend can serve this call: {'; '.join(rejected)}")


def _empty_output(call: AttentionCall) -> jax.Array:
    """Return the output of a call without tokens, sharded like the queries. Backends require at least one token."""
    q, v = jax.typeof(call.q), jax.typeof(call.v)
    sharding = jax.P(*q.sharding.spec[:3]) if is_explicit_mesh() else None
    return jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype, out_sharding=sharding)


@functools.cache
def _log_once(function: str, name: str, device: str, rejected: str) -> None:
    log.info("%s: 'auto' selects %r on %s%s", function, name, device, rejected and f" (rejected: {rejected})")


def _check_diff_shapes(q, k, v, lam) -> None:
    shapes = (
        "diff_attention expects q [B, T, H, 2, d], k [B, S, K, 2, d] and v [B, S, K, 2 d]; "
        f"got {q.shape}, {k.shape}, {v.shape}"
    )
    if q.ndim != 5 or k.ndim != 5 or v.ndim != 4:
        raise ValueError(shapes)
    if q.shape[3] != 2 or k.shape[3] != 2 or q.shape[4] != k.shape[4]:
        raise ValueError(f"{shapes}: queries and keys must have two groups of one width")
    if v.shape[3] != 2 * q.shape[4] or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{shapes}: values must be twice as wide as a query sub-head, and as many as the keys")
    _check_broadcastable("diff_attention", "lam", lam, q)


def _check_broadcastable(function: str, name: str, value: jax.Array, q: jax.Array) -> None:
    if value.shape not in ((), q.shape[2:3], q.shape[:3]) or not jnp.isrealobj(value):
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
        raise ValueError(f"q, k and v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if segment_ids_BT is not None and segment_ids_BT.shape != q.shape[:2]:
        raise ValueError(f"segment_ids must be [B, T] = {q.shape[:2]}; got {segment_ids_BT.shape}")
    if window is not None and (not isinstance(window, int | np.integer) or window < 1):
        raise ValueError(f"window={window} must be an integer of at least 1, the token itself")
