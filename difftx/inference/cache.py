"""The cache of the keys and values that `SelfAttention.project` returns, with one slot per token of a row."""
#   L = layers, B = rows, S = slots, T = new tokens, K = key/value heads

import dataclasses
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Cached keys and values. Slot s of a row holds the row's token s. A token sees the slots of its own segment."""

    layers: KVCache  # Arrays [L, B, K, …, S, width], in the compute dtype.
    segment_BS: jax.Array  # int32; EMPTY for a slot without a token.


def capacity_for(tokens: int) -> int:
    """Return the number of slots for rows of up to `tokens` tokens, a power of two."""
    return max(UNIT, 2 ** (tokens - 1).bit_length())


def empty_cache(model: Decoder, rows: int, capacity: int) -> Cache:
    """Return a cache without tokens. Under jit, the cache is created sharded over the mesh."""

    def zeros(entry: jax.ShapeDtypeStruct) -> jax.Array:
        layers, _, _, *heads, width = entry.shape
        return jnp.zeros((layers, rows, *heads, capacity, width), entry.dtype, out_sharding=model.layout.cache_LBK)

    layers = tuple(map(zeros, model.entry_shapes(rows)))
    return Cache(layers, jnp.full((rows, capacity), EMPTY, jnp.int32, out_sharding=ROWS))


def extend(
    model: Decoder,
    cache: Cache,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segment_BT: jax.Array,
    branch_BT: jax.Array | None = None,
) -> tuple[jax.Array, Entries]:
    """Return the normalised output `[B, T, D]` of the last layer for new tokens, and their entries for the cache.

    New tokens of one segment see each other only if they also have the same branch.
    """
    branch_BT = jnp.zeros_like(segment_BT) if branch_BT is None else branch_BT
    segments = SegmentMask(segment_BT, branch_BT, cache.segment_BS)
    return model.extend(tokens_BT, positions_BT=positions_BT, cache=cache.layers, segments=segments)


def write_chunk(cache: Cache, entries: Entries, segment_BT: jax.Array, start: jax.Array) -> Cache:
    """Return the cache with T new tokens of each row in the slots from `start`. All T slots must exist."""

    def put(old, new, start):
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=-2)

    return _write(put, cache, entries, segment_BT, start)


def write_token(cache: Cache, entries: Entries, segment_B1: jax.Array, slot_B: jax.Array) -> Cache:
    """Return the cache with one new token of each row in slot `slot_B`. Tokens whose slots do not exist are dropped."""

    def put(old, new, slot_B):
        # The indices cover all axes except the last. With fewer indexed axes, XLA on CPUs would copy the whole cache.
        before = jnp.indices(old.shape[:-2], sparse=True)
        slot_B = jnp.expand_dims(slot_B, tuple(i for i in range(old.ndim - 2) if i != 1))
        return old.at[(*before, slot_B)].set(new[..., 0, :], unique_indices=True, mode="drop")

    return _write(put, cache, entries, segment_B1, slot_B)


def _write(put: Callable, cache: Cache, entries: Entries, segment_BT: jax.Array, where: jax.Array) -> Cache:
    """Apply `put(old, new, where)` to all layers and to the segment ids, on each device's shard."""

    def on_one_device(layers, segment_BS, entries, segment_BT, where):
        written = [put(old, jnp.moveaxis(new, 2, -2), where) for old, new in zip(layers, entries, strict=True)]
        # `put` expects axes for layers and width.
        segments = put(segment_BS[None, ..., None], segment_BT[None, ..., None], where)
        return tuple(written), segments[0, ..., 0]

    over_heads = jax.typeof(cache.layers[0]).sharding.spec[2]
    heads, by_token = P(None, BATCH, over_heads), P(None, BATCH, None, over_heads)
    in_specs = (heads, ROWS, by_token, ROWS, P(BATCH) if where.ndim else P())
    call = jax.shard_map(on_one_device, in_specs=in_specs, out_specs=(heads, ROWS), check_vma=False)
    return Cache(*call(cache.layers, cache.segment_BS, reshard(entries, by_token), segment_BT, where))


def grow(cache: Cache, capacity: int) -> Cache:
    """Return the cache with `capacity` slots per row, of which the additional ones are empty."""
    unchanged, more = (0, 0), (0, capacity - cache.segment_BS.shape[1])
    layers = tuple(jnp.pad(x, [unchanged] * (x.ndim - 2) + [more, unchanged]) for x in cache.layers)
    return Cache(layers, jnp.pad(cache.segment_BS, [unchanged, more], constant_values=EMPTY))
