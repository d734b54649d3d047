"""The cache of keys and values during generation. Slot i of a row holds the keys and values of the row's token i."""
# Axes in names and shapes: L = layers, B = rows, S = slots, T = new tokens, K = key/value heads

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard

from difftx.kernels.cached import EMPTY, KVCache, SegmentMask
from difftx.model.decoder import Decoder
from difftx.parallel.layout import BATCH

UNIT = 256  # Smallest number of slots per row. All numbers are powers of two, so that few programs are compiled.
ROWS = P(BATCH, None)

type Entries = tuple[jax.Array, ...]  # Keys and values of new tokens. Each array is [L, B, T, K, …, width].


def capacity_for(tokens: int) -> int:
    """Return the number of slots per row, a power of two, of a cache for rows of up to `tokens` tokens."""
    return max(UNIT, 2 ** (tokens - 1).bit_length())


def empty_cache(model: Decoder, rows: int, capacity: int) -> KVCache:
    """Return arrays of zeros, `[L, B, K, …, S, width]`, in the compute dtype. Under jit, they are created sharded."""

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
    """Return the last layer's normalised output `[B, T, D]` for new tokens, and their keys and values.

    A new token of segment 0 attends to the first `used_B` slots of its row and to earlier new tokens of its branch.
    Padding tokens have the segment `EMPTY`.
    """
    cached_BS = jnp.where(jnp.arange(cache[0].shape[-2])[None] < used_B[:, None], 0, EMPTY)
    branch_BT = jnp.zeros_like(segment_BT) if branch_BT is None else branch_BT
    position_BT = jnp.broadcast_to(positions_BT, segment_BT.shape)
    segments = SegmentMask(segment_BT, branch_BT, position_BT, cached_BS)
    return model.extend(tokens_BT, positions_BT=positions_BT, cache=cache, segments=segments)


def extend_chunk(
    model: Decoder, cache: KVCache, start: jax.Array, tokens_BT: jax.Array, length_B: jax.Array
) -> tuple[jax.Array, Entries]:
    """Call `extend` for the tokens of each row from position `start` on. Tokens beyond `length_B` are padding."""
    positions_1T = start + jnp.arange(tokens_BT.shape[1])[None]
    segment_BT = jnp.where(positions_1T < length_B[:, None], 0, EMPTY)
    return extend(model, cache, jnp.minimum(start, length_B), tokens_BT, positions_1T, segment_BT)


def write_chunk(cache: KVCache, entries: Entries, start: jax.Array) -> KVCache:
    """Return the cache with T new tokens of each row in the slots from `start` on. All T slots must exist."""
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
    """Write entries to each array of the cache with `put(old, new, where)`, on each device's shard."""

    def on_one_device(cache, entries, where):
        return tuple(put(old, jnp.moveaxis(new, 2, -2), where) for old, new in zip(cache, entries, strict=True))

    over_heads = jax.typeof(cache[0]).sharding.spec[2]
    heads, by_token = P(None, BATCH, over_heads), P(None, BATCH, None, over_heads)
    in_specs = (heads, by_token, P(BATCH) if where.ndim else P())
    call = jax.shard_map(on_one_device, in_specs=in_specs, out_specs=heads, check_vma=False)
    return call(cache, reshard(entries, by_token), where)


@functools.partial(jax.jit, static_argnames="capacity")
def grow(cache: KVCache, capacity: int) -> KVCache:
    """Return the cache, padded with zeros to `capacity` slots per row."""
    unchanged, more = (0, 0), (0, capacity - cache[0].shape[-2])
    return tuple(jnp.pad(x, [unchanged] * (x.ndim - 2) + [more, unchanged]) for x in cache)
