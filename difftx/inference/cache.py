"""The cache of keys and values: slots by row, written for all layers at once, doubled when it is full.

What is cached of a token is whatever the model's attention says (`Decoder.extend`), so that every architecture has its
cache here: two keys and one value twice as wide for a differential head, a key and a value for a softmax head.
"""
#   L = layers, B = rows, S = slots, T = new tokens, K = key/value heads

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard

from difftx.kernels.cached import EMPTY, Ids, Past
from difftx.model.decoder import Decoder
from difftx.parallel.layout import BATCH

UNIT = 256  # Slots of the smallest cache; larger ones double, so that few programs are compiled.
ROWS = P(BATCH, None)

type Entries = tuple[jax.Array, ...]  # What is to be cached of new tokens: arrays [L, B, T, K, …, width].


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Slot s of a row holds its token number s; which tokens see it, its segment says."""

    layers: Past  # Arrays [L, B, K, …, S, width], in the compute dtype.
    segment_BS: jax.Array  # int32; EMPTY where there is no token.


def capacity_for(tokens: int) -> int:
    """Return the slots of a cache for so many tokens: the unit times a power of two."""
    capacity = UNIT
    while capacity < tokens:
        capacity *= 2
    return capacity


def empty_cache(model: Decoder, rows: int, capacity: int) -> Cache:
    """Return a cache without tokens; under jit it is born in its shards."""

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
    """Return the last layer's normalised output `[B, T, D]` for new tokens, and what goes into the cache."""
    branch_BT = jnp.zeros_like(segment_BT) if branch_BT is None else branch_BT
    ids = Ids(segment_BT, branch_BT, cache.segment_BS)
    return model.extend(tokens_BT, positions_BT=positions_BT, past=cache.layers, ids=ids)


def write_chunk(cache: Cache, entries: Entries, segment_BT: jax.Array, start: jax.Array) -> Cache:
    """Return the cache with T tokens of each row in slots `start` … `start + T - 1`, which it must have."""

    def put(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=-2)

    return _write(put, cache, entries, segment_BT, start)


def write_token(cache: Cache, entries: Entries, segment_B1: jax.Array, slot_B: jax.Array) -> Cache:
    """Return the cache with one token of each row in its slot; one that it does not have is left out."""

    def put(old: jax.Array, new: jax.Array, slot_B: jax.Array) -> jax.Array:
        # Indices of all axes but the last: with windows over more of them XLA on CPUs copies the cache.
        before = jnp.indices(old.shape[:-2], sparse=True)
        slot_B = jnp.expand_dims(slot_B, tuple(i for i in range(old.ndim - 2) if i != 1))
        return old.at[(*before, slot_B)].set(new[..., 0, :], unique_indices=True, mode="drop")

    return _write(put, cache, entries, segment_B1, slot_B)


def _write(put: Callable, cache: Cache, entries: Entries, segment_BT: jax.Array, where: jax.Array) -> Cache:
    def on_one_device(layers: Past, segment_BS: jax.Array, entries: Entries, segment_BT: jax.Array, where: jax.Array):
        written = [put(old, jnp.moveaxis(new, 2, -2), where) for old, new in zip(layers, entries, strict=True)]
        ids = put(segment_BS[None, ..., None], segment_BT[None, ..., None], where)  # As an array of one layer.
        return tuple(written), ids[0, ..., 0]

    over_heads = jax.typeof(cache.layers[0]).sharding.spec[2]
    heads, by_token = P(None, BATCH, over_heads), P(None, BATCH, None, over_heads)
    in_specs = (heads, ROWS, by_token, ROWS, P(BATCH) if where.ndim else P())
    # On each device by itself: rows and heads are cut, slots are not.
    call = jax.shard_map(on_one_device, in_specs=in_specs, out_specs=(heads, ROWS), check_vma=False)
    return Cache(*call(cache.layers, cache.segment_BS, reshard(entries, by_token), segment_BT, where))


def grow(cache: Cache, capacity: int) -> Cache:
    """Return the cache with more slots."""
    more = capacity - cache.segment_BS.shape[1]

    def pad(x: jax.Array, axis: int, value: int) -> jax.Array:
        return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=value)

    layers = tuple(pad(x, x.ndim - 2, 0) for x in cache.layers)
    return Cache(layers, pad(cache.segment_BS, 1, EMPTY))
