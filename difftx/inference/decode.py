"""Compiled programs for generation: prefill of a chunk of the prompts, and decoding of a block of new tokens.

The prompts of a batch may differ in length. Token i of a row has position i and is in slot i of the row's cache. Short
prompts are padded with tokens to which no other token attends, and new tokens overwrite this padding. The numbers of
rows, slots and tokens are rounded up, so that few programs are compiled.

A whole prompt passes through the model like a training row, and is then written to the cache. If the cache compresses
keys and values, the prompt is processed in chunks instead, because later chunks must attend to compressed keys.

Rows are sharded over the mesh axes `data` and `fsdp`, heads over `tensor`. Prefer `tensor` for generation, because
weights that are sharded over `fsdp` are gathered for every token.
"""
# Axes in names and shapes: B = rows, T = tokens of a chunk, N = new tokens of a block, D = model width, V = vocabulary

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P
from jax.sharding import reshard

from difftx.config import Config
from difftx.config.model import CacheConfig
from difftx.data.tokenizer import Tokenizer
from difftx.inference.cache import (
    ROWS,
    capacity_for,
    capacity_of,
    empty_cache,
    extend,
    extend_chunk,
    grow,
    rounded_up,
    write_chunk,
    write_token,
)
from difftx.inference.sampling import GREEDY, Sampling, choose
from difftx.kernels.cached import KVCache
from difftx.model.abstract import vector_mask
from difftx.model.decoder import Decoder, layer_of
from difftx.parallel.layout import BATCH, Layout
from difftx.parallel.mesh import batch_shards
from difftx.training.state import graph, init_params

MIN_CHUNK_TOKENS = 32  # Smallest number of tokens per row for which a prefill program is compiled.
BLOCK_TOKENS = 16  # Tokens decoded on the device before the host prints text and checks for stop strings.
ROOM_TOKENS = 1024  # A new cache has room for at most this many new tokens. When it grows, programs are compiled again.
NO_TOKEN = -1  # Fills the rest of a block after a row has ended.
NO_ROW = -1  # Marks a row that `replaced` does not replace.


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model's parameters, config, mesh and tokenizer."""

    config: Config
    mesh: jax.sharding.Mesh
    params: Any
    tokenizer: Tokenizer

    @property
    def context_length(self) -> int:
        """Largest number of tokens in a prompt plus its new tokens: the row length of training."""
        return self.config.data.sequence_length

    @functools.cached_property
    def weights(self) -> Any:
        """Parameters for `model_of`, cast to the compute dtype (except vectors) and with separate arrays per layer.

        The layers are unstacked once, here. A loop over tokens would copy each matrix out of the stack for each token.
        """
        dtype = self.config.model.compute_dtype
        mask = vector_mask(self.config.model)
        params = jax.tree.map(lambda x, is_vector: x if is_vector else x.astype(dtype), self.params, mask)
        return params | {"blocks": _separated(params["blocks"], layers=self.config.model.num_layers)}

    @functools.cached_property
    def allowed(self) -> np.ndarray:
        """Mask of the token ids that exist in the tokenizer, bool `[V]`. The model generates only these tokens."""
        size = self.config.model.embeddings
        allowed = [value is not None for value in self.tokenizer.token_bytes[:size]]
        return np.pad(allowed, (0, size - len(allowed)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The state of all rows of a batch between decoding steps. A step appends one token to each row."""

    cache: KVCache
    x_BD: jax.Array  # Output of the last layer at each row's last token. It determines the next token's logits.
    length_B: jax.Array  # Number of tokens in the row, int32. It is also the position of the next token.
    seen_BV: jax.Array  # Whether each token of the vocabulary occurs in the row, bool.
    seed_B: jax.Array  # Seed of the row's random samples, uint32.
    count_B: jax.Array  # Number of new tokens so far, int32.
    limit_B: jax.Array  # Largest number of new tokens, int32.
    done_B: jax.Array  # Whether the row has ended, bool.


def rows_for(requests: int, mesh: jax.sharding.Mesh) -> int:
    """Round the number of rows up so that each shard has the same power of two."""
    per_shard = -(-requests // batch_shards(mesh))
    return batch_shards(mesh) * 2 ** (per_shard - 1).bit_length()


def padded(
    rows: Sequence[Sequence[int]], mesh: jax.sharding.Mesh, config: CacheConfig
) -> tuple[np.ndarray, np.ndarray, int]:
    """Pad rows to whole chunks. Return the tokens `[B, T]` and lengths `[B]`, both int32, and the tokens per chunk."""
    longest = max(1, *map(len, rows))
    count = rows_for(len(rows), mesh)
    chunk = config.chunk_tokens if config.compresses else rounded_up(longest, MIN_CHUNK_TOKENS)
    tokens_BT = np.zeros((count, -(-longest // chunk) * chunk), np.int32)
    length_B = np.zeros(count, np.int32)
    for row, tokens in enumerate(rows):
        tokens_BT[row, : len(tokens)] = tokens
        length_B[row] = len(tokens)
    return tokens_BT, length_B, chunk


def put(mesh: jax.sharding.Mesh, x: np.ndarray) -> jax.Array:
    """Copy an array `[B, …]` from the host to the devices, with its rows sharded over the mesh."""
    # Name every axis in the spec, as in the outputs of programs. A shorter spec would make JAX compile programs twice.
    spec = P(BATCH, *[None] * (x.ndim - 1))
    return jax.device_put(np.ascontiguousarray(x), jax.NamedSharding(mesh, spec))


def prefill(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], *, seeds: Sequence[int], limits: Sequence[int], room: int = 0
) -> Rows:
    """Process prompts and return their `Rows`. The cache has at least `room` slots per row.

    Rows with a limit of 0, and padding rows without a prompt, are marked as ended.
    """
    compression = lm.config.model.cache
    tokens_BT, length_B, chunk = padded(prompts, lm.mesh, compression)
    rows = len(length_B)
    unused = [0] * (rows - len(prompts))
    seen_BV = np.zeros((rows, lm.config.model.embeddings), bool)
    for row, prompt in enumerate(prompts):
        seen_BV[row, list(prompt)] = True
    capacity = capacity_for(max(tokens_BT.shape[1], room), compression)
    cache = new_cache(lm.weights, config=lm.config, rows=rows, capacity=capacity)
    x_BD = put(lm.mesh, np.zeros((rows, lm.config.model.d_model), lm.config.model.compute_dtype))
    for start in range(0, tokens_BT.shape[1], chunk):
        on_devices = (put(lm.mesh, x) for x in (tokens_BT[:, start : start + chunk], length_B))
        cache, x_BD = _prefill_chunk(lm.weights, cache, x_BD, np.int32(start), *on_devices, config=lm.config)
    host = {
        "length_B": length_B,
        "seen_BV": seen_BV,
        "seed_B": np.array([*seeds, *unused], np.uint32),
        "count_B": np.zeros(rows, np.int32),
        "limit_B": np.array([*limits, *unused], np.int32),
        "done_B": np.array([*limits, *unused]) == 0,
    }
    return Rows(cache, x_BD, **{name: put(lm.mesh, x) for name, x in host.items()})


def next_tokens(lm: LanguageModel, rows: Rows, sampling: Sampling, *, room: int = 0) -> tuple[Rows, np.ndarray]:
    """Decode a block of new tokens. Return the new rows and the tokens `[B, N]`.

    Enlarge the cache first, if necessary, to at least `room` slots per row. A row ends with the end-of-text token or at
    its limit. The entries after its end are NO_TOKEN.
    """
    end = np.int32(lm.tokenizer.eot_token)
    rows = dataclasses.replace(rows, cache=grow(rows.cache, capacity_for(room, lm.config.model.cache)))
    rows, token_BN = _decode_block(lm.weights, rows, lm.allowed, end, sampling, config=lm.config)
    return rows, np.asarray(token_BN)


def replaced(lm: LanguageModel, rows: Rows, new: Rows, row_indices: Sequence[int]) -> Rows:
    """Replace row `row_indices[i]` of `rows` by row i of `new`, for each i."""
    capacity = max(capacity_of(x.cache) for x in (rows, new))
    rows, new = (dataclasses.replace(x, cache=grow(x.cache, capacity)) for x in (rows, new))
    source_B = np.full(len(rows.done_B), NO_ROW, np.int32)
    source_B[list(row_indices)] = np.arange(len(row_indices))
    return _replaced(rows, new, put(lm.mesh, source_B))


@functools.partial(jax.jit, donate_argnames="rows")
def _replaced(rows: Rows, new: Rows, source_B: jax.Array) -> Rows:
    """Replace each row b by row `source_B[b]` of `new`, unless `source_B[b]` is `NO_ROW`."""

    def merged(axis: int, old: jax.Array, new: jax.Array) -> jax.Array:
        found = new.at[(slice(None),) * axis + (source_B,)].get(mode="clip", out_sharding=jax.typeof(old).sharding)
        is_new_B = jnp.expand_dims(source_B != NO_ROW, [i for i in range(old.ndim) if i != axis])
        return jnp.where(is_new_B, found, old)

    cache = jax.tree.map(functools.partial(merged, 1), rows.cache, new.cache)
    others = jax.tree.map(functools.partial(merged, 0), *(dataclasses.replace(x, cache=()) for x in (rows, new)))
    return dataclasses.replace(others, cache=cache)


@functools.partial(jax.jit, static_argnames="layers")
def _separated(blocks_L: Any, *, layers: int) -> dict[int, Any]:
    return {i: layer_of(blocks_L, i) for i in range(layers)}


@functools.cache
def _graph(config: Config, is_separated: bool) -> nnx.GraphDef:
    layout = Layout.of(config.mesh.context_method).for_inference()

    def model() -> Decoder:
        # The kernel that the config names may not support prompts of all lengths.
        free = dataclasses.replace(config.model, attention_implementation="auto")
        model = Decoder(free, layout, rngs=nnx.Rngs(0))
        if is_separated:
            model.separate_layers()
        return model

    return nnx.graphdef(nnx.eval_shape(model))


def model_of(config: Config, params: Any) -> Decoder:
    """Build the model with the layout for inference, under jit, from `LanguageModel.params` or `.weights`."""
    return nnx.merge(_graph(config, 0 in params["blocks"]), params)


# Callers of the jitted functions below set the mesh. A function is compiled once per config and shape.
@functools.partial(jax.jit, static_argnames=("config", "rows", "capacity"))
def new_cache(params: Any, *, config: Config, rows: int, capacity: int) -> KVCache:
    """Return an empty cache."""
    return empty_cache(model_of(config, params), rows, capacity)


def cache_bytes_per_token(config: Config, params: Any) -> float:
    """Return the bytes that the cache needs per token: keys, values and their scales in all layers."""
    slots, rows = 1, batch_shards(jax.sharding.get_mesh())
    cache = jax.eval_shape(lambda params: empty_cache(model_of(config, params), rows, slots), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache[:2])) / rows


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("cache", "x_BD"))
def _prefill_chunk(params, cache, x_BD, start, tokens_BT, length_B, *, config):
    """Add a chunk to the cache. For rows whose last token is in the chunk, replace `x_BD` by the new output."""
    attended = cache if config.model.cache.compresses else None  # None: the chunk is the whole prompt.
    new_BTD, entries = extend_chunk(model_of(config, params), attended, start, tokens_BT, length_B)
    last_B = length_B - 1 - start
    new_BD = jnp.take_along_axis(new_BTD, last_B[:, None, None], axis=1, mode="clip")[:, 0]
    is_here_B1 = ((last_B >= 0) & (last_B < tokens_BT.shape[1]))[:, None]
    return write_chunk(cache, entries, start, config.model.cache), jnp.where(is_here_B1, new_BD, x_BD)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="rows")
def _decode_block(params, rows, allowed_V, end, sampling, *, config):
    model = model_of(config, params)
    out_BN = jnp.full((rows.done_B.shape[0], BLOCK_TOKENS), NO_TOKEN, jnp.int32, out_sharding=ROWS)

    def is_unfinished(carry):
        i, rows, _ = carry
        return (i < BLOCK_TOKENS) & ~jnp.all(rows.done_B)

    def step(carry):
        i, rows, out_BN = carry
        token_B = _choose_token(model, rows, allowed_V, sampling)
        new_B1 = jnp.where(rows.done_B, NO_TOKEN, token_B)[:, None]
        out_BN = jnp.where(jnp.arange(BLOCK_TOKENS)[None] == i, new_B1, out_BN)
        return i + 1, _append(model, rows, token_B, end, sampling), out_BN

    _, rows, out_BN = jax.lax.while_loop(is_unfinished, step, (jnp.int32(0), rows, out_BN))
    return rows, reshard(out_BN, P())  # Replicate the tokens, so that every process can read them.


def _choose_token(model: Decoder, rows: Rows, allowed_V: jax.Array, sampling: Sampling) -> jax.Array:
    logits_BV = reshard(model.logits(rows.x_BD[:, None])[:, 0], ROWS)
    logits_BV = jnp.where(allowed_V, logits_BV, -jnp.inf)

    def on_one_device(logits_BV, seen_BV, seed_B, count_B, sampling):
        return choose(logits_BV, sampling, seen_BV=seen_BV, seed_B=seed_B, count_B=count_B)

    in_specs = (ROWS, ROWS, P(BATCH), P(BATCH), P())
    call = jax.shard_map(on_one_device, in_specs=in_specs, out_specs=P(BATCH), check_vma=False)
    return call(logits_BV, rows.seen_BV, rows.seed_B, rows.count_B, sampling)


def _append(model: Decoder, rows: Rows, token_B: jax.Array, end: jax.Array, sampling: Sampling) -> Rows:
    """Append a token to each row. Rows that have ended keep their length, so the token has no effect there."""
    count_B = rows.count_B + jnp.int32(~rows.done_B)
    done_B = rows.done_B | (token_B == end) | (count_B >= rows.limit_B)
    token_B1, position_B1 = token_B[:, None], rows.length_B[:, None]
    x_B1D, entries = extend(model, rows.cache, rows.length_B, token_B1, position_B1, jnp.zeros_like(token_B1))
    # Write the entries after the last layer has read the cache. Without the barrier, XLA on CPUs copies the cache.
    x_B1D, entries = jax.lax.optimization_barrier((x_B1D, entries))
    seen_BV = rows.seen_BV
    if sampling.repetition_penalty is not None:
        seen_BV |= jnp.arange(seen_BV.shape[1])[None] == token_B1
    return dataclasses.replace(
        rows,
        cache=write_token(rows.cache, entries, rows.length_B, model.config.cache),
        x_BD=x_B1D[:, 0],
        length_B=rows.length_B + jnp.int32(~done_B),
        seen_BV=seen_BV,
        count_B=count_B,
        done_B=done_B,
    )


def trace_inference(config: Config, mesh: jax.sharding.Mesh, tokenizer: Tokenizer) -> None:
    """Trace generation and `attention_rows` with abstract parameters, to find errors without compiling."""

    def call(params: Any) -> None:
        lm = LanguageModel(config, mesh, params, tokenizer)
        rows = prefill(lm, [[0]], seeds=[0], limits=[1])
        _decode_block(lm.weights, rows, lm.allowed, np.int32(0), GREEDY, config=config)
        tokens_BT = put(mesh, np.zeros((rows_for(1, mesh), MIN_CHUNK_TOKENS), np.int32))
        layout = Layout.of(config.mesh.context_method).with_whole_rows()
        nnx.merge(graph(config, layout), params).attention_rows(tokens_BT, tokens_BT, tuple)

    with jax.set_mesh(mesh):
        jax.eval_shape(call, jax.eval_shape(lambda: init_params(config)))
