"""Measure rounded products with weights: errors and outliers by layer, and ranges for static scales.

The suite `quantize` uses this module if `eval.quantize.rounded` is "products".
"""
# Axes: B = rows of a batch, T = tokens, D = model width, L = layers, P = products of a layer

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from difftx.config import Config
from difftx.data.loader import Batch
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import LineChart, Number, Result, Series
from difftx.model.decoder import Decoder
from difftx.model.layers import multiply, observed
from difftx.model.products import COMPUTE_DTYPE
from difftx.training.state import graph

UNROUNDED = "16_bits"
STATIC = "_static"  # Suffix of precisions with static activation scales.
# Line of the chart → precisions, with the bits per weight.
LINES = {
    "weights only": {"int4_weights": 4.0, "int8_weights": 8.0},
    "weights and activations": {"int8": 8.0},
    "weights and activations, static": {"int8_static": 8.0},
    "fp8": {"fp8": 8.0},
    "fp8, static": {"fp8_static": 8.0},
}


def observe(evaluation: Evaluation, modes: Sequence[str]) -> dict[str, np.ndarray]:
    """Return sums over the products for the first `eval.quantize.calibration_tokens` tokens of each training source.

    All arrays are `[L, P]`. "largest", "squares" and "count" describe the inputs: largest magnitude, sum of squares,
    and number. "outputs" is the sum of squared outputs. Each of `modes` has the sum of squared errors of its outputs.
    """
    run = evaluation.run
    plain = graph(run.config.but(model={"matmul": COMPUTE_DTYPE, "matmul_ranges": (), "remat": "none"}))
    found: dict[str, np.ndarray] = {}
    for name, source in run.data.train.items():
        for batch in evaluation.batches(source, run.config.eval.quantize.calibration_tokens, f"calibration on {name}"):
            sums = _observe(plain, tuple(modes), evaluation.params, batch)
            sums = {key: np.asarray(sum_LP, np.float64) for key, sum_LP in sums.items()}
            found = {key: (np.maximum if key == "largest" else np.add)(found.get(key, 0), sums[key]) for key in sums}
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _observe(graphdef: nnx.GraphDef, modes: Sequence[str], params: Any, batch: Batch) -> dict[str, jax.Array]:
    model: Decoder = nnx.merge(graphdef, params)
    of_products: list[dict[str, jax.Array]] = []

    def observer(subscripts: str, x: jax.Array, weight: jax.Array, sharding: Any) -> None:
        real = jnp.expand_dims(batch.is_real_BT, tuple(range(2, x.ndim)))
        x = jnp.where(real, x, jnp.zeros((), x.dtype))
        out = multiply(COMPUTE_DTYPE, subscripts, x, weight, sharding).astype(jnp.float32)
        numbers = {
            "largest": jnp.max(jnp.abs(x)).astype(jnp.float32),
            "squares": jnp.sum(jnp.square(x.astype(jnp.float32))),
            "count": jnp.sum(batch.is_real_BT) * np.float32(np.prod(x.shape[2:])),
            "outputs": jnp.sum(out**2),
        }
        for mode in modes:
            rounded = multiply(mode, subscripts, x, weight, sharding).astype(jnp.float32)
            numbers[mode] = jnp.sum((rounded - out) ** 2)
        of_products.append(numbers)

    def of_layer(x_BTD: jax.Array, _: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        stacked = jax.tree.map(lambda *numbers: jnp.stack(numbers), *of_products)
        of_products.clear()
        return x_BTD, stacked

    with observed(observer):
        _, stats = model.hidden(
            batch.tokens_BT, positions_BT=batch.positions_BT, segment_ids_BT=batch.segment_ids_BT, hook=of_layer
        )
    return stats["hook"]


def configs_of(config: Config, names: Iterable[str], ranges_LP: np.ndarray) -> dict[str, Config]:
    """Return the config for each precision by name. The first is that of the unrounded model."""
    configs = {UNROUNDED: config.but(model={"matmul": COMPUTE_DTYPE})}
    for name in names:
        static = {"matmul_ranges": tuple(ranges_LP.ravel().tolist()), "remat": "none"} if name.endswith(STATIC) else {}
        configs[name] = config.but(model={"matmul": name.removesuffix(STATIC), **static})
    return configs


def lines_of(names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the lines of the chart, each from few bits to 16."""
    of_names = {line: {name: n for name, n in bits.items() if name in names} for line, bits in LINES.items()}
    return {line: chosen | {UNROUNDED: 16.0} for line, chosen in of_names.items() if chosen}


def by_layer(found: dict[str, np.ndarray], modes: Sequence[str]) -> Result:
    """Return relative errors of products, and the largest input relative to the root mean square, by layer."""
    layers = [float(i) for i in range(1, len(found["largest"]) + 1)]
    error_LP = {mode: np.sqrt(found[mode] / np.maximum(found["outputs"], 1e-30)) for mode in modes}
    outlier_LP = found["largest"] / np.sqrt(np.maximum(found["squares"] / found["count"], 1e-30))
    numbers = {f"error_{mode}": Number(np.mean(error), better="lower") for mode, error in error_LP.items()}
    numbers["outlier"] = Number(np.max(outlier_LP), better="lower", label="largest input / root mean square")
    errors = [Series(name=mode, x=layers, y=error.mean(axis=1).tolist()) for mode, error in error_LP.items()]
    outliers = [Series(name="largest of the products", x=layers, y=outlier_LP.max(axis=1).tolist())]
    title, label, axis = "Outliers of the inputs of products", "largest / root mean square", {"x_label": "layer"}
    charts = [
        LineChart(name="quantize_errors", title="Errors of products", y_label="relative error", series=errors, **axis),
        LineChart(name="quantize_outliers", title=title, y_label=label, series=outliers, **axis),
    ]
    details = {"errors": {mode: error.tolist() for mode, error in error_LP.items()}, "outliers": outlier_LP.tolist()}
    return Result(numbers=numbers, details=details | {"ranges": found["largest"].tolist()}, charts=charts)
