"""λ, initial weights and sizes of DiffAttention and of the Transformer. `variants_test.py` compares the outputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from difftx.model.architectures import ARCHITECTURES
from difftx.model.attention import layer_constants
from difftx.model.layers import rotary_angles
from difftx.parallel.layout import Layout

TOKENS = 24


@pytest.fixture(autouse=True)
def _one_device(mesh_of):
    with jax.set_mesh(mesh_of()):
        yield


# Compiled as a whole, which takes less time than to compile each operation.
@functools.partial(jax.jit, static_argnums=0)
def build(model):
    return ARCHITECTURES[model.architecture](model, Layout(), rngs=nnx.Rngs(0))


@functools.partial(jax.jit, static_argnums=1)
def call(module, model, x_BTD):
    angles = rotary_angles(jnp.arange(x_BTD.shape[1])[None], model)
    return module(x_BTD, angles, jax.tree.map(lambda a: a[0], layer_constants(model)), None)


def some_input(model):
    return jnp.asarray(np.random.default_rng(3).normal(size=(2, TOKENS, model.d_model)), jnp.float32)


def test_lambda_init_follows_the_schedule_of_the_paper(config):
    values = layer_constants(config(model__num_layers=6).model).lambda_init
    np.testing.assert_allclose(values[:4], [0.2, 0.3555, 0.4707, 0.5561], atol=5e-5)
    constant = layer_constants(config(model__lambda_init=0.8).model)
    np.testing.assert_allclose(constant.lambda_init, 0.8)
    np.testing.assert_allclose(constant.post_scale, 0.2, rtol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "heads", "kv_heads", "expected"),
    [
        # The official example prints these (microsoft/unilm, Diff-Transformer/example.py).
        ("diff", 8, "none", 4_194_688),
        ("diff", 8, "4", 3_146_112),
        ("transformer", 16, "none", 4_194_304),
        ("transformer", 16, "8", 3_145_728),
    ],
)
def test_parameter_counts_of_the_official_example(config, architecture, heads, kv_heads, expected):
    model = config(architecture, model__d_model=1024, model__num_heads=heads, model__num_kv_heads=kv_heads).model
    parameters = nnx.state(nnx.eval_shape(lambda: build(model)))
    assert sum(np.prod(p.shape) for p in jax.tree.leaves(parameters)) == expected


@pytest.mark.long
def test_fixed_lambda_one_keeps_its_output(config):
    """λ_init = 1 alone would zero the layer, because of the factor 1 - λ_init."""
    options = {"model__lambda_init": 1.0, "model__lambda_learned": "false"}
    model = config(model__post_scale=0.2, **options).model
    module = build(model)
    assert not hasattr(module, "lambda_query_Gd")
    out, stats = call(module, model, some_input(model))
    assert float(stats["lambda"]) == 1.0
    assert np.isfinite(out).all()
    assert float(jnp.abs(out[:, 1:]).max()) > 0.01
    zeroed = config(**options).model
    assert float(jnp.abs(call(build(zeroed), zeroed, some_input(zeroed))[0]).max()) == 0.0


def test_lambda_stays_float32_in_bfloat16(config):
    model = config(model__compute_dtype="bfloat16").model
    module = build(model)
    exponents = np.sum(np.float64(module.lambda_query_Gd[...]) * np.float64(module.lambda_key_Gd[...]), axis=-1)
    expected = np.exp(exponents[0]) - np.exp(exponents[1]) + 0.2
    out, stats = call(module, model, some_input(model).astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert stats["lambda"].dtype == jnp.float32
    np.testing.assert_allclose(stats["lambda"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "std"),
    [
        ({}, (3 * 64) ** -0.5),
        pytest.param({"model__init": "normal", "model__init_std": 0.1}, 0.1, marks=pytest.mark.long),
    ],
)
def test_weights_start_with_the_standard_deviation_of_the_config(config, changes, std):
    model = config(model__d_model=64, model__num_heads=2, **changes).model
    module = build(model)
    for weight in (module.query_DHGd, module.key_DKGd, module.value_DKE, module.output_HED):
        assert float(jnp.std(weight[...])) == pytest.approx(std, rel=0.05)
    if not changes:  # U(±1/√fan_in), as in torch's Linear.
        assert float(jnp.abs(module.output_HED[...]).max()) <= 64**-0.5
    assert float(jnp.std(module.lambda_query_Gd[...])) == pytest.approx(0.1, rel=0.5)
    zero = build(config(model__zero_init_output="true", **changes).model)
    assert not np.any(zero.output_HED[...])
