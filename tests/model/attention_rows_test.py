"""Attention weights of selected queries, compared with their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.cases import marked
from helpers.model_layers import OPTIONS, TOKENS, X_BTD, layer_of, parameters_of

from difftx.model.architectures import heads_of
from difftx.model.attention import layer_constants
from difftx.model.layers import rotary_angles
from difftx.training.state import graph
from model import oracle

SIZES = {"diff": {"model__num_heads": 4, "model__num_kv_heads": 2}, "transformer": {"model__num_heads": 4}}
SIZES |= oracle.SIZES
FAST = ("diff", "diff_v2")  # The λ of diff_v2 depends on the token.
PAIRS = {"diff", "gda", "motif", "diff_v2", "gdla", "diff_fixed_lambda", "zero_branch"}
ROW = 32


def oracle_attention_weights(monkeypatch, module, model, x_TD, depth):
    """Return the oracle's attention weights `[H, T, T]`, A1 and A2 `[H, 2, T, T]`, and λ `[H, T]`."""
    weights, softmax_weights, attend = [], [], oracle.attend

    def recorded(row, queries_keys, v_TE, window):
        one_hot_TT = np.eye(len(v_TE))  # These values make the output equal to the attention weights.
        weights.append(attend(row, queries_keys, one_hot_TT, window))
        softmax_weights.append([attend(oracle.softmax_row, [pair], one_hot_TT, window) for pair in queries_keys])
        return attend(row, queries_keys, v_TE, window)

    monkeypatch.setattr(oracle, "attend", recorded)
    w = oracle.weights_of(module)
    oracle.layer(w, model, x_TD, depth)
    monkeypatch.undo()
    pairs_HGTT = np.array(softmax_weights)
    if "lambda_DH" in w:  # The oracle computes the noise head of each pair first.
        pairs_HGTT = np.stack([weights[1::2], weights[::2]], axis=1)
        lam_HT = oracle.sigmoid(x_TD.astype(np.float64) @ w["lambda_DH"]).T
        return pairs_HGTT[:, 0] - lam_HT[..., None] * pairs_HGTT[:, 1], pairs_HGTT, lam_HT
    return np.array(weights), pairs_HGTT, None


@pytest.mark.parametrize("name", marked(SIZES, fast=FAST))
def test_weights_of_a_layer_equal_the_formula(name, monkeypatch, mesh_of):
    with jax.set_mesh(mesh_of()):
        model, module, *_ = layer_of(name, **(SIZES[name] if name not in oracle.SIZES else {}), **OPTIONS)
        graphdef, state = nnx.split(module)
        x_BTD = 0.3 * X_BTD
        queries_BC = np.array([[TOKENS - 1, 0, 7], [4, 11, 5]], np.int32)
        angles = rotary_angles(jnp.arange(TOKENS)[None], model)
        constants = jax.tree.map(lambda a: a[1], layer_constants(model))
        constants = constants.of_layer(model, 0)
        rows = jax.jit(lambda s, x, q: nnx.merge(graphdef, s).attention_rows(x, angles, constants, None, q))(
            state, x_BTD, queries_BC
        )
    assert (rows.lam_BCH is not None) == (name in PAIRS)
    for b in range(2):
        weights_HTT, pairs_HGTT, lam_HT = oracle_attention_weights(monkeypatch, module, model, x_BTD[b], 1)
        at = queries_BC[b]
        np.testing.assert_allclose(rows.weights_BCHS[b], np.moveaxis(weights_HTT, 1, 0)[at], rtol=0, atol=1e-6)
        if name in PAIRS:
            found = jax.nn.softmax(rows.logits_BCHGS[b], axis=-1)
            np.testing.assert_allclose(found, np.moveaxis(pairs_HGTT, 2, 0)[at], rtol=0, atol=1e-6)
            np.testing.assert_allclose(rows.weights_BCHS[b].sum(-1), 1 - rows.lam_BCH[b], atol=1e-6)
        if lam_HT is not None:
            np.testing.assert_allclose(rows.lam_BCH[b], lam_HT[:, at].T, atol=1e-6)


def attention_rows(config, mesh, queries, tokens, ids, positions):
    def place(x):
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))

    with jax.set_mesh(mesh):
        graphdef, params = graph(config), parameters_of(config)
        documents = {"positions_BT": place(positions), "segment_ids_BT": place(ids)}
        return jax.jit(lambda p, t, q, d: nnx.merge(graphdef, p).attention_rows(t, q, lambda rows: rows, **d))(
            params, place(tokens), place(queries), documents
        )


@pytest.mark.long
def test_sharding_does_not_change_attention_in_packed_documents(config, mesh_of):
    """Compare one device with eight, for rows of two documents each."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 257, (8, ROW)).astype(np.int32)
    cut = rng.integers(8, 24, 8)
    ids = (np.arange(ROW) >= cut[:, None]).astype(np.int32)
    positions = (np.arange(ROW) - ids * cut[:, None]).astype(np.int32)
    queries = rng.integers(0, ROW, (8, 3)).astype(np.int32)
    c = config("diff_v2", **SIZES["diff_v2"])
    rows = attention_rows(c, mesh_of(), queries, tokens, ids, positions)
    sizes = {"fsdp": 4, "tensor": 2} if heads_of(c.model).kv_heads % 4 else {"fsdp": 2, "tensor": 2, "context": 2}
    on_eight = attention_rows(c, mesh_of(**sizes), queries, tokens, ids, positions)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), rows, on_eight)
    assert rows.weights_BCHS.shape == (2, 8, 3, c.model.num_heads, ROW)
    seen_BCS = (np.arange(ROW) <= queries[..., None]) & (np.take_along_axis(ids, queries, 1)[..., None] == ids[:, None])
    is_zero = np.broadcast_to(~seen_BCS[None, :, :, None], rows.weights_BCHS.shape)
    assert not np.asarray(rows.weights_BCHS)[is_zero].any()
