"""Options of the model, each alone and all together, compared with a plain decoder in float64 numpy."""

import jax
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx
from helpers.cases import marked
from helpers.inference_models import random_params
from helpers.model_layers import MUP, OPTIONS, batch_on

from difftx.config.recipes import load_config
from difftx.errors import UserError
from difftx.evals.throughput import counterpart
from difftx.model.abstract import count_parameters
from difftx.model.architectures import heads_of
from difftx.model.flops import flops_per_token
from difftx.training.fit import fit
from difftx.training.loss import batch_loss
from difftx.training.state import graph, init_state, make_train_step
from model import oracle

TOLERANCE = 1e-4  # Relative to the derivative or the gradient's norm, for float32 and float64 after four layers.
CASES = {
    "mup": MUP,
    "all, two groups in a loop": OPTIONS
    | {"train__z_loss": 0.03, "model__num_layers": 4, "model__window_pattern": "LN", "model__remat": "full"},
}


def plain_loss(params, c, tokens, targets, weight):
    """Return the sum of NLL and z-loss, and the sum of the z-loss, by their definitions in float64."""
    model, x = c.model, params["embedding_VD"][tokens]
    depth, width = (model.num_layers / 1, model.d_model / 8) if model.mup_base_width else (1, 1)
    for layer in range(model.num_layers):
        p = jax.tree.map(lambda w_L, layer=layer: w_L[layer], params["blocks"])
        h = oracle.rms(x, p["attention_norm"])
        x = x + np.stack([oracle.layer(p["attention"], model, h_TD, layer) for h_TD in h]) / depth
        h = oracle.rms(x, p["mlp_norm"])
        gate = h @ p["mlp"]["gate_DF"]
        x = x + (gate * oracle.sigmoid(gate) * (h @ p["mlp"]["up_DF"])) @ p["mlp"]["down_FD"] / depth
    logits = oracle.rms(x, params["final_norm"]) @ params["embedding_VD"].T / width
    if model.logit_soft_cap is not None:
        logits = model.logit_soft_cap * np.tanh(logits / model.logit_soft_cap)
    log_z = np.log(np.sum(np.exp(logits), axis=-1))
    nll = log_z - np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    z_loss = np.sum(c.train.z_loss * log_z**2 * weight)
    return np.sum(nll * weight) + z_loss, z_loss


# variants_test.py tests the options of a Transformer's layer.
@pytest.mark.parametrize("case", marked(CASES, fast=["all, two groups in a loop"]))
@pytest.mark.parametrize("architecture", ["diff", pytest.param("transformer", marks=pytest.mark.long)])
def test_loss_and_gradients_are_those_of_the_definition(config, mesh_of, architecture, case):
    c = config(architecture, model__num_heads=4, model__num_kv_heads=2, data__sequence_length=16, **CASES[case])
    mesh = mesh_of()
    # Embeddings so large that soft cap and z-loss matter.
    params = random_params(c, mesh, embedding_scale=0.3)
    with jax.set_mesh(mesh):
        batch, graphdef = batch_on(mesh, c, rows=2), graph(c)

        def loss(params):
            return batch_loss(nnx.merge(graphdef, params), batch, c.train.z_loss)[:2]

        (total, (_, of_z)), grads = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
    arrays = [np.asarray(x) for x in (batch.tokens_BT, batch.targets_BT, batch.loss_mask_BT)]
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(params)))

    def moved(index, change):
        leaves_moved = [x + change if i == index else x for i, x in enumerate(leaves)]
        return plain_loss(jax.tree.unflatten(tree, leaves_moved), c, *arrays)

    expected, expected_z = moved(0, 0)
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert float(of_z) == pytest.approx(expected_z, rel=1e-5)
    assert (expected_z > 0) == (c.train.z_loss > 0)
    rng, step = np.random.default_rng(0), 1e-5
    for index, (path, found) in enumerate(jax.tree.leaves_with_path(grads)):
        direction = rng.normal(size=found.shape)
        change = (moved(index, step * direction)[0] - moved(index, -step * direction)[0]) / (2 * step)
        tolerance = {"rel": TOLERANCE, "abs": TOLERANCE * np.linalg.norm(np.float64(found))}
        assert np.sum(np.float64(found) * direction) == pytest.approx(change, **tolerance), jax.tree_util.keystr(path)


@pytest.mark.long
def test_the_step_reports_the_z_loss_beside_the_loss(config, mesh_of):
    """The metric "loss" is the same with and without z-loss, in one and in two microbatches."""
    mesh, found = mesh_of(), []
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: init_state(config("transformer")))()
    for options in ({}, {"train__z_loss": 0.03}, {"train__z_loss": 0.03, "train__accumulation": 2}):
        c = config("transformer", **options)
        with jax.set_mesh(mesh):
            found.append(jax.device_get(jax.jit(make_train_step(c))(state, batch_on(mesh, c))[1]))
    plain, whole, halves = found
    assert "z_loss" not in plain
    assert whole["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert halves["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    # Initial logits are near 0, so Z is near the size of the vocabulary.
    assert whole["z_loss"] == pytest.approx(0.03 * np.log(264) ** 2, rel=1e-2)
    assert halves["z_loss"] == pytest.approx(whole["z_loss"], rel=1e-5)
    assert whole["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)
    assert halves["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)


def test_parameters_flops_and_counterpart(config):
    """QK-norm adds two gains of width d per layer, biases add 3 d_model numbers, and windows leave fewer pairs."""
    plain, c = config(model__num_layers=3), config(**OPTIONS)
    added = count_parameters(c.model).vectors - count_parameters(plain.model).vectors
    assert added == 3 * (2 * heads_of(c.model).d_head + 3 * c.model.d_model)
    assert count_parameters(c.model).projections == count_parameters(plain.model).projections
    T, W, width = 4096, 1000, 64  # 32 of the queries and 32 of the heads' outputs.
    c = config(**OPTIONS | {"model__window": W}, data__sequence_length=T, train__global_batch_tokens=T)
    visible = [sum(min(t + 1, reach) for t in range(T)) / T for reach in (W, T)]  # Mean number of keys of a query.
    saved = flops_per_token(plain.model, T, causal=True) - flops_per_token(c.model, T, causal=True)
    assert saved == pytest.approx(2 * 6 * width * (visible[1] - visible[0]), rel=1e-3)
    full = flops_per_token(plain.model, T, causal=False) - flops_per_token(c.model, T, causal=False)
    assert full == pytest.approx(2 * saved)
    other = counterpart(c).model
    assert other.architecture == "transformer"
    for name in ("qk_norm", "window", "window_pattern", "logit_soft_cap", "attention_bias", "rope_scaling"):
        assert getattr(other, name) == getattr(c.model, name)
    assert count_parameters(other).projections == count_parameters(c.model).projections


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.window": "256"}, r"model\.window=256 is not less than data\.sequence_length=256"),
        ({"model.window": "0"}, r"model\.window=0 must be positive"),
        ({"model.window_pattern": "LG"}, r"model\.window_pattern='LG' requires model\.window; set it"),
        ({"model.window": "8", "model.window_pattern": "GG"}, r"model\.window=8: .*'GG' has no layer L"),
        ({"model.window": "8", "model.window_pattern": "LX"}, r"model\.window_pattern=LX: write L for a layer"),
        ({"model.window": "8", "model.window_pattern": ""}, r"model\.window_pattern=: write L for a layer"),
        (
            {"model.window": "8", "model.window_pattern": "LLG"},
            r"'LLG' has 3 letters, which do not divide model\.num_layers=4; use .* lengths: 1, 2, 4",
        ),
        ({"model.logit_soft_cap": "0"}, r"model\.logit_soft_cap=0\.0 must be positive"),
        ({"train.z_loss": "-1"}, r"train\.z_loss=-1\.0 must not be negative"),
    ],
)
def test_mistakes_name_field_value_and_fix(changes, message):
    with pytest.raises(UserError, match=message) as error:
        fit(load_config(f"{ROOT}/configs/quickstart.py:diff", changes))
    assert "\n" not in str(error.value)
