"""Gradients with respect to the logits of A1 and A2, compared with autodiff of a term added to dense logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.model_layers import OPTIONS, TOKENS, X_BTD, layer_of

from difftx.evals.gradients import logit_products
from difftx.model.architectures import heads_of
from difftx.model.attention import layer_constants
from difftx.model.layers import rotary_angles


@pytest.mark.long
@pytest.mark.parametrize("name", ["diff", "gda", "diff_v2", "gdla"])
def test_sums_equal_those_of_dense_attention(name, mesh_of):
    with jax.set_mesh(mesh_of()):
        model, module, *_ = layer_of(name, **OPTIONS)
        angles = rotary_angles(jnp.arange(TOKENS)[None], model)
        constants = jax.tree.map(lambda a: a[1], layer_constants(model))
    constants = constants.of_layer(model, 0)
    ids_BT = np.repeat([[0] * 7 + [1] * (TOKENS - 7)], 2, axis=0)
    dupdate_BTD = np.random.default_rng(1).normal(size=X_BTD.shape).astype(np.float32)
    ago_TT = np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS))
    seen_TT = (ago_TT >= 0) & (ago_TT < (model.windows[0] or TOKENS)) & (ids_BT[0][:, None] == ids_BT[0])
    with jax.set_mesh(mesh_of()), jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):

        @jax.jit
        def inputs_and_sums(module, dupdate_BTD):
            q, k, v_BTKE = module.operands(X_BTD, angles, constants)
            _, *inputs = module.attention_weight_inputs(q, k, X_BTD, constants)
            return (*inputs, v_BTKE), logit_products(module, X_BTD, angles, constants, ids_BT, dupdate_BTD)

        inputs, found_BTH3 = inputs_and_sums(module, dupdate_BTD)
        q_BTHGd, k_BTKGd, lam, v_BTKE = map(np.asarray, inputs)
        heads = q_BTHGd.shape[2]
        k_BTHGd, v_BTHE = (np.repeat(x, heads // x.shape[2], axis=2) for x in (k_BTKGd, v_BTKE))
        logits_BHGTS = jnp.einsum("BTHGd,BSHGd->BHGTS", q_BTHGd, k_BTHGd) / np.sqrt(heads_of(model).d_head)
        lam_BHT = np.moveaxis(np.broadcast_to(lam, q_BTHGd.shape[:3]), 1, 2)

        @jax.jit
        @jax.grad
        def gradient(change_BHGTS):
            weights_BHGTS = jax.nn.softmax(jnp.where(seen_TT, logits_BHGTS + change_BHGTS, -jnp.inf))
            weights_BHTS = weights_BHGTS[:, :, 0] - lam_BHT[..., None] * weights_BHGTS[:, :, 1]
            heads_BTHE = jnp.einsum("BHTS,BSHE->BTHE", weights_BHTS, v_BTHE)
            return jnp.sum(dupdate_BTD * module.output(heads_BTHE, X_BTD, constants))

        ds1_BHTS, ds2_BHTS = np.moveaxis(gradient(jnp.zeros_like(logits_BHGTS)), 2, 0)
    products = np.float64(ds1_BHTS) ** 2, np.float64(ds2_BHTS) ** 2, np.float64(ds1_BHTS) * np.float64(ds2_BHTS)
    for i, product_BHTS in enumerate(products):
        expected_BTH = np.moveaxis(product_BHTS.sum(axis=-1), 1, 2)
        np.testing.assert_allclose(found_BTH3[..., i], expected_BTH, atol=1e-5 * np.abs(expected_BTH).max())
