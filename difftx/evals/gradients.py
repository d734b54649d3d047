"""Suite `gradients`: gradient norms by matrix and layer (Appendix F of the Differential Transformer paper)."""
# Axes: B = batch, T = query tokens, S = key tokens (= T), C = query tokens of a chunk, H = query heads,
#   K = key/value heads, R = H / K = query heads per key/value head, G = 2 groups of queries and keys, L = layers,
#   d = width of a query/key sub-head, E = width of a value head

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from difftx.config import Config, ModelConfig
from difftx.data.loader import Batch
from difftx.evals.evaluation import Evaluation, require_plain_logits
from difftx.evals.result import Heatmap, LineChart, Number, Result, Series
from difftx.evals.suite import Suite
from difftx.evals.throughput import COMPARED, counterpart
from difftx.kernels import weight_functions, xla
from difftx.kernels.backend import broadcast_to_tokens, per_shard
from difftx.model.abstract import vector_mask
from difftx.model.architectures import ARCHITECTURES
from difftx.model.attention import Angles, LayerConstants, SelfAttention
from difftx.model.decoder import Block, Decoder
from difftx.parallel.layout import Layout, reshard
from difftx.training.loss import batch_loss, weighted_loss
from difftx.training.run import Run
from difftx.training.state import graph, init_params, jit_init

_add = jax.jit(functools.partial(jax.tree.map, jnp.add), donate_argnums=0)

CHECKPOINT = "checkpoint"
PAIRS = ("query", "key")  # Differential attention has two of each: W_Q1 and W_Q2, W_K1 and W_K2.
LOGITS = "logits"
COSINES_OF = (CHECKPOINT, "as_configured")  # Models for which cosines are drawn.
TITLES = {
    CHECKPOINT: "of the checkpoint",
    "as_configured": "at initialisation",
    "no_scale": "at initialisation, without the factor 1 - λ_init",
    "no_norm": "at initialisation, without the head norm",
    "no_scale_no_norm": "at initialisation, without head norm and factor",
    "counterpart": "of the counterpart at initialisation",
}


def evaluate(evaluation: Evaluation) -> Result:
    """Measure the gradient of the mean validation loss, at the checkpoint and at initialisation.

    A norm in the numbers covers one matrix over all layers. A cosine is the mean over layers.
    """
    configs = {CHECKPOINT: evaluation.run.config, **initial_configs(evaluation.run.config)}
    numbers, details, cosine_lines = {}, {}, {}
    charts: list[LineChart | Heatmap] = []
    for name, config in configs.items():
        is_checkpoint = name == CHECKPOINT
        params = evaluation.params if is_checkpoint else jit_init(init_params, config)
        loss, norms, cosines = _gradient(evaluation, name, config, params)
        if ARCHITECTURES[config.model.architecture].subtracts and name in COSINES_OF:
            cosines[LOGITS] = _logit_cosines(evaluation, name, config, params)
        prefix = name if is_checkpoint else f"initial_{name}"
        numbers[f"{prefix}_loss"] = Number(loss, "nats per token", "lower")
        numbers |= {f"{prefix}_{matrix}_norm": Number(np.linalg.norm(norm_L)) for matrix, norm_L in norms.items()}
        numbers |= {f"{prefix}_{pair}_cosine": Number(np.mean(cosine_L)) for pair, cosine_L in cosines.items()}
        details[name] = {
            "norms": {matrix: norm_L.tolist() for matrix, norm_L in norms.items()},
            "cosines": {pair: cosine_L.tolist() for pair, cosine_L in cosines.items()},
        }
        title = f"Gradient norms {TITLES[name]}"
        charts.append(_chart(f"gradients_{name}", title, "norm, nats per token", norms, log_y=True))
        if name in COSINES_OF:
            labels = {LOGITS: LOGITS} | {pair: f"W_{pair[0].upper()}" for pair in PAIRS}
            cosine_lines |= {f"{labels[pair]}, {TITLES[name]}": cosine_L for pair, cosine_L in cosines.items()}
    if cosine_lines:
        title = "Cosine of the gradients by the logits and by the matrices of both groups"
        charts.append(_chart("gradients_cosine", title, "cosine", cosine_lines, log_y=False))
    return Result(numbers=numbers, details={"by_layer": details}, charts=charts)


def initial_configs(config: Config) -> dict[str, Config]:
    """Return a config for each entry of `eval.gradients.at_initialization` that applies to the model."""
    model = dataclasses.replace(config.model, zero_init_output=False)
    changes: dict[str, dict[str, Any]] = {"as_configured": {}}
    if {"lambda_init", "post_scale"} <= {*ARCHITECTURES[model.architecture].fields}:  # The usual scale is 1 - λ_init.
        changes["no_scale"] = {"post_scale": 1.0}
    if model.head_norm != "none":
        changes["no_norm"] = {"head_norm": "none"}
    if "no_scale" in changes and "no_norm" in changes:
        changes["no_scale_no_norm"] = changes["no_scale"] | changes["no_norm"]
    configs = {
        name: dataclasses.replace(config, model=dataclasses.replace(model, **change))
        for name, change in changes.items()
    }
    requested = config.eval.gradients.at_initialization
    if "counterpart" in requested and model.architecture in COMPARED:
        configs["counterpart"] = counterpart(configs["as_configured"])
    return {name: configs[name] for name in requested if name in configs}


def matrices(model: ModelConfig, blocks: Any) -> dict[str, jax.Array]:
    """Return the matrices in the blocks' parameters by name, each `[L, …]`. W_Q1 and W_Q2 are separate entries."""
    by_name = {}
    is_vector = jax.tree.leaves(vector_mask(model)["blocks"])
    for (path, leaf), skip in zip(jax.tree.leaves_with_path(blocks), is_vector, strict=True):
        part, name = path[0].key, path[-1].key.split("_")[0]
        if skip:
            continue
        if part == "mlp":
            by_name[f"mlp_{name}"] = leaf
        else:
            by_name |= ARCHITECTURES[model.architecture].matrices_by_group(model, name, leaf)
    return by_name


def check(run: Run) -> None:
    """Raise `UserError` if the suite cannot evaluate the run's settings or model."""
    initial_configs(run.config)
    if ARCHITECTURES[run.config.model.architecture].subtracts:
        require_plain_logits(run, "gradients")


def _gradient(
    evaluation: Evaluation, name: str, config: Config, params: Any
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the loss in nats per token, each matrix's gradient norm `[L]`, and each pair's cosine `[L]`."""
    graphdef, limit, total = graph(config), config.eval.gradients.tokens, None
    for valid, source in evaluation.run.data.valid.items():
        for batch in evaluation.batches(source, limit, f"gradient {TITLES[name]}, rows of {valid}"):
            new = _sum_and_gradient(graphdef, params, batch)
            total = new if total is None else _add(total, new)
    nll, tokens, squares, dots = jax.device_get(_measure(config.model, total))
    norms = {name: np.sqrt(square_L, dtype=np.float64) / tokens for name, square_L in squares.items()}
    cosines = {}
    for pair, dot_L in dots.items():
        product_L = norms[f"{pair}_1"] * norms[f"{pair}_2"] * tokens**2
        cosines[pair] = np.divide(dot_L, product_L, out=np.zeros_like(product_L), where=product_L > 0)
    return float(nll / tokens), norms, cosines


@functools.partial(jax.jit, static_argnums=0)
def _sum_and_gradient(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, Any]:
    """Return a batch's summed loss, its number of unmasked tokens, and the gradient with respect to the blocks."""

    def nll(blocks: Any) -> jax.Array:
        return batch_loss(nnx.merge(graphdef, params | {"blocks": blocks}), batch)[0]

    value, gradient = jax.value_and_grad(nll)(params["blocks"])
    return value, jnp.sum(batch.loss_mask_BT), gradient


@functools.partial(jax.jit, static_argnums=0)
def _measure(model: ModelConfig, total: tuple[jax.Array, jax.Array, Any]):
    """Return the loss, the number of tokens, each matrix's squared norm `[L]`, and each pair's dot product `[L]`."""
    nll, tokens, gradient = total
    by_name = matrices(model, gradient)

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.sharding.reshard(jnp.sum(a * b, axis=tuple(range(1, a.ndim))), jax.P())

    squares = {name: dot(matrix, matrix) for name, matrix in by_name.items()}
    pairs = {pair: (by_name[f"{pair}_1"], by_name[f"{pair}_2"]) for pair in PAIRS if f"{pair}_1" in by_name}
    # With several signal heads per noise head, the two matrices of a pair differ in shape and have no dot product.
    dots = {pair: dot(a, b) for pair, (a, b) in pairs.items() if a.shape == b.shape}
    return nll, tokens, squares, dots


def _logit_cosines(evaluation: Evaluation, name: str, config: Config, params: Any) -> np.ndarray:
    """Return the cosine of dS1 and dS2 (`logit_products`) in each layer, over all heads and token pairs, `[L]`."""
    layout = Layout.of(config.mesh.context_method).for_inference()
    graphdef, limit = graph(config, layout), config.eval.gradients.tokens
    sums_L3 = np.zeros((config.model.num_layers, 3))
    for valid, source in evaluation.run.data.valid.items():
        for batch in evaluation.batches(source, limit, f"gradient by logits {TITLES[name]}, rows of {valid}"):
            sums_L3 += jax.device_get(_logit_products(graphdef, params, batch))
    squares_L = sums_L3[:, 0] * sums_L3[:, 1]
    return np.divide(sums_L3[:, 2], np.sqrt(squares_L), out=np.zeros_like(squares_L), where=squares_L > 0)


@functools.partial(jax.jit, static_argnums=0)
def _logit_products(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> jax.Array:
    """Return |dS1|², |dS2|² and dS1·dS2 of a batch in each layer, float32 `[L, 3]`."""
    model: Decoder = nnx.merge(graphdef, params)
    layout, documents = model.layout, {"positions_BT": batch.positions_BT, "segment_ids_BT": batch.segment_ids_BT}
    tokens_BT, documents = jax.sharding.reshard((batch.tokens_BT, documents), layout.act_BT)

    angles, segment_ids_BT = model.angles(tokens_BT.shape[1], documents["positions_BT"]), documents["segment_ids_BT"]

    def layer(x_BTD: jax.Array, block: Block, constants: LayerConstants, change_BTD: jax.Array):
        """Apply a block, and add `change_BTD` to its attention's residual update. Also return the attention input."""

        def attend(h_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
            return block.attention(h_BTD, angles, constants, segment_ids_BT)[0] + change_BTD, h_BTD

        return block(x_BTD, attend)

    def nll(changes_LBTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_BTD, inputs_LBTD = model.walk(layer, model.embed(tokens_BT), changes_LBTD)
        x_BTD = jax.sharding.reshard(model.final_norm(x_BTD), Layout().act_BTD)
        cap = model.config.logit_soft_cap
        loss, _ = weighted_loss(x_BTD, model.unembedding(), batch.targets_BT, batch.loss_mask_BT, cap, 0.0)
        return loss, inputs_LBTD

    shape = (model.config.num_layers, *tokens_BT.shape, model.config.d_model)
    no_changes_LBTD = jnp.zeros(shape, model.config.compute_dtype, out_sharding=jax.P(None, *layout.act_BTD))
    dupdates_LBTD, inputs_LBTD = jax.grad(nll, has_aux=True)(no_changes_LBTD)

    def products(_: None, block: Block, constants: LayerConstants, x_BTD: jax.Array, dupdate_BTD: jax.Array):
        found_BTH3 = logit_products(block.attention, x_BTD, angles, constants, segment_ids_BT, dupdate_BTD)
        return None, jax.sharding.reshard(jnp.sum(found_BTH3, axis=(0, 1, 2)), jax.P())

    return model.walk(products, None, inputs_LBTD, dupdates_LBTD)[1]


def logit_products(
    attention: SelfAttention,
    x_BTD: jax.Array,
    angles: Angles,
    constants: LayerConstants,
    segment_ids_BT: jax.Array | None,
    dupdate_BTD: jax.Array,
) -> jax.Array:
    """Return |dS1|², |dS2|² and dS1·dS2 of each query, summed over keys, float32 `[B, T, H, 3]`.

    S1 and S2 are the logits of A1 and A2 after the factor 1/√d. `dupdate_BTD` is the gradient of the loss with respect
    to the residual update. `attention` must be of a class with `subtracts = True`.
    """
    q, k, v = attention.operands(x_BTD, angles, constants)
    heads_BTHE = attention.combined(attention.attend(q, k, v, x_BTD, constants, segment_ids_BT), x_BTD)
    _, pullback = jax.vjp(lambda heads_BTHE: attention.output(heads_BTHE, x_BTD, constants), heads_BTHE)
    (dheads_BTHE,) = pullback(dupdate_BTD)
    dheads_BTHE = reshard(dheads_BTHE, attention.layout.attend_BTHE)
    weight_function, q, k, lam = attention.attention_weight_inputs(q, k, x_BTD, constants)
    assert weight_function is weight_functions.difference
    assert lam is not None
    operands = q, k, v, broadcast_to_tokens(lam, q), dheads_BTHE, segment_ids_BT
    return per_shard(functools.partial(_logit_products_on_device, window=constants.window), *operands)


def _logit_products_on_device(
    q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, dout_BTHE, segment_ids_BT, *, window: int | None
) -> jax.Array:
    """Return the result of `logit_products` for the shard of one device.

    `dout_BTHE` is the gradient dO of the heads' outputs. With dP = dO Vᵀ, dS1 = A1 ∘ (dP - rowsum(A1 ∘ dP)) and dS2 =
    -λ A2 ∘ (dP - rowsum(A2 ∘ dP)). These have one number per pair of tokens, so compute them in chunks of queries.
    """
    B, T, H = q_BTHGd.shape[:3]
    K = k_BSKGd.shape[2]

    def chunk(arrays: dict[str, Any]) -> jax.Array:
        dp_BKRCS = xla.einsum("BSKE,BKRCE->BKRCS", v_BSKE, xla.split_heads(arrays["dout"], K))
        factors = 1, -xla.split_heads(arrays["lam"], K)[..., None]
        by_group, ds_BKRCS = xla.masked_logits(arrays, k_BSKGd, segment_ids_BT, window), []
        for factor, logits_BKRCS in zip(factors, by_group, strict=True):
            weights_BKRCS = weight_functions.softmax(logits_BKRCS)
            mean_BKRC1 = jnp.sum(weights_BKRCS * dp_BKRCS, axis=-1, keepdims=True)
            ds_BKRCS.append(factor * (weights_BKRCS * (dp_BKRCS - mean_BKRC1)))
        ds1_BKRCS, ds2_BKRCS = ds_BKRCS
        products = ds1_BKRCS**2, ds2_BKRCS**2, ds1_BKRCS * ds2_BKRCS
        return jnp.moveaxis(jnp.stack([jnp.sum(x, axis=-1) for x in products], axis=-1), 3, 1)

    all_chunks = xla.chunks(segment_ids_BT, None, q=q_BTHGd, lam=lam_BTH, dout=dout_BTHE)
    return xla.joined(jax.lax.map(chunk, all_chunks), T).reshape(B, T, H, 3)


def _chart(name: str, title: str, y_label: str, lines: dict[str, np.ndarray], *, log_y: bool) -> LineChart:
    """Return a chart with the layer on the x-axis. With `log_y`, omit lines that contain a zero."""
    series = [
        Series(name=line, x=[float(layer) for layer in range(1, len(y_L) + 1)], y=[float(y) for y in y_L])
        for line, y_L in lines.items()
        if not log_y or (y_L > 0).all()
    ]
    return LineChart(name=name, title=title, x_label="layer", y_label=y_label, series=series, log_y=log_y)


SUITE = Suite(
    evaluate=evaluate,
    check=check,
    quantizable=False,
    title="Gradients",
    explanation="Norms of the gradient by matrix, and how alike the gradients of the two attention groups are.",
)
