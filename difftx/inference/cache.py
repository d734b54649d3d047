"""The key/value cache of generation. Slot i of a row holds token i, unless the cache evicts tokens."""
# Axes in names and shapes: L = layers, B = rows, S = slots, T = new tokens, K = key/value heads

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard

from difftx.config.model import CacheConfig
from difftx.kernels.backend import pad_to
from difftx.kernels.cached import EMPTY, KVCache, SegmentMask, Slots
from difftx.kernels.quantized import Quantized, quantize
from difftx.model.architectures import heads_of
from difftx.model.attention import LayerConstants
from difftx.model.decoder import Block, Decoder
from difftx.parallel.layout import BATCH

UNIT = 256  # Smallest number of slots per row.
ROWS = P(BATCH, None)


class Entries(NamedTuple):
    """Keys and values of new tokens, with the data that a cache needs to store them."""

    keys: jax.Array  # [L, B, T, K, G, width]
    values: jax.Array  # [L, B, T, K, width]
    position_BT: jax.Array  # Position of each token in its row, or `EMPTY` for padding.
    mass_LBTK: jax.Array | None = None  # See `Slots.mass_BKS`. None if the cache keeps all tokens.
    mass_LBKS: jax.Array | None = None


def rounded_up(tokens: int, unit: int) -> int:
    """Round `tokens` up to one of a few sizes, because each size requires a compilation.

    Sizes are multiples of `unit`. From 8 units on, there are four sizes per power of two, so a size is at most a
    quarter above `tokens`.
    """
    step = max(unit, 2 ** (tokens - 1).bit_length() // 8)
    return max(1, -(-tokens // step)) * step


def capacity_for(tokens: int, config: CacheConfig) -> int:
    """Return the number of cache slots per row for rows of up to `tokens` tokens, at most `config.tokens`."""
    slots = rounded_up(tokens, UNIT)
    return slots if config.tokens is None else min(slots, config.tokens)


def capacity_of(cache: KVCache) -> int:
    """Return the number of slots per row in a cache."""
    return jax.tree.leaves(cache[0])[0].shape[-2]


def empty_cache(model: Decoder, rows: int, capacity: int) -> KVCache:
    """Return an empty cache, with arrays `[L, B, K, …, S, …]`. Call it under jit to create the arrays sharded."""
    config, sharding = model.config.cache, model.layout.cache_LBK

    def zeros(entry: jax.ShapeDtypeStruct) -> jax.Array | Quantized:
        layers, _, _, *heads, width = entry.shape
        x = jnp.zeros((layers, rows, *heads, capacity, width), entry.dtype, out_sharding=sharding)
        return x if config.bits is None else quantize(x, config.bits)

    def entries() -> tuple[jax.Array, jax.Array]:
        angles = model.angles(1)

        def layer(x_BTD: jax.Array, block: Block, constants: LayerConstants):
            return x_BTD, block.attention.operands(x_BTD, angles, constants)[1:]

        return model.walk(layer, model.embed(jnp.zeros((rows, 1), jnp.int32)))[1]

    keys, values = map(zeros, jax.eval_shape(entries))
    if config.tokens is None:
        return keys, values
    shape = (model.config.num_layers, rows, heads_of(model.config).kv_heads, capacity)
    position_LBKS = jnp.full(shape, EMPTY, jnp.int32, out_sharding=sharding)
    return keys, values, Slots(position_LBKS, jnp.zeros(shape, jnp.float32, out_sharding=sharding))


def extend(
    model: Decoder,
    cache: KVCache | None,
    used_B: jax.Array,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segment_BT: jax.Array,
    branch_BT: jax.Array | None = None,
) -> tuple[jax.Array, Entries]:
    """Return the last layer's normalised output `[B, T, D]` for new tokens, and their entries for the cache.

    Real tokens have segment 0, padding tokens have segment `EMPTY`. A real token attends to the first `used_B` slots of
    its row and to earlier new tokens of its branch. Without a cache, the tokens must be whole prompts.
    """
    slots = 0 if cache is None else capacity_of(cache)
    cached_BS = jnp.where(jnp.arange(slots)[None] < used_B[:, None], 0, EMPTY)
    branch_BT = jnp.zeros_like(segment_BT) if branch_BT is None else branch_BT
    position_BT = jnp.broadcast_to(positions_BT, segment_BT.shape)
    segments = SegmentMask(segment_BT, branch_BT, position_BT, cached_BS)
    x_BTD, (keys, values, *mass) = model.extend(tokens_BT, positions_BT=positions_BT, cache=cache, segments=segments)
    return x_BTD, Entries(keys, values, jnp.where(segment_BT == EMPTY, EMPTY, position_BT), *mass)


def extend_chunk(
    model: Decoder, cache: KVCache | None, start: jax.Array, tokens_BT: jax.Array, length_B: jax.Array
) -> tuple[jax.Array, Entries]:
    """Call `extend` for the chunk of each row that begins at `start`. Positions from `length_B` on are padding."""
    positions_1T = start + jnp.arange(tokens_BT.shape[1])[None]
    segment_BT = jnp.where(positions_1T < length_B[:, None], 0, EMPTY)
    return extend(model, cache, jnp.minimum(start, length_B), tokens_BT, positions_1T, segment_BT)


def write_chunk(cache: KVCache, entries: Entries, start: jax.Array, config: CacheConfig) -> KVCache:
    """Write T new tokens of each row to the T slots from `start` on, and return the cache. These slots must exist.

    If the cache keeps only some tokens, new tokens replace evicted tokens instead.
    """
    if config.tokens is not None:
        return _write_to_evicted(cache, entries, config)
    return _write(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2), cache, entries, start, config)


def write_token(cache: KVCache, entries: Entries, slot_B: jax.Array, config: CacheConfig) -> KVCache:
    """Write one new token per row to slot `slot_B`, and return the cache. Drop a token if its slot does not exist.

    If the cache keeps only some tokens, the new token replaces an evicted token instead.
    """
    if config.tokens is not None:
        return _write_to_evicted(cache, entries, config)

    def put(old, new, slot_B):
        # Index all axes except the last. With fewer indexed axes, XLA on CPUs would copy the whole cache.
        before = jnp.indices(old.shape[:-2], sparse=True)
        slot_B = jnp.expand_dims(slot_B, tuple(i for i in range(old.ndim - 2) if i != 1))
        return old.at[(*before, slot_B)].set(new[..., 0, :], unique_indices=True, mode="drop")

    return _write(put, cache, entries, slot_B, config)


def _write(put: Callable, cache: KVCache, entries: Entries, where: jax.Array, config: CacheConfig) -> KVCache:
    """Call `put(old, new, where)` for each array of the cache, on each device's shard, and return the new cache."""

    def on_one_device(cache, keys_and_values, where):
        return jax.tree.map(lambda old, new: put(old, jnp.moveaxis(new, 2, -2), where), cache, keys_and_values)

    heads, by_token = _specs(cache)
    in_specs = (heads, by_token, P(BATCH) if where.ndim else P())
    call = jax.shard_map(on_one_device, in_specs=in_specs, out_specs=heads, check_vma=False)
    return call(cache, reshard(_stored(entries, config), by_token), where)


def _write_to_evicted(cache: KVCache, entries: Entries, config: CacheConfig) -> KVCache:
    """Write T new tokens of each row to empty slots, or to the slots of evicted tokens, and return the cache.

    The most recent tokens, including the new tokens, are never evicted. Of the older tokens, those that have received
    the least attention (`mass`) are evicted.
    """
    assert config.tokens is not None
    recent = int(config.recent_share * config.tokens)

    def on_one_device(cache, keys_and_values, position_BT, mass_LBTK, mass_LBKS):
        keys, values, (position_LBKS, total_LBKS) = cache
        total_LBKS += mass_LBKS
        T, S = position_BT.shape[1], total_LBKS.shape[-1]
        age_LBKS = jnp.max(position_BT, axis=1)[None, :, None, None] - position_LBKS
        # The slots with the lowest priority are overwritten first: empty slots, older tokens by mass, recent tokens.
        priority_LBKS = jnp.where(age_LBKS < recent, jnp.finfo(jnp.float32).max / (2 + age_LBKS), total_LBKS)
        priority_LBKS = jnp.where(position_LBKS == EMPTY, -1, priority_LBKS)
        slot_LBKT = jnp.argsort(priority_LBKS, axis=-1)[..., :T]
        slot_LBKT = jnp.where((position_BT == EMPTY)[None, :, None], S, slot_LBKT)  # Slot S drops padding.

        def put(old, new):
            """Write `new`, `[L, B, T, K, …, W]`, to the chosen slots of `old`, `[L, B, K, …, S, W]`."""
            new = jnp.moveaxis(new, 2, -2)
            slots = jnp.expand_dims(slot_LBKT, tuple(range(3, old.ndim - 2)))
            before = (jnp.expand_dims(i, -1) for i in jnp.indices(old.shape[:-2], sparse=True))
            return old.at[(*before, slots)].set(new, mode="drop")

        def put_number(old_LBKS, new_LBTK):
            return put(old_LBKS[..., None], new_LBTK[..., None])[..., 0]

        position_LBTK = jnp.broadcast_to(position_BT[None, :, :, None], mass_LBTK.shape)
        slots = Slots(put_number(position_LBKS, position_LBTK), put_number(total_LBKS, mass_LBTK))
        return *jax.tree.map(put, (keys, values), keys_and_values), slots

    heads, by_token = _specs(cache)
    in_specs = (heads, by_token, ROWS, by_token, heads)
    call = jax.shard_map(on_one_device, in_specs=in_specs, out_specs=heads, check_vma=False)
    new, position_BT = reshard(_stored(entries, config), by_token), reshard(entries.position_BT, ROWS)
    masses = reshard(entries.mass_LBTK, by_token), reshard(entries.mass_LBKS, heads)
    return call(cache, new, position_BT, *masses)


def _stored(entries: Entries, config: CacheConfig) -> tuple[Any, Any]:
    """Return the keys and values in the cache's format: quantised if `config.bits` is set."""
    new = entries.keys, entries.values
    return new if config.bits is None else (quantize(new[0], config.bits), quantize(new[1], config.bits))


def _specs(cache: KVCache) -> tuple[P, P]:
    """Return the PartitionSpecs of the cache's arrays and of the arrays in `Entries`."""
    over_heads = jax.typeof(jax.tree.leaves(cache)[0]).sharding.spec[2]
    return P(None, BATCH, over_heads), P(None, BATCH, None, over_heads)


def grow(cache: KVCache, capacity: int) -> KVCache:
    """Return the cache with at least `capacity` slots per row. Added slots are empty."""
    return cache if capacity <= capacity_of(cache) else _grown(cache, capacity)


@functools.partial(jax.jit, static_argnames="capacity")
def _grown(cache: KVCache, capacity: int) -> KVCache:
    keys, values, *slots = cache
    padded = jax.tree.map(lambda x: pad_to(x, capacity, axis=-2), (keys, values))
    pad = functools.partial(pad_to, length=capacity, axis=-1)
    return *padded, *(Slots(pad(s.position_BKS, constant_values=EMPTY), pad(s.mass_BKS)) for s in slots)
