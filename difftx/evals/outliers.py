"""Suite `outliers`: largest and median logits and hidden states (Table 5 of the Differential Transformer paper).

The order statistics are exact, even though the magnitudes do not fit into memory: the devices use radix selection.
Non-negative float32 values have the same order as their bits, read as integers. The first pass counts the high 16 bits
(high digit) of all magnitudes. These counts show the high digits of the requested values. The second pass counts the
low 16 bits of the magnitudes with one of these high digits. Both passes run the same program, so that a magnitude has
the same bits in both.
"""
# Axes of arrays: B = rows of a batch, T = query tokens, S = key tokens (= T), D = model width, H = heads,
# K = key/value heads, R = H / K, G = groups (A1 and A2), C = queries of a chunk, N = devices,
# P = slots, one per high digit whose low digits are counted, V = values of a digit

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P

from difftx.config import ModelConfig
from difftx.data.loader import Batch
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Number, Result
from difftx.evals.suite import Suite
from difftx.kernels import xla
from difftx.model.architectures import heads_of
from difftx.model.attention import LayerConstants
from difftx.model.decoder import Block, Decoder
from difftx.parallel.layout import Layout
from difftx.training.state import graph

KINDS = ("logits", "hidden")
CHUNK_VALUES = 2**20  # Hidden-state values per chunk. For logits, `xla.CHUNK_WEIGHTS` is the limit.
DIGIT_BITS = 16
V = 2**DIGIT_BITS

# uint32 `[N, P, 2, V]`, sharded over all devices. Each count has a low and a high word, because one word could
# overflow.
type Counts = jax.Array


class Digit(NamedTuple):
    """The 16 bits to count in a pass, for the magnitudes whose high digit has a slot."""

    slot_V: np.ndarray  # Slot of each high digit, uint32. P, the number of slots, if it has none.
    shift: np.uint32  # Position of the lowest of the 16 bits.


class Statistics(NamedTuple):
    """The order statistics of one set of magnitudes."""

    count: int
    top: dict[int, float]  # Values by rank. The largest value has rank 1.
    median: float  # For an even count, the mean of the two middle values.


def evaluate(evaluation: Evaluation) -> Result:
    """Return the exact largest and median magnitudes of logits and hidden states in each validation set."""
    run, settings = evaluation.run, evaluation.run.config.eval.outliers
    graphdef = graph(run.config, Layout.of(run.config.mesh.context_method).with_whole_rows())
    passes = iter(range(1, 3))

    def count(digits: Mapping[str, Digit]) -> dict[str, np.ndarray]:
        number, counts = next(passes), {kind: no_counts(run.mesh, slots_for(settings.ranks)) for kind in KINDS}
        for name, source in run.data.valid.items():
            for batch in evaluation.batches(source, settings.tokens, f"rows of {name}, pass {number} of 2"):
                counts = _add_batch(graphdef, evaluation.params, batch, digits, counts)
        return {kind: summed(counts[kind]) for kind in KINDS}

    statistics = order_statistics(count, KINDS, settings.ranks)
    model, numbers = run.config.model, {}
    for kind, found in statistics.items():
        numbers |= {f"{kind}_top_{rank}": Number(value, better="lower") for rank, value in found.top.items()}
        numbers[f"{kind}_median"] = Number(found.median)
    tokens = statistics["hidden"].count // (model.num_layers * model.d_model)
    counts = {kind: found.count for kind, found in statistics.items()}
    return Result(numbers={**numbers, "tokens": Number(tokens, "tokens")}, details={"values": counts})


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _add_batch(
    graphdef: nnx.GraphDef, params: Any, batch: Batch, digits: Mapping[str, Digit], counts: Mapping[str, Counts]
) -> dict[str, Counts]:
    """Add the logits and hidden states of a batch's real tokens to `counts`."""
    model: Decoder = nnx.merge(graphdef, params)
    layout, ids_BT, real_BT = model.layout, batch.segment_ids_BT, batch.is_real_BT
    angles = model.angles(batch.tokens_BT.shape[1], batch.positions_BT)
    per_device = P(jax.sharding.get_abstract_mesh().axis_names)
    over_rows, _, over_heads, _ = layout.attend_BTHE
    counted_HG = jax.sharding.reshard(jnp.asarray(_heads_to_count(model.config)), P(over_heads))
    by_row = jax.sharding.reshard((real_BT, ids_BT), P(over_rows))

    def layer(carry: tuple[jax.Array, Mapping[str, Counts]], block: Block, constants: LayerConstants):
        x_BTD, counts = carry
        q, k, _ = block.attention.operands(block.attention_norm(x_BTD), angles, constants)
        x_BTD, _ = block(x_BTD, lambda h_BTD: block.attention(h_BTD, angles, constants, ids_BT))
        add = functools.partial(jax.shard_map, out_specs=per_device, check_vma=False)
        add_logits = functools.partial(_add_logits, window=constants.window, shared="context" not in over_heads)
        keys = layout.attend_BTHGd
        count_logits = add(add_logits, in_specs=(per_device, keys, keys, P(over_heads), P(over_rows), P()))
        count_hidden = add(_add_hidden, in_specs=(per_device, layout.act_BTD, layout.act_BT, P()))
        logits = count_logits(counts["logits"], q, k, counted_HG, by_row, digits["logits"])
        hidden = count_hidden(counts["hidden"], x_BTD, real_BT, digits["hidden"])
        return (x_BTD, {"logits": logits, "hidden": hidden}), None

    (_, counts), _ = model.walk(layer, (model.embed(batch.tokens_BT), counts))
    return counts


def _heads_to_count(config: ModelConfig) -> np.ndarray:
    """Return which heads and groups to count, bool `[H, G]`. Of a noise head's copies, count only the first."""
    heads, signal_heads = heads_of(config), getattr(config.own, "signal_heads", None)
    if heads.groups == 1 or signal_heads is None:  # With one group, noise queries are not copied.
        return np.ones((heads.query_heads // heads.groups, heads.groups), bool)
    is_first_H = np.arange(config.num_heads) % signal_heads == 0
    return np.stack([np.ones_like(is_first_H), is_first_H], axis=1)


def _add_logits(counts_1P2V, q_BTHGd, k_BTKGd, counted_HG, by_row, digit, *, window, shared):
    """Add one device's logits to its counts, in chunks of queries."""
    real_BT, ids_BT = by_row
    B, _, H, G, _ = q_BTHGd.shape
    K = k_BTKGd.shape[2]
    counted_BTHG = real_BT[:, :, None, None] & counted_HG[None, None]
    if shared:  # Devices along the mesh axis `context` have the same logits, so only the first one counts them.
        counted_BTHG &= jax.lax.axis_index("context") == 0

    def chunk(counts_P2V: jax.Array, arrays: dict[str, Any]) -> tuple[jax.Array, None]:
        logits_BKRGCS = jnp.stack(xla.masked_logits(arrays, k_BTKGd, ids_BT, window), axis=3)
        counted_BKRGC = jnp.moveaxis(arrays["counted"].reshape(B, -1, K, H // K, G), 1, 4)
        counted_BKRGCS = counted_BKRGC[..., None] & ~(logits_BKRGCS <= xla.MASKED)  # Counts NaN too.
        return add_counts(counts_P2V, logits_BKRGCS, counted_BKRGCS, digit), None

    all_chunks = xla.chunks(ids_BT, None, B * H * G, q=q_BTHGd, counted=counted_BTHG)
    return jax.lax.scan(chunk, counts_1P2V[0], all_chunks)[0][None]


def _add_hidden(counts_1P2V, out_BTD, real_BT, digit):
    """Add one device's hidden states to its counts, in chunks of tokens."""
    D = out_BTD.shape[2]
    # Devices along the mesh axis `tensor` have the same hidden states, so only the first one counts them.
    counted = (real_BT & (jax.lax.axis_index("tensor") == 0)).reshape(-1)
    size = min(len(counted), max(1, CHUNK_VALUES // D))
    count = -(-len(counted) // size)
    counted = jnp.pad(counted, (0, count * size - len(counted))).reshape(count, size)
    values = jnp.pad(out_BTD.reshape(-1, D), [(0, counted.size - out_BTD.size // D), (0, 0)]).reshape(count, size, D)

    def chunk(counts_P2V: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        values, counted = rows
        return add_counts(counts_P2V, values, jnp.broadcast_to(counted[:, None], values.shape), digit), None

    return jax.lax.scan(chunk, counts_1P2V[0], (values, counted))[0][None]


def order_statistics(
    count: Callable[[Mapping[str, Digit]], Mapping[str, np.ndarray]], names: Sequence[str], ranks: Sequence[int]
) -> dict[str, Statistics]:
    """Return statistics of sets of magnitudes at the given ranks, from two passes over the values.

    In each pass, `count` receives the digit to count in each set. It returns the counts of each set, int64 `[P, V]`.
    """
    everything = Digit(np.zeros(V, np.uint32), np.uint32(DIGIT_BITS))
    high = {name: counts_PV[0] for name, counts_PV in count(dict.fromkeys(names, everything)).items()}
    indices, digits = {}, {}
    for name in names:
        total = int(high[name].sum())
        if max(ranks) > total:
            raise UserError(f"eval.outliers.ranks: rank {max(ranks)} of {total} values; use ranks of at most {total}")
        indices[name] = [*(total - rank for rank in ranks), (total - 1) // 2, total // 2]
        needed = np.unique(np.searchsorted(np.cumsum(high[name]), indices[name], side="right"))
        slot_V = np.full(V, slots_for(ranks), np.uint32)
        slot_V[needed] = np.arange(len(needed))
        digits[name] = Digit(slot_V, np.uint32(0))
    low = count(digits)
    return {name: _statistics(high[name], low[name], digits[name], indices[name], ranks) for name in names}


def slots_for(ranks: Sequence[int]) -> int:
    """Return the maximum number of high digits among the requested values: one per rank, and two for the median."""
    return len(ranks) + 2


def no_counts(mesh: jax.sharding.Mesh, slots: int) -> Counts:
    """Return zero counts, sharded over all devices."""
    return jnp.zeros((mesh.size, slots, 2, V), jnp.uint32, out_sharding=P(mesh.axis_names))


def add_counts(counts_P2V: jax.Array, values: jax.Array, counted: jax.Array, digit: Digit) -> jax.Array:
    """Add the magnitudes of `values`, fewer than 2**32, to one device's counts. Only add those with `counted` True."""
    slots = counts_P2V.shape[0]
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32) & 0x7FFF_FFFF  # Clears the sign bit.
    slot = jnp.asarray(digit.slot_V)[bits >> DIGIT_BITS]
    cell = jnp.where(counted, slot * V + ((bits >> digit.shift) & (V - 1)), slots * V)
    new_PV = jnp.zeros(slots * V, jnp.uint32).at[cell.reshape(-1)].add(jnp.uint32(1), mode="drop").reshape(slots, V)
    low_PV = counts_P2V[:, 0] + new_PV
    return jnp.stack([low_PV, counts_P2V[:, 1] + (low_PV < new_PV)], axis=1)


def summed(counts: Counts) -> np.ndarray:
    """Return the sum of all devices' counts, int64 `[P, V]`, in every process."""
    halves = np.asarray(_sum_of_halves(counts)).astype(np.int64)
    return np.sum(halves << (DIGIT_BITS * np.arange(4))[:, None], axis=1)


@jax.jit
def _sum_of_halves(counts_NP2V: Counts) -> jax.Array:
    # Sum halves of words: a sum of 16-bit numbers over up to 65,536 devices fits into 32 bits.
    halves = [counts_NP2V[:, :, word] >> shift & (V - 1) for word in range(2) for shift in (0, DIGIT_BITS)]
    return jax.sharding.reshard(jnp.sum(jnp.stack(halves, axis=2), axis=0), P())


def _statistics(
    high_V: np.ndarray, low_PV: np.ndarray, digit: Digit, indices: Sequence[int], ranks: Sequence[int]
) -> Statistics:
    """Return a set's statistics from its counts. `indices` are positions in ascending order of magnitude."""
    until_V = np.cumsum(high_V)

    def value_at(index: int) -> float:
        high = int(np.searchsorted(until_V, index, side="right"))
        low_V = low_PV[digit.slot_V[high]]
        index_in_digit = index - (until_V[high] - high_V[high])
        low = int(np.searchsorted(np.cumsum(low_V), index_in_digit, side="right"))
        return float(np.uint32(high << DIGIT_BITS | low).view(np.float32))

    *top, below, above = map(value_at, indices)
    return Statistics(int(high_V.sum()), dict(zip(ranks, top, strict=True)), (below + above) / 2)


SUITE = Suite(
    evaluate=evaluate,
    quantizable=False,
    title="Activation outliers",
    explanation="Largest and median magnitude of attention logits and hidden states. Large outliers make quantisation "
    "hard.",
    revision=1,
)
