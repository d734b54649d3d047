"""The attention variants of docs/extend.md: float64 formulas, gradients, eight devices, saving, decoding.

tests/extend_test.py runs this file in a process of its own, because the variants add fields to the config. The variable
EXTENSIONS names their files.
"""

import contextlib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.model_layers import X_BTD, layer_of
from training import variants_test

from difftx.layer import AttentionLayer
from difftx.model.architectures import heads_of
from difftx.model.attention import layer_constants
from difftx.model.layers import rotary_angles
from difftx.parallel.layout import reshard
from difftx.registry import load_extensions
from model import oracle

TOLERANCE = 1e-5
load_extensions([Path(file) for file in os.environ["EXTENSIONS"].split(":")])


def tda_row(model, lam_T):
    def row(*cosines):
        keys = len(cosines[0])
        threshold = model.own.beta * np.sqrt(2 * np.log(keys + 1) / heads_of(model).d_head)
        first, second = (np.where(c > threshold, (c - threshold) ** 2, 0) for c in cosines)
        return first - lam_T[keys - 1] * second

    return row


def difference_row(model, lam_T):
    return lambda z1, z2: oracle.softmax_row(z1) - lam_T[len(z1) - 1] * oracle.softmax_row(z2)


def lambdas(w, model, x_TD, depth):
    """Return λ of each token and head in layer `depth` + 1."""
    if "lambda_DH" in w:
        return oracle.sigmoid(x_TD @ w["lambda_DH"] + w["bias_H"])
    exponents = np.sum(w["lambda_query_Gd"] * w["lambda_key_Gd"], axis=-1)
    lam = np.exp(exponents[0]) - np.exp(exponents[1]) + 0.8 - 0.6 * np.exp(-0.3 * depth)
    return np.full((len(x_TD), model.num_heads), lam)


def diff_projections(w, model, x_TD, head, kv, g):
    return oracle.position_encoded(w, model, x_TD @ w["query_DHGd"][:, head, g], x_TD @ w["key_DKGd"][:, kv, g])


def tda_projections(w, model, x_TD, head, kv, g):
    q_Td, k_Td = diff_projections(w, model, x_TD, head, kv, g)
    q_Td, k_Td = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q_Td, k_Td))
    return np.sqrt(heads_of(model).d_head) * q_Td, k_Td  # `oracle.attend` divides the products by √d.


def shared_projections(w, model, x_TD, head, kv, g):
    query_Dd, key_Dd = (
        w[f"{of}_DHd"][:, n] + w[f"{of}_down_DGr"][:, g] @ w[f"{of}_up_rGHd"][:, g, n]
        for of, n in (("query", head), ("key", kv))
    )
    return oracle.position_encoded(w, model, x_TD @ query_Dd, x_TD @ key_Dd)


FORMULAS = {
    "token_lambda": (difference_row, diff_projections),
    "tda": (tda_row, tda_projections),
    "shared_diff": (difference_row, shared_projections),
}


def layer(w, model, x_BTD, depth):
    """Return the update by layer `depth` + 1."""
    row_of, projections = FORMULAS[model.architecture]
    lambda_init = 0.8 - 0.6 * np.exp(-0.3 * depth)

    def update(x_TD):
        heads = []
        for head in range(model.num_heads):
            kv = head * heads_of(model).kv_heads // model.num_heads
            pairs = [projections(w, model, x_TD, head, kv, g) for g in range(2)]
            row = row_of(model, lambdas(w, model, x_TD, depth)[:, head])
            head_TE = oracle.attend(row, pairs, x_TD @ w["value_DKE"][:, kv])
            heads.append((1 - lambda_init) * oracle.head_norm(head_TE, head, w, model))
        return np.concatenate(heads, axis=1) @ w["output_HED"].reshape(-1, model.d_model)

    return np.stack([update(x_TD) for x_TD in np.float64(x_BTD)])


@pytest.mark.parametrize("name", FORMULAS)
def test_a_layer_and_its_gradient_equal_the_formula(name, mesh_of):
    with jax.set_mesh(mesh_of()):
        model, module, call, gradient = layer_of(name, model__num_heads=4, model__num_kv_heads=2)
        if name == "token_lambda":  # With λ near 1, a norm divides by a small number.
            module.lambda_DH[...] *= 0.25
        w = oracle.weights_of(module)
        for depth in (0, 1):
            expected_BTD = layer(w, model, X_BTD, depth)
            np.testing.assert_allclose(call(X_BTD, depth), expected_BTD, atol=TOLERANCE * np.abs(expected_BTD).max())
        cotangent_BTD, direction_BTD = np.random.default_rng(0).normal(size=(2, *X_BTD.shape))
        by_x_BTD = gradient(X_BTD, cotangent_BTD, 1).by_x_BTD
    step = 1e-6
    after, before = (np.sum(cotangent_BTD * layer(w, model, X_BTD + s * direction_BTD, 1)) for s in (step, -step))
    tolerance = {"rel": TOLERANCE, "abs": TOLERANCE * np.linalg.norm(np.float64(by_x_BTD))}
    assert np.sum(by_x_BTD * direction_BTD) == pytest.approx((after - before) / (2 * step), **tolerance)


@pytest.mark.parametrize("name", FORMULAS)
def test_extension_trains_on_eight_devices_saves_and_decodes(name, config, mesh_of, tmp_path):
    check = variants_test.test_variant_trains_sharded_saves_and_decodes
    # The head norm enlarges a head without a key above the threshold of tda, and its rounding.
    check(config, mesh_of, tmp_path, name, {"model__head_dim": 8} | variants_test.LARGE_HEAD_NORM_EPS)


@pytest.mark.parametrize("sizes", [None, {"fsdp": 2, "tensor": 2}], ids=["no mesh", "four devices"])
@pytest.mark.parametrize("name", FORMULAS)
def test_an_attention_layer_equals_the_formula(name, sizes, mesh_of):
    with contextlib.nullcontext() if sizes is None else jax.set_mesh(mesh_of(**sizes)):
        module = AttentionLayer(name, 32, 4, num_kv_heads=2, rngs=nnx.Rngs(0))
        out_BTD = jax.jit(module)(X_BTD)
    expected_BTD = layer(oracle.weights_of(module.attention), module.attention.config, X_BTD, 0)
    np.testing.assert_allclose(out_BTD, expected_BTD, atol=TOLERANCE * np.abs(expected_BTD).max())


def test_the_attention_weights_have_the_lambda_of_each_token(mesh_of):
    with jax.set_mesh(mesh_of(fsdp=2, tensor=2)):
        module = AttentionLayer("token_lambda", 32, 4, num_kv_heads=2, rngs=nnx.Rngs(0)).attention
        model, queries_BC = module.config, jnp.array([[3, 17], [0, 9]])
        angles = rotary_angles(jnp.arange(X_BTD.shape[1])[None], model)
        constants = jax.tree.map(lambda constant_L: constant_L[0], layer_constants(model))
        x_BTD = reshard(jnp.asarray(X_BTD), module.layout.act_BTD)
        rows = jax.jit(module.attention_rows)(x_BTD, angles, constants, None, queries_BC)
    a1_BCHS, a2_BCHS = (jax.nn.softmax(np.asarray(rows.logits_BCHGS)[..., g, :], axis=-1) for g in range(2))
    w = oracle.weights_of(module)
    expected_BTH = np.stack([lambdas(w, model, x_TD, 0) for x_TD in np.float64(X_BTD)])
    expected_BCH = np.take_along_axis(expected_BTH, np.array(queries_BC)[..., None], axis=1)
    np.testing.assert_allclose(rows.lam_BCH, expected_BCH, rtol=TOLERANCE)
    np.testing.assert_allclose(rows.weights_BCHS, a1_BCHS - expected_BCH[..., None] * a2_BCHS, atol=TOLERANCE)
