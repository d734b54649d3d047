"""The cache of the keys and values that `SelfAttention.project` returns: slot i of a row holds the row's token i."""
#   L = layers, B = rows, S = slots, T = new tokens, K = key/value heads

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard

from difftx.kernels.cached import EMPTY, KVCache, SegmentMask
from difftx.model.decoder import Decoder
from difftx.parallel.layout import BATCH

UNIT = 256  # Slots per row of the smallest cache, a power of two. Larger caches double, so that few programs compile.
ROWS = P(BATCH, None)

type Entries = tuple[jax.Array, ...]  # Keys and values of new tokens, [L, B, T, K, …, width] each.


def capacity_for(tokens: int) -> int:
    """Return the number of slots for rows of up to `tokens` tokens, a power of two."""
    return max(UNIT, 2 ** (tokens - 1).bit_length())


def empty_cache(model: Decoder, rows: int, capacity: int) -> KVCache:
    """Return arrays `[L, B, K, …, S, width]` of zeros in the compute dtype. Under jit, they are created sharded."""

    def zeros(entry: jax.ShapeDtypeStruct) -> jax.Array:
        layers, _, _, *heads, width = entry.shape
        return jnp.zeros((layers, rows, *heads, capacity, width), entry.dtype, out_sharding=model.layout.cache_LBK)

    return tuple(map(zeros, model.entry_shapes(rows)))


def extend(
    model: Decoder,
    cache: KVCache,
    used_B: jax.Array,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segment_BT: jax.Array,
    branch_BT: jax.Array | None = None,
) -> tuple[jax.Array, Entries]:
    """Return the normalised output `[B, T, D]` of the last layer for new tokens, and their entries for the cache.

    New tokens of segment 0 see the first `used_B` slots of their row and the previous new tokens of their branch.
    """
    cached_BS = jnp.where(jnp.arange(cache[0].shape[-2])[None] < used_B[:, None], 0, EMPTY)
    branch_BT = jnp.zeros_like(segment_BT) if branch_BT is None else branch_BT
    segments = SegmentMask(segment_BT, branch_BT, cached_BS)
    return model.extend(tokens_BT, positions_BT=positions_BT, cache=cache, segments=segments)


def extend_chunk(
    model: Decoder, cache: KVCache, start: jax.Array, tokens_BT: jax.Array, length_B: jax.Array
) -> tuple[jax.Array, Entries]:
    """Return the results of `extend` for the tokens at the positions from `start`, in rows of length `length_B`."""
    positions_1T = start + jnp.arange(tokens_BT.shape[1])[None]
    segment_BT = jnp.where(positions_1T < length_B[:, None], 0, EMPTY)
    return extend(model, cache, jnp.minimum(start, length_B), tokens_BT, positions_1T, segment_BT)


def write_chunk(cache: KVCache, entries: Entries, start: jax.Array) -> KVCache:
    """Return the cache with T new tokens of each row in the slots from `start`. All T slots must exist."""
    return _write(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2), cache, entries, start)


def write_token(cache: KVCache, entries: Entries, slot_B: jax.Array) -> KVCache:
    """Return the cache with one new token of each row in slot `slot_B`. Tokens whose slots do not exist are dropped."""

    def put(old, new, slot_B):
        # The indices cover all axes except the last. With fewer indexed axes, XLA on CPUs would copy the whole cache.
        before = jnp.indices(old.shape[:-2], sparse=True)
        slot_B = jnp.expand_dims(slot_B, tuple(i for i in range(old.ndim - 2) if i != 1))
        return old.at[(*before, slot_B)].set(new[..., 0, :], unique_indices=True, mode="drop")

    return _write(put, cache, entries, slot_B)


def _write(put: Callable, cache: KVCache, entries: Entries, where: jax.Array) -> KVCache:
    """Apply `put(old, new, where)` to the arrays of the cache, on each device's shard."""

    def on_one_device(cache, entries, where):
        return tuple(put(old, jnp.moveaxis(new, 2, -2), where) for old, new in zip(cache, entries, strict=True))

    over_heads = jax.typeof(cache[0]).sharding.spec[2]
    heads, by_token = P(None, BATCH, over_heads), P(None, BATCH, None, over_heads)
    in_specs = (heads, by_token, P(BATCH) if where.ndim else P())
    call = jax.shard_map(on_one_device, in_specs=in_specs, out_specs=heads, check_vma=False)
    return call(cache, reshard(entries, by_token), where)


def grow(cache: KVCache, capacity: int) -> KVCache:
    """Return the cache with `capacity` slots per row."""
    unchanged, more = (0, 0), (0, capacity - cache[0].shape[-2])
    return tuple(jnp.pad(x, [unchanged] * (x.ndim - 2) + [more, unchanged]) for x in cache)
