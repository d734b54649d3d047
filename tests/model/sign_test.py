"""Arms of the planned control by sign (configs/sign.py): their output by NumPy, and how many parameters they train."""

import jax
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx

from difftx import AttentionLayer
from difftx.config.recipes import load_config
from difftx.model.abstract import count_parameters
from difftx.model.architectures import ARCHITECTURES

TOKENS, WIDTH, HEADS = 7, 32, 2


@pytest.fixture(scope="module")
def config_of():
    """Return a function from an arm to its config. Other modules do not see the recipe's architectures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ARCHITECTURES, "_entries", dict(ARCHITECTURES._entries))
        yield lambda arm: load_config(f"{ROOT}/configs/sign.py:novels-{arm}", {})


def softmax(z_TT):
    e_TT = np.exp(z_TT - z_TT.max(-1, keepdims=True))
    return e_TT / e_TT.sum(-1, keepdims=True)


def expected(architecture, layer, x_TD, lambda_init):
    """Return the layer's output without a rotary embedding: all tokens have the position 0."""
    w = {
        name: np.asarray(value, np.float64)
        for name, value in nnx.to_pure_dict(nnx.state(layer.attention)).items()
        if name != "head_norm"
    }
    change = np.subtract(*np.exp((w["lambda_query_Gd"] * w["lambda_key_Gd"]).sum(-1)))
    size = 1 / (1 + (1 - lambda_init) / lambda_init * np.exp(-change))
    outputs = []
    for h in range(HEADS):
        q_GTd, k_GTd = (np.einsum("TD,DGd->GTd", x_TD, w[name][:, h]) for name in ("query_DHGd", "key_DKGd"))
        logits_GTT = q_GTd @ k_GTd.swapaxes(1, 2) / np.sqrt(q_GTd.shape[-1])
        first_TT, second_TT = softmax(np.where(np.tri(TOKENS, dtype=bool), logits_GTT, -np.inf))
        mean_TT = np.tri(TOKENS) / np.arange(1, TOKENS + 1)[:, None]
        weights_TT = {
            "diff": first_TT - size * second_TT,
            "diff_add": first_TT + size * second_TT,
            "diff_uniform": first_TT - size * mean_TT,
        }[architecture]
        head_TE = weights_TT @ (x_TD @ w["value_DKE"][:, h])
        rms_T1 = np.sqrt((head_TE**2).mean(-1, keepdims=True) + layer.attention.config.head_norm_eps)
        outputs.append((1 - lambda_init) * head_TE / rms_T1 @ w["output_HED"][h])
    return sum(outputs)


@pytest.mark.parametrize("architecture", ["diff", "diff_add", "diff_uniform"])
def test_the_second_map_is_subtracted_added_or_replaced_by_the_mean(config_of, architecture):
    config_of("add")
    options = {"lambda_bound": "sigmoid", "lambda_init": 0.3, "lambda_std": 0.5}
    layer = AttentionLayer(architecture, WIDTH, HEADS, rngs=nnx.Rngs(0), **options)
    x_BTD = np.asarray(jax.random.normal(jax.random.key(1), (1, TOKENS, WIDTH)))
    actual = jax.jit(lambda layer, x_BTD: layer(x_BTD, positions=np.zeros((1, TOKENS), np.int32)))(layer, x_BTD)[0]
    wanted = expected(architecture, layer, x_BTD[0].astype(np.float64), 0.3)
    np.testing.assert_allclose(actual, wanted, atol=2e-5 * np.abs(wanted).max())
    assert (float(layer.attention.lam(np.float32(0.3))) < 0) == (architecture == "diff_add")


def test_all_arms_train_equally_many_parameters(config_of):
    """Without the second queries and keys, of 64 × 64 weights in two layers, where these have no effect."""
    used = {}
    for arm in ("transformer", "zero-matched", "subtract", "add", "uniform"):
        model = config_of(arm).model
        used[arm] = count_parameters(model).total - 2 * 2 * 64 * 64 * (arm in ("zero-matched", "uniform"))
    assert used["subtract"] == used["add"] == used["zero-matched"]
    assert all(abs(count / used["subtract"] - 1) < 0.0015 for count in used.values())
