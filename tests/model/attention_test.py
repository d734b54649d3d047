"""DiffAttention, compared with the paper's equations in float64 numpy and with numbers of the official example."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels.oracle import softmax_row

from difftx.model.architectures import heads_of
from difftx.model.attention import Attention, DiffAttention, layer_constants
from difftx.model.layers import rotary_angles
from difftx.parallel.layout import Layout
from model.oracle import turned

TOKENS = 24


@pytest.fixture(autouse=True)
def _one_device(mesh_of):
    with jax.set_mesh(mesh_of()):
        yield


# Compiled as a whole, which takes less time than to compile each operation.
@functools.partial(jax.jit, static_argnums=(0, 1))
def build(model, seed=0):
    module = {"diff": DiffAttention, "transformer": Attention}[model.architecture]
    return module(model, Layout(), rngs=nnx.Rngs(seed))


@functools.partial(jax.jit, static_argnums=(1, 3))
def call(module, model, x_BTD, layer=0, segment_ids=None):
    angles = rotary_angles(jnp.arange(x_BTD.shape[1])[None], model)
    constants = jax.tree.map(lambda a: a[layer], layer_constants(model))
    return module(x_BTD, angles, constants, segment_ids)


def some_input(model, batch=2, seed=3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, TOKENS, model.d_model)), jnp.float32)


def paper_layer(module: DiffAttention, model, x_TD: np.ndarray, layer: int) -> np.ndarray:
    """Return the update of one row by Eq. 1, 2 and 3 of arXiv 2410.05258, head by head in float64."""
    weight = {name: np.asarray(p[...], np.float64) for name, p in vars(module).items() if isinstance(p, nnx.Param)}
    lambda_q, lambda_k = weight["lambda_query_Gd"], weight["lambda_key_Gd"]
    lambda_init = 0.8 - 0.6 * np.exp(-0.3 * layer)  # Layer l = layer + 1.
    lam = np.exp(lambda_q[0] @ lambda_k[0]) - np.exp(lambda_q[1] @ lambda_k[1]) + lambda_init
    x = np.asarray(x_TD, np.float64)
    heads = []
    for i in range(model.num_heads):
        kv = i // (model.num_heads // heads_of(model).kv_heads)
        q1, q2 = (turned(x @ weight["query_DHGd"][:, i, g], model) for g in (0, 1))
        k1, k2 = (turned(x @ weight["key_DKGd"][:, kv, g], model) for g in (0, 1))
        v = x @ weight["value_DKE"][:, kv]
        head = np.zeros((len(x), v.shape[1]))
        for t in range(len(x)):
            a1 = softmax_row(k1[: t + 1] @ q1[t] / np.sqrt(heads_of(model).d_head))
            a2 = softmax_row(k2[: t + 1] @ q2[t] / np.sqrt(heads_of(model).d_head))
            head[t] = (a1 - lam * a2) @ v[: t + 1]
        norm = head
        if model.head_norm.startswith("rms"):
            norm = head / np.sqrt(np.mean(head**2, axis=1, keepdims=True) + 1e-5)
        if model.head_norm in ("rms_affine", "scalar"):
            norm = norm * np.asarray(module.head_norm.scale[...], np.float64)
        heads.append((1 - lambda_init) * norm)
    return np.concatenate(heads, axis=1) @ weight["output_HED"].reshape(-1, model.d_model)


@pytest.mark.parametrize(
    ("head_norm", "kv_heads"),
    [
        *(("rms_affine", "2"), ("rms", "1")),
        *(pytest.param(norm, "2", marks=pytest.mark.long) for norm in ("none", "scalar")),
        *(pytest.param("rms", heads, marks=pytest.mark.exhaustive) for heads in ("none", "2")),
        *(pytest.param("rms_affine", heads, marks=pytest.mark.exhaustive) for heads in ("none", "1")),
    ],
)
def test_layer_equals_the_paper(config, head_norm, kv_heads):
    model = config(model__num_heads=4, model__num_kv_heads=kv_heads, model__head_norm=head_norm).model
    module = build(model)
    if head_norm in ("rms_affine", "scalar"):
        module.head_norm.scale[...] = jax.random.normal(jax.random.key(1), module.head_norm.scale.shape)
    x_BTD = some_input(model)
    for layer in (0, 1):
        actual, _ = call(module, model, x_BTD, layer)
        for b in range(2):
            np.testing.assert_allclose(actual[b], paper_layer(module, model, x_BTD[b], layer), atol=2e-6)


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
@pytest.mark.parametrize("architecture", ["diff", pytest.param("transformer", marks=pytest.mark.exhaustive)])
def test_a_token_depends_on_itself_and_earlier_tokens_only(config, architecture):
    model = config(architecture).model
    module, x_BTD = build(model), some_input(config().model, batch=1)
    jacobian = jax.jacobian(lambda x: call(module, model, x)[0].sum(axis=-1))(x_BTD)  # [1, T, 1, T, D]
    seen_TT = np.abs(jacobian[0, :, 0]).max(axis=-1) > 0
    np.testing.assert_array_equal(seen_TT, np.tril(np.ones((TOKENS, TOKENS), bool)))


@pytest.mark.long
def test_lambda_zero_equals_softmax_attention(config):
    """With λ = 0, no norm and scale 1, the first group attends like softmax heads of the same weights."""
    options = {
        "model__head_norm": "none",
        "model__lambda_init": 0.0,
        "model__lambda_learned": "false",
    }
    diff = config(model__post_scale=1.0, model__num_heads=2, **options).model
    module, x_BTD = build(diff), some_input(diff)
    specific = {"lambda_init": None, "lambda_learned": True, "post_scale": None}
    baseline = dataclasses.replace(
        diff, architecture="transformer", num_heads=2, head_dim=heads_of(diff).d_head, **specific
    )
    softmax = build(baseline)
    softmax.query_DHd[...] = module.query_DHGd[:, :, 0]
    softmax.key_DKd[...] = module.key_DKGd[:, :, 0]
    total = 0
    for half in (slice(0, heads_of(diff).d_head), slice(heads_of(diff).d_head, None)):
        softmax.value_DKd[...] = module.value_DKE[:, :, half]
        softmax.output_HdD[...] = module.output_HED[:, half]
        total += call(softmax, baseline, x_BTD)[0]
    np.testing.assert_allclose(call(module, diff, x_BTD)[0], total, atol=1e-6)


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


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["diff", pytest.param("transformer", marks=pytest.mark.exhaustive)])
def test_a_segment_is_a_row_of_its_own(config, architecture):
    model = config(architecture).model
    module, x_BTD = build(model), some_input(model)
    ids = jnp.asarray(np.repeat([[0] * 9 + [1] * (TOKENS - 9)], 2, axis=0), jnp.int32)
    both = call(module, model, x_BTD, segment_ids=ids)[0]
    np.testing.assert_allclose(both[:, :9], call(module, model, x_BTD[:, :9])[0], atol=1e-6)
    changed = call(module, model, x_BTD.at[:, :9].add(1.0), segment_ids=ids)[0]
    np.testing.assert_array_equal(changed[:, 9:], both[:, 9:])


@pytest.mark.parametrize(
    ("changes", "std"),
    [
        ({}, (3 * 64) ** -0.5),
        pytest.param({"model__init": "normal"}, 0.02, marks=pytest.mark.exhaustive),
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
