"""Attention functions and their dispatch to backends.

A backend that the caller names serves the call or raises an error with the reason. "auto" picks the first backend in
the platform's list that supports the call, and logs the choice once.

Under a mesh with explicit axes, a backend runs inside `jax.shard_map` over batch and heads. The shardings come from the
arrays' types. If rows are sharded along their tokens, each device gathers the keys and values of whole rows
(`context.py`).

A Pallas backend runs in the Pallas interpreter if the caller names it on another platform. A training step would then
take minutes, so `why_unavailable` rejects such a backend for training.
"""
#   B = batch, T = query tokens, S = key tokens (= T), H = query heads, K = key/value heads,
#   G = 2 groups (group 0 gives the attention weights A1, group 1 gives A2),
#   D = width of a query/key sub-head, E = 2 D = width of a value head

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Literal

import jax
import jax.numpy as jnp

from difftx.kernels import baseline, cudnn, fused, mapped, pallas_tpu, reference, target, xla
from difftx.kernels.context import SequenceSharding
from difftx.kernels.maps import Map

try:
    from difftx.kernels import pallas_gpu
except ImportError:  # This jaxlib lacks the Mosaic GPU bindings, as on some laptops.
    pallas_gpu = None

Implementation = Literal["auto", "reference", "xla", "pallas_tpu", "pallas_gpu", "cudnn_wide", "cudnn", "splash"]

# Differential attention: `FUSED_BACKENDS` have their own backward pass; JAX differentiates `DIFF_FUNCTIONS`.
FUSED_BACKENDS: dict[str, ModuleType] = {"xla": xla, "pallas_tpu": pallas_tpu}
if pallas_gpu is not None:
    FUSED_BACKENDS["pallas_gpu"] = pallas_gpu
DIFF_FUNCTIONS = {
    "reference": reference.diff_attention,
    "cudnn": cudnn.diff_attention,
    "cudnn_wide": cudnn.diff_attention_wide_values,
}
SOFTMAX_BACKENDS = {
    "reference": reference.attention,
    "xla": baseline.xla_attention,
    "splash": baseline.splash_attention,
    "cudnn": baseline.cudnn_attention,
}
MAPPED_BACKENDS = {"reference": reference.mapped_attention, "xla": mapped.attention}

# Function → all backends that implement it, on any platform.
BACKENDS = {
    "diff_attention": (*DIFF_FUNCTIONS, "xla", "pallas_tpu", "pallas_gpu"),
    "attention": tuple(SOFTMAX_BACKENDS),
    "mapped_attention": tuple(MAPPED_BACKENDS),
}

# Function → platform → the backends that "auto" tries, best first. "reference" is only an oracle for checks.
AUTO = {
    "diff_attention": {
        "tpu": ("pallas_tpu", "xla"),
        "gpu": ("pallas_gpu", "cudnn_wide", "cudnn", "xla"),
        "cpu": ("xla",),
    },
    "attention": {"tpu": ("splash", "xla"), "gpu": ("cudnn", "xla"), "cpu": ("xla",)},
    "mapped_attention": {"tpu": ("xla",), "gpu": ("xla",), "cpu": ("xla",)},
}

# Backend → the only platform it compiles for. Interpreted elsewhere, a step of a small model takes minutes.
PLATFORMS = {"pallas_tpu": "tpu", "splash": "tpu", "pallas_gpu": "gpu", "cudnn_wide": "gpu", "cudnn": "gpu"}

WHOLE_ROWS = "it takes whole rows, and these are cut along their tokens over {!r}"

log = logging.getLogger(__name__)

distrusted: dict[str, str] = {}  # Backends that failed `check_gradients` → the reason. "auto" skips these backends.
# Largest relative error that `check_gradients` accepts. Rounding to bfloat16 costs 0.01; a wrong kernel exceeds 0.05.
GRADIENT_TOLERANCE = 0.05


def diff_attention(
    q_BTHGD: jax.Array,
    k_BSKGD: jax.Array,
    v_BSKE: jax.Array,
    lam: jax.typing.ArrayLike,
    *,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
    zigzag: bool = False,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Compute causal differential attention, (softmax(Q1 K1ᵀ/√D) - λ softmax(Q2 K2ᵀ/√D)) V.

    This is Eq. 1 of arXiv 2410.05258.

    Args:
        q_BTHGD: Queries, float32 or bfloat16. Index 0 of G holds Q1, index 1 holds Q2.
        k_BSKGD: Keys, with S = T. Query head n uses key/value head n // (H / K).
        v_BSKE: Values, twice as wide as a query/key sub-head.
        lam: λ as a scalar, per head `[H]`, or per token and head `[B, T, H]`. A Python number or an array of any real
            dtype; the computation uses float32 or wider.
        segment_ids_BT: int32. A token attends only to tokens of its own segment. None: each row is one segment.
        window: Number of tokens that a token attends to: itself and the `window - 1` tokens before it. None: all
            tokens up to itself.
        zigzag: Whether the tokens of rows that are sharded over devices are in zig-zag order (`context.to_zigzag`).
        implementation: Name of a backend, or "auto".

    Returns:
        `[B, T, H, E]` in the dtype of the values.

    Raises:
        ValueError: Shapes or dtypes do not match, or no backend can serve the call.
    """
    lam = jnp.asarray(lam)
    _check_diff_shapes(q_BTHGD, k_BSKGD, v_BSKE, lam)
    _check_common(q_BTHGD, k_BSKGD, v_BSKE, segment_ids_BT, window)
    cut = SequenceSharding.of(q_BTHGD, zigzag=zigzag)
    name = _choose(
        "diff_attention",
        implementation,
        (*DIFF_FUNCTIONS, *FUSED_BACKENDS),
        lambda name: _diff_unsupported(name, q_BTHGD, k_BSKGD, v_BSKE, segment_ids_BT, window, cut),
    )
    if name in FUSED_BACKENDS:
        backend = FUSED_BACKENDS[name]
        return fused.diff_attention(backend, q_BTHGD, k_BSKGD, v_BSKE, lam, segment_ids_BT, window=window, cut=cut)
    call = functools.partial(DIFF_FUNCTIONS[name], window=window)
    lam_BTH = fused.lam_per_token(lam, q_BTHGD)
    return fused.per_shard(call, q_BTHGD, k_BSKGD, v_BSKE, lam_BTH, segment_ids_BT, saves=False, cut=cut)


def attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    *,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
    zigzag: bool = False,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Compute causal softmax attention, as used by the baseline Transformer.

    Arguments and errors are those of `diff_attention`, without groups and λ.

    Returns:
        `[B, T, H, D]` in the dtype of the values.
    """
    if q_BTHD.ndim != 4 or k_BSKD.ndim != 4 or k_BSKD.shape != v_BSKD.shape or q_BTHD.shape[3] != k_BSKD.shape[3]:
        raise ValueError(
            f"attention wants q [B, T, H, D] and k, v [B, S, K, D]; got {q_BTHD.shape}, {k_BSKD.shape}, {v_BSKD.shape}"
        )
    _check_common(q_BTHD, k_BSKD, v_BSKD, segment_ids_BT, window)
    cut = SequenceSharding.of(q_BTHD, zigzag=zigzag)
    name = _choose(
        "attention",
        implementation,
        tuple(SOFTMAX_BACKENDS),
        lambda name: _softmax_unsupported(name, q_BTHD, segment_ids_BT, cut),
    )
    call = functools.partial(SOFTMAX_BACKENDS[name], window=window)
    return fused.per_shard(call, q_BTHD, k_BSKD, v_BSKD, segment_ids_BT, saves=False, cut=cut)


def mapped_attention(
    map_of: Map,
    q: jax.Array,
    k: jax.Array,
    v_BSKE: jax.Array,
    *,
    per_query: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
    zigzag: bool = False,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Compute causal attention with a weight function of `difftx.kernels.maps`.

    Fused kernels do not support these functions, so "auto" uses XLA operations on chunks of queries. Other arguments,
    errors and the pairing of query heads with key/value heads are those of `diff_attention`.

    Args:
        map_of: Function from logits to attention weights.
        q: Queries `[B, T, H, D]`, or `[B, T, H, G, D]` with one group per array of logits that `map_of` takes.
        k: Keys `[B, S, K, D]` or `[B, S, K, G, D]`.
        v_BSKE: Values of any width E.
        per_query: Last argument of `map_of` if `map_of` takes one, float32: a scalar, per head `[H]`, or `[B, T, H]`.

    Returns:
        `[B, T, H, E]` in the dtype of the values.
    """
    q_BTHGD, k_BSKGD = (x if x.ndim == 5 else x[:, :, :, None] for x in (q, k))
    if k_BSKGD.shape[3:] != q_BTHGD.shape[3:] or v_BSKE.shape[:3] != k_BSKGD.shape[:3] or v_BSKE.ndim != 4:
        raise ValueError(
            "mapped_attention wants q [B, T, H, G, D], k [B, S, K, G, D] and v [B, S, K, E], or q and k without G; "
            f"got {q.shape}, {k.shape}, {v_BSKE.shape}"
        )
    _check_common(q_BTHGD, k_BSKGD, v_BSKE, segment_ids_BT, window)
    name = _choose("mapped_attention", implementation, tuple(MAPPED_BACKENDS), lambda _: None)
    cut = SequenceSharding.of(q_BTHGD, zigzag=zigzag)
    call = functools.partial(MAPPED_BACKENDS[name], map_of, window=window)
    per_query_BTH = None if per_query is None else fused.lam_per_token(per_query, q_BTHGD)
    return fused.per_shard(call, q_BTHGD, k_BSKGD, v_BSKE, per_query_BTH, segment_ids_BT, saves=False, cut=cut)


def why_unavailable(
    implementation: str, q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct, v: jax.ShapeDtypeStruct
) -> str | None:
    """Return the reason why a backend cannot train or generate on this device, or None.

    Args:
        implementation: Name of a backend, or "auto", which finds a backend on every device.
        q: Queries `[B, T, H, 2, D]` of `diff_attention`, or `[B, T, H, D]` of `attention`.
        k: Keys.
        v: Values.
    """
    if implementation == "auto":
        return None
    platform = target.platform()
    if PLATFORMS.get(implementation, platform) != platform:
        return f"this backend requires a {PLATFORMS[implementation].upper()}, and JAX runs on {platform.upper()} here"
    if q.ndim == 5:
        return _diff_unsupported(implementation, q, k, v, None, None, None)
    return _softmax_unsupported(implementation, q, None, None)


def check_gradients(head_dim: int) -> dict[str, str]:
    """Compare the gradients of the backends that "auto" may pick on this device with the reference's gradients.

    Compilers and libraries have returned wrong gradients with correct outputs (issues TransformerEngine#3216 and
    cudnn-frontend#160). Call this function before you set a mesh.

    Returns:
        `distrusted`: the backends that "auto" skips from now on, with the reason for each.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 256, 2, 2, head_dim), (2, 256, 2, 2, head_dim), (2, 256, 2, 2 * head_dim), (2, 256, 2, 2 * head_dim)]
    q, k, v, weights = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    names = [name for name in AUTO["diff_attention"][target.platform()] if name != "xla"]  # Plain XLA operations.
    names = [name for name in names if _diff_unsupported(name, q, k, v, None, None, None) is None]
    if not names:
        return distrusted

    def gradients(name: str, dtype: jnp.dtype) -> list[jax.Array]:
        def loss(q, k, v, lam):
            out = diff_attention(q, k, v, lam, implementation=name)  # pyrefly: ignore[bad-argument-type]
            return jnp.sum(out.astype(jnp.float32) * weights)

        inputs = (*(x.astype(dtype) for x in (q, k, v)), jnp.float32(0.5))
        return jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*inputs))

    expected = gradients("reference", jnp.dtype("float32"))
    for name in names:
        actual = gradients(name, q.dtype)
        errors = [
            float(jnp.linalg.norm(a.astype(jnp.float32) - e) / jnp.linalg.norm(e))
            for a, e in zip(actual, expected, strict=True)
        ]
        if not max(errors) < GRADIENT_TOLERANCE:
            distrusted[name] = f"its gradients were off by {max(errors):.1%} when the program started"
            log.warning("%s on %s: %s", name, target.device_kind(), distrusted[name])
    return distrusted


def _choose(
    operation: str,
    implementation: str,
    names: tuple[str, ...],
    unsupported: Callable[[str], str | None],
) -> str:
    if implementation != "auto":
        if implementation not in names:
            raise ValueError(f"{operation}: implementation={implementation!r} is none of auto, {', '.join(names)}")
        if reason := unsupported(implementation):
            raise ValueError(f"{operation}: {implementation} cannot serve this call: {reason}")
        return implementation
    reasons = {}
    for name in AUTO[operation][target.platform()]:
        reason = distrusted.get(name) or unsupported(name)
        if reason is None:
            _log_once(operation, name, target.device_kind(), tuple(reasons.items()))
            return name
        reasons[name] = reason
    raise ValueError(
        f"{operation}: no backend can serve this call: " + "; ".join(f"{n}: {r}" for n, r in reasons.items())
    )


def _diff_unsupported(
    name: str, q, k, v, segment_ids_BT, window: int | None, cut: SequenceSharding | None
) -> str | None:
    shapes = (q.shape, k.shape, v.shape, q.dtype)
    if name == "pallas_tpu":
        return pallas_tpu.unsupported(*shapes, window=window, cut=cut)
    if name in ("pallas_gpu", "cudnn", "cudnn_wide") and cut is not None:
        return WHOLE_ROWS.format(cut.axis)
    if name == "pallas_gpu":
        return pallas_gpu.unsupported(*shapes) if pallas_gpu else "this jaxlib has no Mosaic GPU"
    if name == "cudnn":
        return cudnn.unsupported(*shapes, segment_ids=segment_ids_BT)
    if name == "cudnn_wide":
        return cudnn.wide_values_unsupported(*shapes, segment_ids=segment_ids_BT)
    return None


def _softmax_unsupported(name: str, q, segment_ids_BT, cut: SequenceSharding | None) -> str | None:
    if name == "splash":
        return baseline.splash_unsupported(q, cut)
    if name == "cudnn" and cut is not None:
        return WHOLE_ROWS.format(cut.axis)
    if name == "cudnn":
        return baseline.cudnn_unsupported(q, segment_ids_BT)
    return None


@functools.cache
def _log_once(operation: str, name: str, device: str, passed_over: tuple[tuple[str, str], ...]) -> None:
    log.info(
        "%s: implementation='auto' takes %r on %s%s",
        operation,
        name,
        device,
        f", not {passed_over}" * bool(passed_over),
    )


def _check_diff_shapes(q, k, v, lam) -> None:
    wanted = "diff_attention wants q [B, T, H, 2, D], k [B, S, K, 2, D] and v [B, S, K, 2 D]; "
    got = f"got {q.shape}, {k.shape}, {v.shape}"
    if q.ndim != 5 or k.ndim != 5 or v.ndim != 4:
        raise ValueError(wanted + got)
    if q.shape[3] != 2 or k.shape[3] != 2 or q.shape[4] != k.shape[4]:
        raise ValueError(f"{wanted}{got}: the head needs two groups of one width")
    if v.shape[3] != 2 * q.shape[4] or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{wanted}{got}: values must be twice as wide as a query sub-head, keys as many as values")
    if lam.shape not in ((), q.shape[2:3], q.shape[:3]) or not jnp.isrealobj(lam):
        raise ValueError(
            f"diff_attention requires a real lam: a scalar, [H] = {q.shape[2:3]} or [B, T, H] = {q.shape[:3]}; "
            f"got {lam.dtype}{list(lam.shape)}"
        )


def _check_common(q, k, v, segment_ids_BT, window) -> None:
    if k.shape[:2] != q.shape[:2]:
        raise ValueError(f"queries and keys must cover the same tokens; got {q.shape[:2]} and {k.shape[:2]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key/value heads: not a multiple")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (
        jnp.float32,
        jnp.bfloat16,
        jnp.float16,
        jnp.float64,
    ):
        raise ValueError(f"q, k and v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if segment_ids_BT is not None and segment_ids_BT.shape != q.shape[:2]:
        raise ValueError(f"segment_ids must be [B, T] = {q.shape[:2]}; got {segment_ids_BT.shape}")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1, the token itself")
