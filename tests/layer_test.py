"""Attention layers outside of the decoder, compared with the decoder's layer and the float64 formula."""

import contextlib
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx
from helpers.cases import marked
from helpers.model_layers import OPTIONS, TOKENS, X_BTD, layer_of
from jax.sharding import AxisType
from model import oracle

import difftx
from difftx.config.fields import values_of
from difftx.errors import UserError
from difftx.layer import OTHER_FIELDS, AttentionLayer, DiffAttention
from difftx.model.architectures import ARCHITECTURES
from difftx.parallel.layout import Layout

NAMES = [name for name in ARCHITECTURES if name in {*oracle.SIZES, "diff", "transformer"}]
# Architectures whose layers are not traced, mapped and sharded in the same way as those of another one.
DISTINCT = ["diff", "transformer", "diff_v2", "gda", "gdla"]
TOLERANCE = 1e-5  # Relative to the largest value, as in tests/model/variants_test.py.
ROWS_BTD = np.random.default_rng(4).normal(size=(8, TOKENS, 32)).astype(np.float32)
IDS_BT = np.sort(np.random.default_rng(5).integers(0, 3, (8, TOKENS))).astype(np.int32)


def with_each_name(long, fast):
    """Return cases of a value and an architecture. Only the case of `fast` and "diff" has no mark."""
    return marked([(long, "diff"), *((fast, name) for name in DISTINCT)], fast=[(fast, "diff")])


apply = jax.jit(lambda layer, x, **options: layer(x, **options))


@jax.jit
def gradients(layer, x_BTD):
    return jax.grad(lambda layer, x_BTD: jnp.sum(layer(x_BTD, segment_ids=IDS_BT) ** 2), argnums=(0, 1))(layer, x_BTD)


def with_weights(layer, state):
    """Return the layer with the weights of the decoder's layer, which belong to a mesh, as plain arrays."""
    graphdef, _ = nnx.split(layer.attention)
    layer.attention = nnx.merge(graphdef, jax.tree.map(np.asarray, state))
    return layer


def random_layer(name):
    """Return a layer with random weights, which keep the shardings of the layer."""
    rng, layer = np.random.default_rng(0), small_layer(name)
    drawn = jax.tree.map(lambda weight: rng.normal(scale=0.4, size=weight.shape).astype(np.float32), layer)
    return jax.jit(functools.partial(jax.tree.map, lambda weight, number: 0 * weight + number))(layer, drawn)


def small_layer(name):
    """Return a layer of the tiny sizes of `oracle.SIZES`, whose heads two devices can share."""
    sizes = {field.rpartition("__")[2]: value for field, value in oracle.SIZES.get(name, {}).items()}
    sizes = {field: value == "true" if value in ("true", "false") else value for field, value in sizes.items()}
    create = functools.partial(AttentionLayer, name, 32, sizes.pop("num_heads", 2), **sizes)
    return jax.jit(lambda: create(rngs=nnx.Rngs(0)))()


def assert_close(actual, expected):
    """Compare trees, relative to the largest value, because the terms of the gradients of λ cancel."""
    largest = max(np.abs(e).max() for e in jax.tree.leaves(expected))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), e, rtol=0, atol=TOLERANCE * largest)


def assert_equal_calls(actual, expected):
    """Compare outputs and gradients."""
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


@pytest.mark.parametrize("name", marked(NAMES))
def test_a_layer_with_options_equals_the_decoders_and_the_formula(name, mesh_of):
    with jax.set_mesh(mesh_of()):
        model, module, call, _ = layer_of(name, **OPTIONS)
        expected_BTD = call(X_BTD, 1)
        weights = oracle.weights_of(module)
    values = values_of(model)
    own = values.pop(name, {}) if model.own else {}
    fields = {field: value for field, value in (values | own).items() if field not in {*OTHER_FIELDS, "anneal_steps"}}
    layer = AttentionLayer(name, model.d_model, model.num_heads, layer=2, rngs=nnx.Rngs(0), **fields)
    actual_BTD = np.asarray(apply(with_weights(layer, nnx.state(module)), X_BTD))
    assert_close(actual_BTD, expected_BTD)
    for b in range(2):
        formula_TD = oracle.layer(weights, model, X_BTD[b], 1)
        np.testing.assert_allclose(actual_BTD[b], formula_TD, atol=TOLERANCE * np.abs(formula_TD).max())


@pytest.mark.parametrize("name", marked(NAMES))
def test_the_defaults_are_the_first_layer_of_the_paper(name):
    """Without options, a layer has the settings of the first layer of the paper.

    These are rotary embedding, λ_init of layer 1, the head norm of the architecture, a nonzero W_O, and the dtype of
    `x`.
    """
    layer = small_layer(name)
    config = layer.attention.config
    weights = oracle.weights_of(layer.attention)
    assert config.head_norm == ("rms_affine" if name in ("diff", "gda", "motif", "signed_mask") else "none")
    expected_TD = oracle.layer(weights, config, ROWS_BTD[0], 0)
    assert np.abs(expected_TD).max() > 0.01
    np.testing.assert_allclose(apply(layer, ROWS_BTD)[0], expected_TD, atol=TOLERANCE * np.abs(expected_TD).max())
    short_BTD = apply(layer, ROWS_BTD.astype(jnp.bfloat16))
    assert short_BTD.dtype == jnp.bfloat16
    if name != "top_k":  # Rounding makes top_k select other keys.
        np.testing.assert_allclose(short_BTD[0].astype(float), expected_TD, atol=0.05 * np.abs(expected_TD).max())
    assert {x.dtype for x in jax.tree.leaves(layer)} == {jnp.dtype("float32")}


def test_segments_are_separate_and_only_distances_between_positions_matter():
    layer = DiffAttention(32, 2, rngs=nnx.Rngs(0))
    expected_BTD = apply(layer, ROWS_BTD)
    packed_BTD = ROWS_BTD.reshape(4, 2 * TOKENS, 32)
    ids_BT = np.repeat(np.arange(2, dtype=np.int32)[None], TOKENS, axis=1).repeat(4, axis=0)
    actual_BTD = apply(layer, packed_BTD, segment_ids=ids_BT)
    np.testing.assert_allclose(actual_BTD.reshape(expected_BTD.shape), expected_BTD, atol=1e-6)
    # The rotary embedding depends on distances only.
    moved_BTD = apply(layer, ROWS_BTD, positions=np.tile(np.arange(7, 7 + TOKENS, dtype=np.int32), (8, 1)))
    np.testing.assert_allclose(moved_BTD, expected_BTD, atol=1e-6)
    stretched_BTD = apply(layer, ROWS_BTD, positions=np.tile(3 * np.arange(TOKENS, dtype=np.int32), (8, 1)))
    assert np.abs(stretched_BTD - expected_BTD).max() > 1e-3


@pytest.mark.long
def test_vmap_equals_a_loop():
    layer = random_layer("diff")
    x_NBTD = ROWS_BTD.reshape(4, 2, TOKENS, 32)

    def loss(layer, x_BTD):
        return jnp.sum(layer(x_BTD) ** 2)

    actual = jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))(layer, x_NBTD)
    one = jax.jit(jax.value_and_grad(loss))
    expected = jax.tree.map(lambda *rows: np.stack(rows), *(one(layer, x_BTD) for x_BTD in x_NBTD))
    assert_equal_calls(actual, expected)


@functools.cache
def without_a_mesh(name):
    layer = random_layer(name)
    return jax.tree.map(np.asarray, (apply(layer, ROWS_BTD, segment_ids=IDS_BT), gradients(layer, ROWS_BTD)))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name"), with_each_name("Auto", "Explicit"))
def test_a_mesh_with_axes_of_other_names_shards_the_batch(name, kind):
    mesh = jax.make_mesh((4, 2), ("rows", "others"), axis_types=(getattr(AxisType, kind),) * 2)
    layer = random_layer(name)
    x_BTD = jax.device_put(ROWS_BTD, jax.NamedSharding(mesh, jax.P("rows")))
    with jax.set_mesh(mesh):
        out_BTD, grads = apply(layer, x_BTD, segment_ids=IDS_BT), gradients(layer, x_BTD)
    assert out_BTD.sharding.is_equivalent_to(x_BTD.sharding, 3)
    assert grads[1].sharding.is_equivalent_to(x_BTD.sharding, 3)
    assert_equal_calls((out_BTD, grads), without_a_mesh(name))


def test_a_layer_inside_shard_map():
    mesh = jax.make_mesh((8,), ("rows",))
    layer = random_layer("diff")

    def shard(layer, x_BTD, ids_BT):
        return layer(x_BTD, segment_ids=ids_BT)

    specs = {"in_specs": (jax.P(), jax.P("rows"), jax.P("rows")), "out_specs": jax.P("rows")}
    with jax.set_mesh(mesh):
        x_BTD, ids_BT = (jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows"))) for x in (ROWS_BTD, IDS_BT))
        actual_BTD = jax.jit(jax.shard_map(shard, check_vma=False, **specs))(
            jax.device_put(layer, jax.P()), x_BTD, ids_BT
        )
    assert_close(actual_BTD, without_a_mesh("diff")[0])


@pytest.mark.parametrize(("sizes", "name"), with_each_name({"fsdp": 4, "tensor": 2}, {"data": 4, "context": 2}))
def test_the_axes_of_difftx_shard_as_in_the_decoder(name, sizes, mesh_of):
    expected = without_a_mesh(name)
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        layer = random_layer(name)
        out_BTD = apply(layer, ROWS_BTD, segment_ids=IDS_BT)
        grads = gradients(layer, ROWS_BTD)
    assert out_BTD.sharding.spec == Layout().act_BTD
    for weight, grad in zip(jax.tree.leaves(layer), jax.tree.leaves(grads[0]), strict=True):
        assert weight.sharding == grad.sharding
    if "fsdp" in sizes:  # Each projection is sharded over all devices.
        projections = [weight for weight in jax.tree.leaves(layer) if weight.ndim > 2]
        assert {weight.size / weight.addressable_shards[0].data.size for weight in projections} == {mesh.size}
    assert_equal_calls((out_BTD, grads), expected)


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        ((64, 4), {"num_head": 4}, "num_head=4: no such argument of an attention layer. Did you mean 'num_heads'?"),
        ((64, 5), {}, "num_heads=5: their 10 sub-heads do not divide d_model=64; use 4, or set head_dim"),
        (("64", 4), {}, "d_model='64': expected an integer"),
        (("top_k", 64, 4), {"k": 0}, "k=0 must be positive"),
        (("dex", 64, 4), {"anneal_steps": 9}, "anneal_steps=9: no such argument of an attention layer"),
        ((64, 4), {"layer": 0}, "layer=0 must be an integer of at least 1"),
        ((64, 4), {"rngs": 0}, "rngs=0: expected nnx.Rngs, such as nnx.Rngs(0)"),
        (("gda", 64, 4), {}, "signal_heads=None: architecture 'gda' requires it; 3 is common"),
        (("diffv2", 64, 4), {}, "'diffv2': no such architecture. Did you mean 'diff_v2'?"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(arguments, fields, message):
    create = AttentionLayer if len(arguments) == 3 else DiffAttention
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        create(*arguments, **{"rngs": nnx.Rngs(0)} | fields)


@pytest.mark.parametrize("name", ["zero_branch", "dex"])
def test_the_caller_raises_the_progress(name):
    layer = random_layer(name)
    lam = {}
    for progress in (0.0, 0.5, 1.0):
        layer.attention.progress[...] = jnp.float32(progress)
        lam[progress] = float(layer.attention.lam(jnp.float32(0.2)))
    learned = float(layer.attention.lambda_learned[...]) if name == "dex" else lam[1.0]
    assert lam == pytest.approx({0.0: 0, 0.5: 0.5 * learned + 0.05 * (name == "dex"), 1.0: learned})


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.zeros((5, 32), "float32"), {}, "x has the shape [5, 32]; expected [B, T, d_model] with d_model=32; for"),
        (np.zeros((2, 5, 32), "int32"), {}, "x has the dtype int32; expected float32 or bfloat16"),
        (
            X_BTD,
            {"segment_ids": np.zeros((2, 5), "int32")},
            "segment_ids: int32[2, 5]; expected integers [B, T] = [2, 18]",
        ),
        (X_BTD, {"segment_ids": np.ones((2, 18), bool)}, "segment_ids: bool[2, 18]; expected integers [B, T]"),
    ],
)
def test_a_wrong_input_is_reported_in_one_line(x, options, message):
    layer = DiffAttention(32, 2, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        layer(x, **options)


@pytest.mark.long
def test_an_unsuitable_mesh_is_reported_in_one_line(mesh_of):
    with (
        jax.set_mesh(mesh_of(tensor=4)),
        pytest.raises(ValueError, match=r"^num_heads: 2 cannot be split into mesh.ten"),
    ):
        DiffAttention(32, 2, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh_of(fsdp=2)):
        layer = DiffAttention(32, 2, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((8,), ("rows",))
    for current in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with (
            current,
            pytest.raises(ValueError, match="created under a mesh with the axes data, fsdp, context, tensor; call"),
        ):
            layer(X_BTD)
    x_BTD = jax.device_put(ROWS_BTD, jax.NamedSharding(mesh, jax.P("rows")))
    with pytest.raises(ValueError, match=r"mesh with the explicit axes 'rows'; set this mesh by jax\.set_mesh"):
        DiffAttention(32, 2, rngs=nnx.Rngs(0))(x_BTD)


def test_an_import_of_difftx_does_not_import_jax():
    code = "import sys, difftx; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert all(hasattr(difftx, name) for name in difftx.__all__)


@pytest.mark.parametrize("name", ["diff", "transformer"])
def test_attention_weights_times_values_are_the_output(name):
    fields = {"head_norm": "none", "window": 5} | ({"post_scale": 1.0, "lambda_std": 0.5} if name == "diff" else {})
    layer = AttentionLayer(name, 32, 2, rngs=nnx.Rngs(0), **fields)
    found = jax.jit(lambda layer, x, **ids: layer.attention_weights(x, **ids))(layer, ROWS_BTD, segment_ids=IDS_BT)
    weights = {key: np.asarray(value[...]) for key, value in vars(layer.attention).items() if hasattr(value, "shape")}
    value_DHE, output_HED = (next(weights[key] for key in weights if key.startswith(what)) for what in ("val", "out"))
    v_BSHE = np.einsum("BSD,DHE->BSHE", ROWS_BTD, value_DHE)
    out_BTD = np.einsum("BHTS,BSHE,HED->BTD", found.difference, v_BSHE, output_HED)
    assert_close(apply(layer, ROWS_BTD, segment_ids=IDS_BT), out_BTD)
    distance_TS = np.arange(TOKENS)[:, None] - np.arange(TOKENS)[None]
    seen_BHTS = (IDS_BT[:, :, None] == IDS_BT[:, None]) & (distance_TS >= 0)[None] & (distance_TS < 5)[None]
    np.testing.assert_array_equal(found.a1 > 0, np.broadcast_to(seen_BHTS[:, None], found.a1.shape))
    np.testing.assert_allclose(np.asarray(found.a1).sum(-1), 1, rtol=1e-6)
    if name == "transformer":
        assert (found.a2, found.lam) == (None, None)
        return
    products = np.exp((weights["lambda_query_Gd"] * weights["lambda_key_Gd"]).sum(-1))
    np.testing.assert_allclose(found.lam, np.full((8, 2, TOKENS, 1), products[0] - products[1] + 0.2), rtol=1e-5)
    np.testing.assert_allclose(found.a1 - found.lam * found.a2, found.difference, atol=1e-6)
