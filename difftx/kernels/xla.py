"""Attention by XLA operations, for any device: differential attention, and attention with any weight function.

Memory is linear in the length of a row: the queries are processed in chunks, and the backward pass recomputes the
attention weights of each chunk. Differential attention recomputes them from saved log-sum-exps. It computes P1 - λ P2
in float32 before the product with V, so one product suffices instead of two.

Queries in the first half of a row do not see keys in the second half (causal mask), so those logits are not computed.
"""
# Axes: B = batch, T = query tokens, S = key tokens, N = chunks, C = query tokens of a chunk,
#   H = query heads, K = key/value heads, R = H / K = query heads per key/value head, G = groups (2 for A1 and A2),
#   d = width of a query/key sub-head, E = width of a value head
# `arrays` is a dict from `chunks` with the arrays of one chunk, such as "q" [B, C, H, G, d] and "position" [C].

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from difftx.kernels.backend import ShardedArrays, pad_to
from difftx.kernels.context import SequenceSharding
from difftx.kernels.weight_functions import MASKED

# Largest number of attention weights per head in a chunk, 4 MiB in float32. A row of 1,024 tokens is one chunk.
CHUNK_WEIGHTS = 2**20
# From this row length, queries are split into two spans, which saves a quarter of the logits. Four spans would save
# three eighths, but the smaller products made a step on CPUs no faster, and compilation slower.
SPLIT_TOKENS = 128

# `dot_general` returns the batch axes, then the free axes of the first operand, then those of the second. If the
# subscripts name another order, `jnp.einsum` transposes the result. With the orders below, neither JAX nor XLA's CPU
# backend transposes arrays with an entry per pair of tokens. Such transpositions took half of the time.
einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def forward(
    q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, segment_ids_BT, *, window, sharding=None
) -> tuple[jax.Array, ShardedArrays]:
    """Return the output `[B, T, H, E]`, and for `backward` the logits' log-sum-exps, float32 `[B, T, H, G]`.

    Softmax attention has one group, and `lam_BTH` is None.
    """
    B, T, H, G, _ = q_BTHGd.shape
    K, dtype = k_BSKGd.shape[2], v_BSKE.dtype

    def chunk(keys: slice, arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        logits_BKRCS = masked_logits(arrays, k_BSKGd, segment_ids_BT, window, keys)
        exp_BKRCS, total_BKRC1, lse_BKRC = zip(*map(_exp, logits_BKRCS), strict=True)
        # Divide the output by P1's denominator, because the output has fewer elements than the weights.
        weights_BKRCS = exp_BKRCS[0]
        if G == 2:
            lam_BKRC1 = split_heads(arrays["lam"], K)[..., None]
            weights_BKRCS -= lam_BKRC1 * (total_BKRC1[0] / total_BKRC1[1]) * exp_BKRCS[1]
        out_BKRCE = einsum("BSKE,BKRCS->BKRCE", v_BSKE[:, keys], weights_BKRCS.astype(dtype)) / total_BKRC1[0]
        return jnp.moveaxis(out_BKRCE.astype(dtype), 3, 1), jnp.moveaxis(jnp.stack(lse_BKRC, axis=-1), 3, 1)

    spans = []
    for queries, keys in _spans(T, window, sharding):
        arrays = chunks(segment_ids_BT, sharding, queries=queries, q=q_BTHGd, lam=lam_BTH)
        spans.append(_joined_chunks(jax.lax.map(functools.partial(chunk, keys), arrays), T, queries))
    out_BTKRE, lse_BTKRG = _joined_spans(spans)
    return out_BTKRE.reshape(B, T, H, -1), ShardedArrays(by_token=(lse_BTKRG.reshape(B, T, H, G),))


def backward(
    q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, segment_ids_BT, out_BTHE, saved, dout_BTHE, *, window, sharding=None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of q, k and v in their dtypes, and of λ in float32, `[B, T, H]`.

    P1 and P2 are the attention weights of the two groups, S1 and S2 their logits. Both groups share dP = dO Vᵀ and
    dV = (P1 - λ P2)ᵀ dO. With D_m = rowsum(P_m ∘ dP), the other gradients are dS1 = P1 ∘ (dP - D1),
    dS2 = -λ P2 ∘ (dP - D2) and dλ = -D2. Since rowsum(O ∘ dO) = D1 - λ D2, only D2 needs a sum over the keys.
    """
    B, T, H, G, d = q_BTHGd.shape
    K, dtype = k_BSKGd.shape[2], q_BTHGd.dtype

    def chunk(keys: slice, carry: tuple[jax.Array, jax.Array], arrays: dict[str, Any]):
        dk_BSKGd, dv_BSKE = carry
        lse_BKRCG = split_heads(arrays["lse"], K)
        q_BKRCGd = split_heads(arrays["q"], K)
        dout_BKRCE = split_heads(arrays["dout"], K)
        p_BKRCS = [
            jnp.exp(logits_BKRCS - lse_BKRCG[..., g, None])
            for g, logits_BKRCS in enumerate(masked_logits(arrays, k_BSKGd, segment_ids_BT, window, keys))
        ]
        dp_BKRCS = einsum("BSKE,BKRCE->BKRCS", v_BSKE[:, keys], dout_BKRCE)
        out_BKRCE, wide_dout_BKRCE = (split_heads(arrays[name], K).astype(jnp.float32) for name in ("out", "dout"))
        weights_BKRCS, factors = p_BKRCS[0], [d**-0.5]
        deltas_BKRC1, dlam_BCKR = [jnp.sum(out_BKRCE * wide_dout_BKRCE, axis=-1, keepdims=True)], None
        if G == 2:
            lam_BKRC1 = split_heads(arrays["lam"], K)[..., None]
            weights_BKRCS -= lam_BKRC1 * p_BKRCS[1]
            factors.append(-(d**-0.5) * lam_BKRC1)
            deltas_BKRC1.append(jnp.sum(p_BKRCS[1] * dp_BKRCS, axis=-1, keepdims=True))
            deltas_BKRC1[0] += lam_BKRC1 * deltas_BKRC1[1]
            dlam_BCKR = -jnp.moveaxis(deltas_BKRC1[1][..., 0], 3, 1)
        dv_BKES = einsum("BKRCS,BKRCE->BKES", weights_BKRCS.astype(dtype), dout_BKRCE)
        dq_BKRCd, dk_BKdS = [], []
        for g in range(G):
            ds_BKRCS = (factors[g] * p_BKRCS[g] * (dp_BKRCS - deltas_BKRC1[g])).astype(dtype)
            dk_BKdS.append(einsum("BKRCS,BKRCd->BKdS", ds_BKRCS, q_BKRCGd[..., g, :]))
            dq_BKRCd.append(einsum("BSKd,BKRCS->BKRCd", k_BSKGd[:, keys, :, g], ds_BKRCS).astype(dtype))
        dk_BSKGd = dk_BSKGd.at[:, keys].add(jnp.moveaxis(jnp.stack(dk_BKdS, axis=2), 4, 1))
        dv_BSKE = dv_BSKE.at[:, keys].add(jnp.moveaxis(dv_BKES, 3, 1))
        return (dk_BSKGd, dv_BSKE), (jnp.moveaxis(jnp.stack(dq_BKRCd, axis=4), 3, 1), dlam_BCKR)

    carry, spans = (jnp.zeros_like(k_BSKGd, jnp.float32), jnp.zeros_like(v_BSKE, jnp.float32)), []
    by_query = {"q": q_BTHGd, "lam": lam_BTH, "lse": saved.by_token[0], "out": out_BTHE, "dout": dout_BTHE}
    for queries, keys in _spans(T, window, sharding):
        arrays = chunks(segment_ids_BT, sharding, queries=queries, **by_query)
        carry, span = jax.lax.scan(functools.partial(chunk, keys), carry, arrays)
        spans.append(_joined_chunks(span, T, queries))
    dk_BSKGd, dv_BSKE = carry
    dq_BTKRGd, dlam_BTKR = _joined_spans(spans)
    dlam_BTH = None if dlam_BTKR is None else dlam_BTKR.reshape(B, T, H)
    dq_BTHGd = dq_BTKRGd.reshape(q_BTHGd.shape)
    return dq_BTHGd, dk_BSKGd.astype(k_BSKGd.dtype), dv_BSKE.astype(v_BSKE.dtype), dlam_BTH


def weighted_attention(
    weight_function, q_BTHGd, k_BSKGd, v_BSKE, weight_argument_BTH, segment_ids_BT, *, window, sharding=None
) -> jax.Array:
    """Compute attention with weights from `weight_function`. JAX derives the gradient."""
    B, T, H = q_BTHGd.shape[:3]
    K, dtype = k_BSKGd.shape[2], v_BSKE.dtype
    # Autodiff sums the gradients of keys and values over chunks in the dtype of k and v, so cast k and v to float32.
    wide = np.promote_types(dtype, jnp.float32)
    k_BSKGd, v_BSKE = k_BSKGd.astype(wide), v_BSKE.astype(wide)

    @jax.checkpoint
    def chunk(arrays: dict[str, Any]) -> jax.Array:
        arguments = masked_logits(arrays, k_BSKGd.astype(dtype), segment_ids_BT, window)
        if weight_argument_BTH is not None:
            arguments.append(split_heads(arrays["weight_argument"], K)[..., None])
        weights_BKRCS = weight_function(*arguments)
        out_BKRCE = einsum("BSKE,BKRCS->BKRCE", v_BSKE.astype(dtype), weights_BKRCS.astype(dtype))
        return jnp.moveaxis(out_BKRCE.astype(dtype), 3, 1)

    out = jax.lax.map(chunk, chunks(segment_ids_BT, sharding, q=q_BTHGd, weight_argument=weight_argument_BTH))
    return joined(out, T).reshape(B, T, H, -1)


def largest_logits(q_BTHGd, k_BSKGd, _, __, segment_ids_BT, *, window, sharding=None) -> jax.Array:
    """Return the largest logit of each query, float32 `[B, T, H, G]`. The arguments are the same as for `forward`."""
    B, T, H, G, _ = q_BTHGd.shape

    def chunk(keys: slice, arrays: dict[str, Any]) -> jax.Array:
        logits_BKRCS = masked_logits(arrays, k_BSKGd, segment_ids_BT, window, keys)
        return jnp.moveaxis(jnp.stack([jnp.max(one_BKRCS, axis=-1) for one_BKRCS in logits_BKRCS], axis=-1), 3, 1)

    spans = []
    for queries, keys in _spans(T, window, sharding):
        arrays = chunks(segment_ids_BT, sharding, queries=queries, q=q_BTHGd)
        spans.append(_joined_chunks(jax.lax.map(functools.partial(chunk, keys), arrays), T, queries))
    return _joined_spans(spans).reshape(B, T, H, G)


def masked_logits(
    arrays: dict[str, Any],
    k_BSKGd: jax.Array,
    segment_ids_BT: jax.Array | None,
    window: int | None,
    keys: slice = slice(None),
) -> list[jax.Array]:
    """Return the scaled and masked logits of one chunk of queries for each group, float32 `[B, K, R, C, S]`.

    `keys` is the slice of keys that the queries can see. Each group has its own array, because stacking the groups
    would copy all logits.
    """
    S, K, G, d = k_BSKGd.shape[1:]
    k_BSKGd = k_BSKGd[:, keys]
    # The barrier makes the mask depend on the queries. Without it, JAX would hoist the masks of all chunks, of size
    # T × T, out of the scan over layers.
    arrays = jax.lax.optimization_barrier(
        {name: arrays[name] for name in ("q", "position", "segment") if name in arrays}
    )
    q_BKRCGd, position_C = split_heads(arrays["q"], K), arrays["position"]
    query_C1, key_1S = position_C[:, None], jnp.arange(S)[keys][None]
    seen_BCS = (key_1S <= query_C1)[None]
    if window is not None:
        seen_BCS &= (query_C1 - key_1S < window)[None]
    if segment_ids_BT is not None:
        seen_BCS = seen_BCS & (arrays["segment"][:, :, None] == segment_ids_BT[:, None, keys])
    logits_BKRCS = [einsum("BSKd,BKRCd->BKRCS", k_BSKGd[..., g, :], q_BKRCGd[..., g, :]) * d**-0.5 for g in range(G)]
    return [jnp.where(seen_BCS[:, None, None], one_BKRCS, MASKED) for one_BKRCS in logits_BKRCS]


def _exp(logits_BKRCS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return exp(logits - maximum), its sum over the keys, `[B, K, R, C, 1]`, and the log-sum-exps, `[B, K, R, C]`.

    With `jax.nn.logsumexp`, XLA would compute the exponentials a second time for the weights.
    """
    largest_BKRC1 = jnp.max(logits_BKRCS, axis=-1, keepdims=True)
    exp_BKRCS = jnp.exp(logits_BKRCS - largest_BKRC1)
    total_BKRC1 = jnp.sum(exp_BKRCS, axis=-1, keepdims=True)
    return exp_BKRCS, total_BKRC1, (jnp.log(total_BKRC1) + largest_BKRC1)[..., 0]


def split_heads(x_BCH: jax.Array, kv_heads: int) -> jax.Array:
    """Rearrange `[B, C, H, …]` to `[B, K, R, C, …]`, with R = H / K query heads for each of K key/value heads."""
    B, C, H, *others = x_BCH.shape
    return jnp.moveaxis(x_BCH.reshape(B, C, kv_heads, H // kv_heads, *others), 1, 3)


def _spans(tokens: int, window: int | None, sharding: SequenceSharding | None) -> list[tuple[slice, slice]]:
    """Split the queries into spans, and return each span with the keys that it can see. Do not split sharded rows."""
    if sharding is not None or tokens < SPLIT_TOKENS:
        return [(slice(None), slice(None))]
    half = tokens // 2
    first_key = 0 if window is None else max(0, half - window + 1)
    return [(slice(half), slice(half)), (slice(half, None), slice(first_key, None))]


def chunks(
    segment_ids_BS: jax.Array | None,
    sharding: SequenceSharding | None,
    groups: int = 1,
    /,
    *,
    queries: slice = slice(None),
    **arrays_BT: jax.Array | None,
) -> dict[str, Any]:
    """Split arrays `[B, T, …]` with one entry per query into chunks `[N, B, C, …]`. Zeros pad the last chunk.

    `queries` selects the queries to keep. One array must be named "q". The result also contains "position" `[N, C]`,
    the positions of the queries in their rows, and "segment" `[N, B, C]` if there are segment ids. A chunk has at most
    `CHUNK_WEIGHTS` / `groups` pairs of tokens.
    """
    present = {name: x_BT for name, x_BT in arrays_BT.items() if x_BT is not None}
    T = present["q"].shape[1]
    keys = T if sharding is None else T * sharding.devices
    position_T = (jnp.arange(T) if sharding is None else sharding.positions(T))[queries]
    size = min(position_T.size, max(1, CHUNK_WEIGHTS // (keys * groups)))
    count = -(-position_T.size // size)

    def in_chunks(x_BT: jax.Array) -> jax.Array:
        padded = pad_to(x_BT, count * size, axis=1)
        return jnp.moveaxis(padded.reshape(x_BT.shape[0], count, size, *x_BT.shape[2:]), 1, 0)

    arrays: dict[str, Any] = {name: in_chunks(x_BT[:, queries]) for name, x_BT in present.items()}
    arrays["position"] = in_chunks(position_T[None])[:, 0]
    if segment_ids_BS is not None:
        arrays["segment"] = in_chunks(segment_ids_BS[:, queries] if sharding is None else segment_ids_BS[:, position_T])
    return arrays


def joined(x_NBC: jax.Array, tokens: int) -> jax.Array:
    """Concatenate chunks `[N, B, C, …]` to `[B, T, …]` and drop the padding."""
    x_BNC = jnp.moveaxis(x_NBC, 0, 1)
    return x_BNC.reshape(x_BNC.shape[0], -1, *x_BNC.shape[3:])[:, :tokens]


def _joined_chunks(in_chunks: Any, tokens: int, queries: slice) -> Any:
    """Call `joined` for each array of a tree, if its chunks come from the slice `queries` of `tokens` queries."""
    return jax.tree.map(functools.partial(joined, tokens=len(range(tokens)[queries])), in_chunks)


def _joined_spans(spans: Sequence[Any]) -> Any:
    """Concatenate trees of arrays `[B, T, …]` along T."""
    return jax.tree.map(lambda *x_BT: jnp.concatenate(x_BT, axis=1), *spans)
