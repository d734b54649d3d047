"""Suite `outliers`: largest and median logits and hidden states (Table 5 of the Differential Transformer paper)."""
# Axes of arrays: B = rows of a batch, T = query tokens, S = key tokens (= T), D = model width, H = heads,
# K = key/value heads, R = H / K, G = groups (A1 and A2), C = queries of a chunk, N = devices

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P

from difftx.config import ModelConfig
from difftx.data.loader import Batch
from difftx.evals.evaluation import Evaluation
from difftx.evals.outliers.order_statistics import (
    Counts,
    Digit,
    add_counts,
    no_counts,
    order_statistics,
    slots_for,
    summed,
)
from difftx.evals.result import Number, Result
from difftx.evals.suite import Suite
from difftx.kernels import xla
from difftx.model.architectures import heads_of
from difftx.model.attention import LayerConstants
from difftx.model.decoder import Block, Decoder
from difftx.parallel.layout import Layout
from difftx.training.state import graph

KINDS = ("logits", "hidden")
CHUNK_VALUES = 2**20  # Number of hidden-state values in a chunk. `xla.CHUNK_WEIGHTS` bounds a chunk of logits.


def evaluate(evaluation: Evaluation) -> Result:
    """Return the largest and median magnitudes of logits and hidden states in each validation set, exactly."""
    run, settings = evaluation.run, evaluation.run.config.eval.outliers
    passes = iter(range(1, 3))

    def count(digits: Mapping[str, Digit]) -> dict[str, np.ndarray]:
        return _count(evaluation, digits, f"pass {next(passes)} of 2")

    statistics = order_statistics(count, KINDS, settings.ranks, field="eval.outliers.ranks")
    model, numbers = run.config.model, {}
    for kind, found in statistics.items():
        numbers |= {f"{kind}_top_{rank}": Number(value, better="lower") for rank, value in found.top.items()}
        numbers[f"{kind}_median"] = Number(found.median)
    tokens = statistics["hidden"].count // (model.num_layers * model.d_model)
    counts = {kind: found.count for kind, found in statistics.items()}
    return Result(numbers={**numbers, "tokens": Number(tokens, "tokens")}, details={"values": counts})


def _count(evaluation: Evaluation, digits: Mapping[str, Digit], what: str) -> dict[str, np.ndarray]:
    run, settings = evaluation.run, evaluation.run.config.eval.outliers
    graphdef = graph(run.config, Layout.of(run.config.mesh.context_method).with_whole_rows())
    counts = {kind: no_counts(run.mesh, slots_for(settings.ranks)) for kind in KINDS}
    for name, source in run.data.valid.items():
        for batch in evaluation.batches(source, settings.tokens, f"rows of {name}, {what}"):
            counts = _add_batch(graphdef, evaluation.params, batch, digits, counts)
    return {kind: summed(counts[kind]) for kind in KINDS}


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
    own_HG = jax.sharding.reshard(jnp.asarray(_is_own(model.config)), P(over_heads))
    by_row = jax.sharding.reshard((real_BT, ids_BT), P(over_rows))

    def layer(carry: tuple[jax.Array, Mapping[str, Counts]], block: Block, constants: LayerConstants):
        x_BTD, counts = carry
        q, k, _ = block.attention.operands(block.attention_norm(x_BTD), angles)
        x_BTD, _ = block(x_BTD, lambda h_BTD: block.attention(h_BTD, angles, constants, ids_BT))
        add = functools.partial(jax.shard_map, out_specs=per_device, check_vma=False)
        add_logits = functools.partial(_add_logits, window=constants.window, shared="context" not in over_heads)
        keys = layout.attend_BTHGd
        count_logits = add(add_logits, in_specs=(per_device, keys, keys, P(over_heads), P(over_rows), P()))
        count_hidden = add(_add_hidden, in_specs=(per_device, layout.act_BTD, layout.act_BT, P()))
        logits = count_logits(counts["logits"], q, k, own_HG, by_row, digits["logits"])
        hidden = count_hidden(counts["hidden"], x_BTD, real_BT, digits["hidden"])
        return (x_BTD, {"logits": logits, "hidden": hidden}), None

    (_, counts), _ = model.walk(layer, (model.embed(batch.tokens_BT), counts))
    return counts


def _is_own(config: ModelConfig) -> np.ndarray:
    """Return which heads and groups to count, bool `[H, G]`. Of the copies of a noise head, only the first counts."""
    heads, signal_heads = heads_of(config), getattr(config.own, "signal_heads", None)
    if heads.groups == 1 or signal_heads is None:  # With one group, noise queries are not copied.
        return np.ones((heads.query_heads // heads.groups, heads.groups), bool)
    is_first_H = np.arange(config.num_heads) % signal_heads == 0
    return np.stack([np.ones_like(is_first_H), is_first_H], axis=1)


def _add_logits(counts_1P2V, q_BTHGd, k_BTKGd, own_HG, by_row, digit, *, window, shared):
    """Add one device's logits to its counts, in chunks of queries."""
    real_BT, ids_BT = by_row
    B, _, H, G, _ = q_BTHGd.shape
    K = k_BTKGd.shape[2]
    counted_BTHG = real_BT[:, :, None, None] & own_HG[None, None]
    if shared:  # All devices along the mesh axis `context` have the same logits, and only the first one counts them.
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
    # All devices along the mesh axis `tensor` have the same hidden states, and only the first one counts them.
    counted = (real_BT & (jax.lax.axis_index("tensor") == 0)).reshape(-1)
    size = min(len(counted), max(1, CHUNK_VALUES // D))
    count = -(-len(counted) // size)
    counted = jnp.pad(counted, (0, count * size - len(counted))).reshape(count, size)
    values = jnp.pad(out_BTD.reshape(-1, D), [(0, counted.size - out_BTD.size // D), (0, 0)]).reshape(count, size, D)

    def chunk(counts_P2V: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        values, counted = rows
        return add_counts(counts_P2V, values, jnp.broadcast_to(counted[:, None], values.shape), digit), None

    return jax.lax.scan(chunk, counts_1P2V[0], (values, counted))[0][None]


SUITE = Suite(
    evaluate=evaluate,
    quantizable=False,
    title="Activation outliers",
    explanation="Largest and median magnitude of attention logits and hidden states. Large outliers make quantisation "
    "hard.",
    revision=1,
)
