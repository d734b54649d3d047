"""The optimizer "muon": orthogonalised momentum for projections, AdamW for all else (K. Jordan, 2024)."""
# Axes: L = layers, M and N = inputs and outputs of a matrix, … = further axes of a batch of matrices

import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from difftx.config import Config
from difftx.training.parametrization import adam_eps, rate_factors
from difftx.training.trainable import metadata

MatrixAxes = tuple[tuple[int, ...], tuple[int, ...]]  # Input axes and output axes of a weight, counted from the end.

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Coefficients of one iteration (kellerjordan.github.io/posts/muon).
NEWTON_SCHULZ_STEPS = 5
UPDATE_RMS = 0.2  # RMS of an update, similar to AdamW's (arXiv 2502.16982, §2.2).


def muon(config: Config, schedule: optax.Schedule, decayed: Any) -> optax.GradientTransformation:
    """Return Muon for projections, and AdamW for embeddings, vectors and other parameters without `matrix_axes`.

    Orthogonalised updates are scaled to the RMS of AdamW's updates (arXiv 2502.16982), so both optimizers share one
    learning rate and weight decay. The momentum is Nesterov's.
    """
    c = config.optimizer
    axes = matrix_axes(config)

    def labels(params: Any) -> Any:
        return jax.tree.map(lambda _, axes: "adamw" if axes is None else "muon", params, axes)

    def orthogonalized(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda u, axes: u if axes is None else UPDATE_RMS * orthogonalize(u, axes), updates, axes)

    moments: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.trace(c.muon.momentum, nesterov=True),
        "adamw": optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=adam_eps(config)),
    }
    return optax.chain(
        optax.partition(moments, labels),
        optax.stateless(orthogonalized),
        *rate_factors(config, exponent=0.5),
        optax.add_decayed_weights(c.weight_decay, decayed),
        optax.scale_by_learning_rate(schedule),
    )


def matrix_axes(config: Config) -> Any:
    """Return the matrix axes of each parameter as a tree, with None for parameters that use AdamW.

    All other axes are batch axes. Queries, keys, values and gates have up to three output axes: head, group, and width
    of a head. `optimizer.muon.split` turns some of them into batch axes.
    """
    batch = {"none": slice(0, 0), "groups": slice(1, -1), "heads": slice(0, -1)}[config.optimizer.muon.split]

    def split(axes: MatrixAxes | None) -> MatrixAxes | None:
        if axes is None:
            return None
        inputs, outputs = axes
        return inputs, tuple(axis for axis in outputs if axis not in outputs[batch])

    tree = metadata(config, "matrix_axes", None)
    return jax.tree.map(split, tree, is_leaf=lambda axes: axes is None or isinstance(axes, tuple))


def orthogonalize(update: jax.Array, axes: MatrixAxes) -> jax.Array:
    """Orthogonalise the matrices of the update `[L, …]`, and scale them to a root mean square of about 1.

    Each device orthogonalises whole matrices of some layers. Devices that share a weight first exchange matrix shards
    for whole layers, and exchange them back afterwards. Each device holds as many numbers as before.
    """
    sharding = jax.typeof(update).sharding
    sharded = [(dimension, axis) for dimension, axis in enumerate(sharding.spec) if axis is not None]
    if not sharded:
        return _orthogonalize_local(update, axes)
    devices = math.prod(sharding.mesh.shape[axis] for _, axis in sharded)

    def on_device(update: jax.Array) -> jax.Array:
        for dimension, axis in sharded:
            update = jax.lax.all_to_all(update, axis, 0, dimension, tiled=True)
        update = _orthogonalize_local(update, axes)
        for dimension, axis in reversed(sharded):
            update = jax.lax.all_to_all(update, axis, dimension, 0, tiled=True)
        return update

    # Pad with layers of zeros, so that the number of layers is divisible by the number of devices.
    layers = update.shape[0]
    padded = jnp.pad(update, [(0, -layers % devices)] + [(0, 0)] * (update.ndim - 1))
    return jax.shard_map(on_device, in_specs=sharding.spec, out_specs=sharding.spec)(padded)[:layers]


def _orthogonalize_local(update: jax.Array, axes: MatrixAxes) -> jax.Array:
    inputs, outputs = ([axis % update.ndim for axis in part] for part in axes)
    batch = [axis for axis in range(update.ndim) if axis not in (*inputs, *outputs)]
    order = (*batch, *inputs, *outputs)
    ordered = update.transpose(order)
    rows, columns = (math.prod(update.shape[axis] for axis in part) for part in (inputs, outputs))
    x = newton_schulz(ordered.reshape(*(update.shape[axis] for axis in batch), rows, columns))
    # An M × N matrix with all singular values 1 has a root mean square of 1 / √max(M, N).
    return math.sqrt(max(rows, columns)) * x.reshape(ordered.shape).transpose(np.argsort(order))


def newton_schulz(x_MN: jax.Array) -> jax.Array:
    """Return matrices `[…, M, N]` with the singular vectors of `x_MN` and singular values from about 0.7 to 1.2."""
    if x_MN.shape[-2] > x_MN.shape[-1]:
        return newton_schulz(x_MN.mT).mT  # Transpose, so that the products below have the smaller dimension.
    a, b, c = NEWTON_SCHULZ
    x_MN = x_MN / jnp.maximum(jnp.linalg.norm(x_MN, axis=(-2, -1), keepdims=True), 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_MM = x_MN @ x_MN.mT
        x_MN = a * x_MN + (b * gram_MM + c * gram_MM @ gram_MM) @ x_MN
    return x_MN
