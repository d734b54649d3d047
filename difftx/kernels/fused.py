"""The custom gradient (`jax.custom_vjp`) that all backends with their own backward pass share.

The custom gradient wraps `jax.shard_map` rather than the other way round. Inside `shard_map`, JAX would sum gradients
over devices although each device owns its own shard (jax issue 21855).
"""
#   B = batch, T = query tokens, S = key tokens, H = query heads, K = key/value heads, G = 2 groups (A1 and A2),
#   D = width of a query/key sub-head, E = 2 D = width of a value head

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from difftx.kernels.context import SequenceSharding, with_whole_keys


class Saved(NamedTuple):
    """Arrays that a forward pass saves for the backward pass, one tuple for each order of axes.

    `per_shard` builds a `Saved` that holds one PartitionSpec per field in place of the tuples.
    """

    by_token: Any = ()  # Arrays [B, T, H, …].
    by_head: Any = ()  # Arrays [B, H, T, …].
    by_map: Any = ()  # Arrays [B, H, G, T].


def diff_attention(
    backend: ModuleType,
    q_BTHGD: jax.Array,
    k_BSKGD: jax.Array,
    v_BSKE: jax.Array,
    lam: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    cut: SequenceSharding | None,
) -> jax.Array:
    """Run differential attention by `backend.forward`, with `backend.backward` as its gradient.

    The other arguments are those of `difftx.kernels.diff_attention`.
    """
    return _attend(backend, window, cut, q_BTHGD, k_BSKGD, v_BSKE, lam_per_token(lam, q_BTHGD), segment_ids_BT)


def lam_per_token(lam: jax.Array, q_BTHGD: jax.Array) -> jax.Array:
    """Broadcast λ from a scalar or `[H]` to `[B, T, H]`, in float32 or wider and sharded like the queries."""
    lam = lam.astype(jnp.promote_types(lam.dtype, jnp.float32))
    if lam.ndim == 3:
        return lam
    if not is_explicit_mesh():
        return jnp.broadcast_to(lam, q_BTHGD.shape[:3])
    sharding = P(*jax.typeof(q_BTHGD).sharding.spec[:3])
    if lam.ndim:
        lam = jax.sharding.reshard(lam, P(sharding[2]))
    return jnp.broadcast_to(lam, q_BTHGD.shape[:3], out_sharding=sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(backend, window, cut, q_BTHGD, k_BSKGD, v_BSKE, lam_BTH, segment_ids_BT):
    return _forward(backend, window, cut, q_BTHGD, k_BSKGD, v_BSKE, lam_BTH, segment_ids_BT)[0]


def _forward(backend, window, cut, q_BTHGD, k_BSKGD, v_BSKE, lam_BTH, segment_ids_BT):
    inputs = (q_BTHGD, k_BSKGD, v_BSKE, lam_BTH, segment_ids_BT)
    out_BTHE, saved = per_shard(functools.partial(backend.forward, window=window), *inputs, cut=cut)
    return out_BTHE, (*inputs, out_BTHE, saved)


def _backward(backend, window, cut, residuals, dout_BTHE):
    segment_ids_BT = residuals[4]
    call = functools.partial(backend.backward, window=window)
    if cut is not None:
        call = functools.partial(_with_summed_keys, call)
    grads = per_shard(call, *residuals, dout_BTHE, saves=False, cut=cut)
    # JAX requires gradients of integer inputs to have the dtype float0.
    no_grad = None if segment_ids_BT is None else np.zeros(segment_ids_BT.shape, jax.dtypes.float0)
    return *grads, no_grad


_attend.defvjp(_forward, _backward)


def _with_summed_keys(call, *operands, cut):
    """Sum the gradients of keys and values over the devices whose queries saw them."""
    dq_BTHGD, dk_BSKGD, dv_BSKE, dlam_BTH = call(*operands, cut=cut)
    return dq_BTHGD, cut.scatter(dk_BSKGD), cut.scatter(dv_BSKE), dlam_BTH


def deltas(
    out_BTHE: jax.Array, out2_BTHE: jax.Array, lam_BTH: jax.Array, dout_BTHE: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return rowsum(dO ∘ O1) and rowsum(dO ∘ O2), float32 `[B, T, H]`, from O = O1 - λ O2 and O2."""
    dout_BTHE, out_BTHE = dout_BTHE.astype(jnp.float32), out_BTHE.astype(jnp.float32)
    delta2_BTH = jnp.sum(dout_BTHE * out2_BTHE.astype(jnp.float32), axis=-1)
    return jnp.sum(dout_BTHE * out_BTHE, axis=-1) + lam_BTH * delta2_BTH, delta2_BTH


def is_explicit_mesh() -> bool:
    """Return whether all axes of the current mesh are explicit, so that array types carry shardings."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.are_all_axes_explicit


def per_shard(call: Callable[..., Any], *operands: Any, saves: bool = True, cut: SequenceSharding | None = None) -> Any:
    """Run `call` on each device with its shard of batch rows, heads and, if `cut` is given, tokens.

    Attention needs no communication between rows or between heads. `context.py` communicates between tokens.

    Args:
        call: Function of the operands. It returns an output and a `Saved` if `saves`, else arrays like the operands.
        operands: Arrays `[B, T or S, H or K, …]` or `[B, T]`, `Saved` tuples, or None. The first operand is q.
        saves: Whether `call` returns a `Saved`.
        cut: Sharding of the tokens. None: `call` requires whole rows.

    Raises:
        ValueError: Rows are sharded along their tokens and `cut` is None.
    """
    if not is_explicit_mesh():
        return call(*operands)
    batch, tokens, heads = jax.typeof(operands[0]).sharding.spec[:3]
    if cut is None and SequenceSharding.of(operands[0], zigzag=False) is not None:
        raise ValueError(f"attention needs whole rows on each device; q is cut along its tokens over {tokens!r}")
    call = with_whole_keys(call, cut)
    by_token, row = P(batch, tokens, heads), P(batch, tokens)
    saved: Any = Saved(by_token, P(batch, heads, tokens), P(batch, heads, None, tokens))

    def spec(operand: Any) -> Any:
        if isinstance(operand, Saved):
            return saved
        return None if operand is None else row if operand.ndim == 2 else by_token

    # Segment ids and λ are small, so they are resharded like the queries. Larger operands must match already.
    operands = tuple(jax.sharding.reshard(x, spec(x)) if getattr(x, "ndim", 9) <= 3 else x for x in operands)
    # check_vma=True would require each zero-initialised accumulator of a backend to be marked as device-varying.
    sharded = jax.shard_map(
        call,
        in_specs=tuple(map(spec, operands)),
        out_specs=(by_token, saved) if saves else by_token,
        check_vma=False,
    )
    return sharded(*operands)
