"""Every variant of attention, compared with its formula and with its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx
from helpers.cases import PAPER, marked
from helpers.model_layers import OPTIONS, QUICKSTART, TOKENS, X_BTD, layer_of

from difftx.config.recipes import load_config
from difftx.errors import UserError
from difftx.model.abstract import count_parameters
from difftx.model.architectures import ARCHITECTURES, describe_heads, heads_of
from difftx.model.attention import layer_constants
from difftx.model.decoder import Decoder
from difftx.model.flops import flops_per_token
from difftx.model.matching import MLP_MULTIPLE
from difftx.parallel.layout import Layout
from difftx.training.fit import fit
from model import oracle

# Relative to the largest value, because the head norm enlarges small heads and their rounding. The tolerance of a
# derivative is relative to its value, or to the norm of the gradient.
TOLERANCE = 1e-5
SCALING = f"{ROOT}/configs/scaling.py"
PARAMETER_OPTIONS = {"model__num_kv_heads": 1, "model__tie_embeddings": "false", "model__head_norm": "scalar"}


@pytest.fixture(autouse=True)
def _one_device(mesh_of):
    with jax.set_mesh(mesh_of()):
        yield


CASES = [
    *((name, options) for name in [*oracle.SIZES, *PAPER] for options in ({}, OPTIONS)),
    *(("diff", {"model__lambda_bound": bound}) for bound in ("sigmoid", "tanh")),
    *((name, {"model__head_norm": norm}) for name in PAPER for norm in ("scalar", "sigmoid")),
    ("diff", {"model__head_norm": "rms", "model__num_heads": 4, "model__num_kv_heads": 1}),
    ("diff", {"model__head_norm": "none", "model__num_heads": 4, "model__num_kv_heads": 2}),
    *((name, {"model__post_scale": 3.0}) for name in ("transformer", "diff_v2", "gdla", "top_k")),
    ("gdla", {"model__num_kv_heads": "none", "model__gdla__output_gate": "false"}),
]
# Architectures whose formulas no other one contains, without options; the next tests use their compiled layers too.
# The paper's architectures with all options.
DISTINCT = [name for name in oracle.SIZES if name not in ("off_by_one", "sink", "gated", "diff_fixed_lambda")]
FAST = [*((name, {}) for name in (*DISTINCT, *PAPER)), ("diff", OPTIONS), ("transformer", OPTIONS)]


@pytest.mark.parametrize(("name", "options"), marked(CASES, fast=FAST))
def test_a_layer_and_its_gradients_equal_the_formula(name, options):
    """Compare the gradient along a random direction of each parameter with a difference quotient of the formula.

    Parameters that are not trained have a gradient of zero.
    """
    model, module, call, gradient = layer_of(name, **options)
    weights = oracle.weights_of(module)
    for layer in (0, 1):
        actual_BTD = call(X_BTD, layer)
        for b in range(2):
            expected = oracle.layer(weights, model, X_BTD[b], layer)
            np.testing.assert_allclose(actual_BTD[b], expected, atol=TOLERANCE * np.abs(expected).max())

    rng, step = np.random.default_rng(0), 1e-5
    cotangent_BTD = rng.normal(size=X_BTD.shape)
    variables, tree = jax.tree.flatten((weights, X_BTD.astype(np.float64)))
    gradients = jax.tree.leaves(gradient(X_BTD, cotangent_BTD, 1)[:2])

    def objective(index, change):
        changed = [v + change if i == index else v for i, v in enumerate(variables)]
        weights, x_BTD = jax.tree.unflatten(tree, changed)
        return sum(np.sum(cotangent_BTD[b] * oracle.layer(weights, model, x_BTD[b], 1)) for b in range(2))

    fixed = [v.get_metadata().keys() & {"is_constant", "is_progress"} for v in variables_of(module)] + [set()]
    for index, (grad, is_fixed) in enumerate(zip(gradients, fixed, strict=True)):
        if is_fixed:
            assert not grad.any()
            continue
        direction = rng.normal(size=grad.shape)
        expected = (objective(index, step * direction) - objective(index, -step * direction)) / (2 * step)
        grad = np.asarray(grad, np.float64)
        tolerance = {"rel": TOLERANCE, "abs": TOLERANCE * np.linalg.norm(grad)}
        assert np.sum(grad * direction) == pytest.approx(expected, **tolerance)


def variables_of(module):
    """Return the parameters with their metadata."""
    return jax.tree.leaves(nnx.state(module), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def test_pairing_heads_of_different_keys_is_another_model():
    model, module, call, _ = layer_of("diff_v2")
    wrong = oracle.layer(oracle.weights_of(module), model, X_BTD[0], 0, v2_pairs="halves")
    assert np.abs(call(X_BTD)[0] - wrong).max() > 0.1 * np.abs(wrong).max()


@pytest.mark.parametrize("name", marked([*oracle.SIZES, *PAPER], fast=[*DISTINCT, *PAPER]))
def test_a_token_depends_on_no_later_token(name):
    """A token depends on all tokens before it, except those that top-k excludes, and on no token after it."""
    seen_TT = np.abs(layer_of(name).gradient(X_BTD, X_BTD, 0).jacobian_TTD).max(axis=-1) > 0
    assert not np.triu(seen_TT, 1).any()
    assert seen_TT.any(axis=1).all()
    if name != "top_k":
        assert seen_TT[np.tril_indices(TOKENS)].all()


@pytest.mark.parametrize("name", marked([*oracle.SIZES, *PAPER], fast=[*DISTINCT, *PAPER]))
def test_a_segment_is_a_row_of_its_own(name):
    model, module, call, _ = layer_of(name)
    ids_BT = np.repeat([[0] * 9 + [1] * (TOKENS - 9)], 2, axis=0).astype(np.int32)
    both = call(X_BTD, 0, ids_BT)
    alone = oracle.layer(oracle.weights_of(module), model, X_BTD[0, :9], 0)
    np.testing.assert_allclose(both[0, :9], alone, atol=TOLERANCE * np.abs(alone).max())
    changed = call(X_BTD + (ids_BT == 0)[:, :, None], 0, ids_BT)
    np.testing.assert_array_equal(changed[:, 9:], both[:, 9:])
    assert not np.array_equal(changed[:, :9], both[:, :9])


def test_one_signal_head_to_a_noise_head_is_differential_attention():
    grouped = layer_of("gda", model__num_heads=4, model__gda__signal_heads=1)
    diff = layer_of("diff", model__num_heads=4)
    np.testing.assert_array_equal(grouped.call(X_BTD), diff.call(X_BTD, module=grouped.module))


@pytest.mark.parametrize(("name", "changes"), [("sink", {"sink_H": -80.0}), ("gated", {"gate_DHd": 0.0})])
def test_limit_equals_transformer(name, changes):
    """The limits are a sink with a weight of zero, and a gate of one half everywhere."""
    variant = layer_of(name, model__num_kv_heads=4)
    transformer = layer_of("transformer", model__num_heads=4)
    module, baseline = nnx.clone(variant.module), nnx.clone(transformer.module)
    for weight in ("query_DHd", "key_DKd", "value_DKd", "output_HdD"):
        getattr(baseline, weight)[...] = getattr(module, weight)[...]
    for weight, value in changes.items():
        getattr(module, weight)[...] = jnp.full_like(getattr(module, weight)[...], value)
    expected = transformer.call(X_BTD, module=baseline) * (0.5 if name == "gated" else 1.0)
    actual = variant.call(X_BTD, module=module)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE * np.abs(expected).max())


def test_initial_lambda_and_sink(config):
    """Check that V2's λ is near 0.5 and float32, a sink is 0, and a fixed λ is λ_init(2) in the second layer."""

    def of(model):
        return jax.jit(lambda: ARCHITECTURES[model.architecture](model, Layout(), rngs=nnx.Rngs(0)))()

    assert not np.any(of(config("sink").model).sink_H[...])
    v2 = config("diff_v2", model__num_heads=4).model
    lam = of(v2).statistics(jnp.asarray(X_BTD, jnp.bfloat16), None)["lambda"]
    assert lam.dtype == jnp.float32
    assert float(lam) == pytest.approx(0.5, abs=0.05)
    fixed = config("diff_fixed_lambda").model
    constants = jax.tree.map(lambda a: a[1], layer_constants(fixed))
    assert float(of(fixed).statistics(X_BTD, constants)["lambda"]) == pytest.approx(0.3555, abs=1e-4)


@pytest.mark.parametrize(
    ("recipe", "changes", "text"),
    [
        ("diff", {}, "2 differential heads = 4 sub-heads of width 32"),
        ("diff", {"num_heads": "1"}, "1 differential head = 2 sub-heads of width 64"),
        ("diff", {"num_kv_heads": "1"}, "2 differential heads = 4 sub-heads of width 32, 1 key/value head"),
        ("diff_v2", {"num_kv_heads": "2"}, "4 differential heads = 8 sub-heads of width 32, 2 key/value heads"),
        ("gda", {}, "3 differential heads = 4 sub-heads of width 32, 1 key/value head"),
        ("signed_mask", {}, "2 heads = 4 sub-heads of width 32"),
        ("transformer", {"head_dim": "64"}, "4 heads of width 64"),
        ("dex", {"num_kv_heads": "2"}, "4 heads of width 32, 2 key/value heads"),
    ],
)
def test_heads_in_words(recipe, changes, text):
    """A differential head has two queries. In `gda`, three of them share the second one."""
    model = load_config(f"quickstart:{recipe}", {f"model.{name}": value for name, value in changes.items()}).model
    assert describe_heads(model) == text


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *oracle.SIZES.items(),
        *((name, {option: value}) for option, value in PARAMETER_OPTIONS.items() for name in PAPER),
        ("diff", {"model__lambda_learned": "false"}),
    ],
)
def test_parameters_are_counted_to_the_last_one(config, name, changes):
    model = config(name, **changes).model
    state = nnx.state(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))))
    assert count_parameters(model).total == sum(int(np.prod(p.shape)) for p in jax.tree.leaves(state))


CONVERTED = ("zero_branch", "dex")


@pytest.mark.parametrize("name", [name for name in oracle.SIZES if name not in CONVERTED])
@pytest.mark.parametrize(
    ("file", "size", "tolerance"), [(QUICKSTART, "", 3e-3), (SCALING, "-830m", 2e-4), (SCALING, "-13.1b", 1e-4)]
)
def test_variants_are_as_large_as_the_transformer(name, file, size, tolerance):
    variant, transformer = (load_config(f"{file}:{a}{size}", {}).model for a in (name, "transformer"))
    assert heads_of(variant).d_head == heads_of(transformer).d_head
    assert count_parameters(variant).total == pytest.approx(count_parameters(transformer).total, rel=tolerance)


@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize(("file", "size"), [(QUICKSTART, ""), (SCALING, "-830m"), (SCALING, "-13.1b")])
def test_weights_of_converted_models_by_hand(name, file, size):
    """A layer has a second W_Q and W_K, or d² more weights, and its MLP has as many fewer, up to rounding."""
    variant, transformer = (load_config(f"{file}:{a}{size}", {}).model for a in (name, "transformer"))
    D, L, d = transformer.d_model, transformer.num_layers, heads_of(transformer).d_head
    assert heads_of(variant).d_head == d
    added = 2 * D * D if name == "zero_branch" else d * d
    narrower = transformer.mlp_dim - variant.mlp_dim
    assert narrower * 3 * D == pytest.approx(added, abs=3 * D * MLP_MULTIPLE / 2)
    before, after = count_parameters(transformer), count_parameters(variant)
    assert after.projections - before.projections == L * (added - narrower * 3 * D)
    # The λ vectors and the progress, or λ_learn, the chosen heads and the progress.
    assert after.vectors - before.vectors == L * (4 * d + 1 if name == "zero_branch" else 2 + transformer.num_heads)


def test_flops_equal_a_calculation_by_hand():
    """FLOPs of 2.8B models at 2,048 tokens per row: 6 per weight, and 6 L T per unit of width of queries and values."""
    D, L, T, d, vocabulary = 2560, 32, 2048, 128, 100_288
    attention = {
        "diff_v2": (5 * D * D + D * 20, (40 + 20) * d),  # Two queries per head. A1 - λ A2 is multiplied with V once.
        "gda": (D * d * (20 + 10 + 10 + 30), (20 + 30) * d),  # 15 signal and 5 noise heads, 5 × 2 keys, values of 2d.
        "gdla": (D * d * (20 + 5 + 5 + 5 + 20) + D * 20, (25 + 20) * d),  # 20 signal and 5 noise heads, 5 keys.
        "gated": (5 * D * D, (20 + 20) * d),
        "signed_mask": (4 * D * D, (20 + 20) * d),
        "top_k": (4 * D * D, (20 + 20) * d),
        "zero_branch": (6 * D * D, (40 + 20) * d),
        "dex": (4 * D * D + d * d, (20 + 20) * d),
    }
    for name, (weights, width) in attention.items():
        model = load_config(f"{SCALING}:{name}-2.8b", {}).model
        products = L * (weights + 3 * D * model.mlp_dim) + vocabulary * D
        assert flops_per_token(model, T, causal=False) == 6 * products + 6 * L * T * width, name


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("top_k", {"model.top_k.k": "none"}, r"model\.top_k\.k=None: architecture 'top_k' requires it"),
        ("top_k", {"model.top_k.k": "0"}, r"model\.top_k\.k=0 must be positive"),
        ("top_k", {"model.top_k.k": "300"}, r"model\.top_k\.k=300 exceeds data\.sequence_length=256.*use a smaller"),
        ("diff", {"model.top_k.k": "8"}, r"model\.top_k: architecture 'diff' does not use this group; remove it"),
        ("diff", {"model.top_k": "8"}, r"model\.top_k=8: model\.top_k is a group; set one of its fields: k"),
        ("gdla", {"model.output_gate": "true"}, r"no such field\. Did you mean 'model\.gdla\.output_gate'"),
        (
            "diff",
            {"model.lambda_bound": "sigmoid", "model.lambda_init": "1"},
            r"model\.lambda_init=1\.0 must lie between 0 and 1, .*'sigmoid'",
        ),
        (
            "diff",
            {"model.lambda_bound": "tanh", "model.lambda_learned": "false"},
            r"model\.lambda_bound='tanh': a fixed λ needs no bound",
        ),
        ("gdla", {"model.gdla.signal_heads": "3"}, r"model\.gdla\.signal_heads=3 does not divide num_heads=4.*use 2"),
        ("gda", {"model.gda.signal_heads": "none"}, r"model\.gda\.signal_heads=None: architecture 'gda' requires it"),
        ("gda", {"model.gda.signal_heads": "2"}, r"model\.gda\.signal_heads=2 does not divide num_heads=3.*use 1"),
        ("gda", {"model.num_heads": "6", "model.d_model": "100"}, r"model\.num_heads=6: their 8 sub-heads .*use 3"),
        (
            "gda",
            {"model.num_kv_heads": "3"},
            r"model\.num_kv_heads=3 does not divide the 1 heads that have keys and values; use 1",
        ),
        ("diff_v2", {"model.num_kv_heads": "3"}, r"model\.num_kv_heads=3 does not divide the 4 heads .*; use 2"),
        ("diff_v2", {"model.head_norm": "rms"}, r"model\.head_norm='rms': architecture 'diff_v2' has none; use 'none'"),
        (
            "sink",
            {"model.attention_implementation": "cudnn"},
            r"='cudnn' does not serve architecture 'sink'; use one of",
        ),
        ("diff", {"model.attention_implementation": "splash"}, r"='splash' does not serve architecture 'diff'"),
        ("diffv2", {}, r"'diffv2': no such architecture\. Did you mean 'diff_v2'"),
    ],
)
def test_mistakes_name_field_value_and_fix(name, changes, message):
    with pytest.raises(UserError, match=message) as error:
        fit(load_config(f"{QUICKSTART}:{name}", changes))
    assert "\n" not in str(error.value)
