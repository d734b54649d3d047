"""The coordinate check of µP (arXiv 2203.03466, appendix D.1), and the rules of µP and CompleteP one by one."""
# Axes: B = rows, T = tokens, D = model width

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT
from flax import nnx
from helpers.model_layers import batch_on
from helpers.training_updates import updated

from difftx.config.recipes import load_config
from difftx.errors import UserError
from difftx.launch.estimate import trace_step
from difftx.model.architectures import ARCHITECTURES
from difftx.model.attention import Attention, layer_constants
from difftx.model.decoder import Decoder
from difftx.model.layers import projection, rotary_angles
from difftx.training.fit import fit
from difftx.training.optimizer import OPTIMIZERS, learning_rate, make_optimizer
from difftx.training.state import graph, init_state, make_train_step

WIDTH, LAYERS, HEAD_DIM = 64, 2, 16  # Sizes of the base model.
TOKENS, KINDS = 32, 8  # Length of rows, and number of different tokens in them.
UPDATES = 5
TOLERANCE = 0.1
# Architecture → width of the base divided by its number of heads.
PER_HEAD = {"transformer": 16, "diff": 32, "diff_v2": 16}
BASE_FIELDS = [f"model.mup_base_{name}" for name in ("width", "layers", "head_dim")]


def model_of(architecture, *, width=WIDTH, layers=LAYERS, mup=True, **changes):
    fields = {
        "model.d_model": width,
        "model.num_layers": layers,
        "model.num_heads": width // PER_HEAD[architecture],
        "model.mlp_dim": 2 * width,
        "model.remat": "full",  # Compiles faster, because layers are scanned.
        "data.sequence_length": TOKENS,
        "train.global_batch_tokens": 8 * TOKENS,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 1e-3,
        # The norm of the gradient depends on the size of the model, and so does its change over the updates.
        "optimizer.clip_norm": None,
        "mesh.fsdp": 1,
    }
    if mup:
        fields |= dict(zip(BASE_FIELDS, (WIDTH, LAYERS, HEAD_DIM), strict=True))
    fields |= {name.replace("__", "."): value for name, value in changes.items()}
    return fit(load_config(f"{ROOT}/configs/quickstart.py:{architecture}", {k: str(v) for k, v in fields.items()}))


def coordinates(c, mesh, *, seeds):
    """Return the RMS of the outputs of attention and MLPs, of the residual stream and of the change of the logits.

    The output projections are initially zero, so that all activations come from the updates. The RMS is a mean over
    seeds, because it is random in narrow models.
    """
    batch = batch_on(mesh, c)
    tokens_BT = np.random.default_rng(0).integers(0, KINDS, batch.tokens_BT.shape).astype(np.int32)
    targets_BT = (tokens_BT + np.roll(tokens_BT, 1, axis=1)) % KINDS
    put = functools.partial(jax.device_put, device=batch.tokens_BT.sharding)
    batch = dataclasses.replace(batch, tokens_BT=put(tokens_BT), targets_BT=put(targets_BT))
    angles = rotary_angles(jnp.arange(TOKENS)[None], c.model)

    def activations(params):
        model = nnx.merge(graph(c), params)

        def layer(x_BTD, block_and_constants):
            block, constants = block_and_constants
            attention_BTD = block.attention(block.attention_norm(x_BTD), angles, constants, None)[0]
            mlp_BTD = block.mlp(block.mlp_norm(x_BTD + attention_BTD / c.model.depth_ratio))
            x_BTD = block(x_BTD, lambda h_BTD: block.attention(h_BTD, angles, constants, None))[0]
            return x_BTD, {"attention": attention_BTD, "mlp": mlp_BTD}

        x_BTD = model.embedding_VD[...].at[batch.tokens_BT].get(out_sharding=model.layout.act_BTD)
        x_BTD, found = jax.lax.scan(layer, x_BTD, (model.blocks, layer_constants(c.model)))
        return found | {"residual": x_BTD, "logits": model(batch.tokens_BT)[0][..., :KINDS]}

    @jax.jit
    def run(seed):
        first = nnx.to_pure_dict(nnx.state(Decoder(c.model, rngs=nnx.Rngs(jax.random.key(seed)))))
        step, state = make_train_step(c), dataclasses.replace(init_state(c), params=first)
        state = jax.lax.fori_loop(0, UPDATES, lambda _, state: step(state, batch)[0], state)
        found = activations(state.params)
        found["logits"] -= activations(first)["logits"]
        return jax.tree.map(lambda x: jnp.sqrt(jnp.mean(x**2)), found)

    with jax.set_mesh(mesh):
        by_seed = [jax.device_get(run(seed)) for seed in range(seeds)]
    return {name: np.mean([found[name] for found in by_seed]) for name in by_seed[0]}


def deviations(base, found):
    return {name: round(float(value / base[name] - 1), 3) for name, value in found.items()}


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["transformer", "diff"])
def test_activations_do_not_depend_on_width_and_depth(mesh_of, architecture):
    base = coordinates(model_of(architecture), mesh_of(), seeds=24)
    wide, deep = {"width": 256}, {"layers": 8}
    for shape in (wide, deep):
        found = deviations(base, coordinates(model_of(architecture, **shape), mesh_of(), seeds=12))
        assert max(map(abs, found.values())) < TOLERANCE, (shape, found)
    # In the standard parametrisation, all activations grow with the width, and the residual stream with the depth.
    found = deviations(base, coordinates(model_of(architecture, mup=False, **wide), mesh_of(), seeds=2))
    assert min(found.values()) > 4 * TOLERANCE, found
    found = deviations(base, coordinates(model_of(architecture, mup=False, **deep), mesh_of(), seeds=2))
    assert found["residual"] > 10 * TOLERANCE, found


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "options"),
    [("diff", {"optimizer__name": "muon", "optimizer__learning_rate": 4e-3}), ("diff_v2", {})],
)
def test_activations_with_other_optimizers_options_and_architectures(mesh_of, architecture, options):
    """Compare half of the largest size with the largest size.

    The base model deviates by up to 22 %, and the deviation shrinks with each doubling.
    """
    for half, whole in (({"width": 256}, {"width": 512}), ({"layers": 8}, {"layers": 16})):
        smaller, larger = (
            coordinates(model_of(architecture, **shape, **options), mesh_of(), seeds=8) for shape in (half, whole)
        )
        found = deviations(smaller, larger)
        assert max(map(abs, found.values())) < TOLERANCE, (whole, found)


def test_base_model_has_the_standard_parametrisation(mesh_of):
    """The programs of the initialisation and of the train step are the same, and so are all bits of their results."""

    def programs(config):
        with jax.set_mesh(mesh_of()):
            init = jax.jit(lambda: init_state(config)).lower()
        return init.as_text(), trace_step(config, mesh_of()).lower().as_text()

    assert programs(model_of("diff")) == programs(model_of("diff", mup=False))


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_updates_equal_those_of_the_rules_in_float64(mesh_of, tied):
    """Compare with Table 1 of arXiv 2505.01618 with α = 1, in float64.

    The model has four times the width and twice the depth of the base model.
    """
    c = model_of(
        "diff",
        width=64,
        layers=2,
        mup=False,
        model__mup_base_width=16,
        model__mup_base_layers=1,
        model__mup_base_head_dim=16,
        model__tie_embeddings=tied,
        optimizer__weight_decay=0.3,
        optimizer__eps=2.0,  # About the size of the random gradients, so that it has an effect.
        optimizer__b1=0.8,
        optimizer__b2=0.9,
    )
    expected, found, grads = updated(c, mesh_of(), 3)
    mean, square = (dict.fromkeys(expected, 0.0) for _ in range(2))
    for n, grad in enumerate(grads):
        for name, g in grad.items():
            mean[name] = 0.8 * mean[name] + 0.2 * g
            square[name] = 0.9 * square[name] + 0.1 * g**2
            eps = 2.0 / 4 / 2
            step = mean[name] / (1 - 0.8 ** (n + 1)) / (np.sqrt(square[name] / (1 - 0.9 ** (n + 1))) + eps)
            kind = name.split("/")[-1]
            is_hidden = kind.startswith(("query", "key", "value", "output", "gate", "up", "down"))
            rate = float(learning_rate(c)(n)) / (4 if is_hidden else 1)
            decay = 0.3 * 4 if is_hidden else 0.3 if "embedding" in kind else 0.0
            expected[name] = expected[name] - rate * (step + decay * expected[name])
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_updates_of_muon_are_divided_by_the_root_of_the_width_ratio(mesh_of):
    base = {"model__mup_base_width": 16, "model__mup_base_layers": 1, "model__mup_base_head_dim": 16}
    # With a negligible ε, the updates of the AdamW part are the same.
    options = {"mup": False, "optimizer__name": "muon", "optimizer__weight_decay": 0, "optimizer__eps": 1e-20}
    (first, standard, _), (_, found, _) = (
        updated(model_of("diff", **options, **fields), mesh_of(), 1) for fields in ({}, base)
    )
    for name, value in first.items():
        factor = 1 / np.sqrt(4) if name.startswith(("blocks/attention/", "blocks/mlp/")) else 1
        factor = 1 if "scale" in name or "lambda" in name else factor
        np.testing.assert_allclose(found[name] - value, factor * (standard[name] - value), atol=1e-6, err_msg=name)


@pytest.mark.parametrize("init", ["normal", "fan_in"])
def test_initial_variance_of_projections_is_inverse_to_the_width(mesh_of, init):
    def spread(width):
        model = model_of("diff", width=width, model__init=init).model
        return jnp.std(projection(model, (width, 512), 1, jax.P(), rngs=nnx.Rngs(0))[...])

    with jax.set_mesh(mesh_of()):
        assert float(spread(256) / spread(64)) == pytest.approx(1 / 2, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mup_base_head_dim": None}, r"model\.mup_base_head_dim=None: set all of mup_base_width, mup_base_layers, "),
        ({"mup_base_layers": None}, r"model\.mup_base_layers=None: set all of"),
        ({"mup_base_head_dim": 32}, r"model\.mup_base_head_dim=32: this model's sub-heads are 16 wide, and rates "),
        ({"mup_base_width": 0}, r"model\.mup_base_width=0 must be positive"),
    ],
)
def test_invalid_base_model_is_rejected(changes, message):
    with pytest.raises(UserError, match=message):
        model_of("diff", **{f"model__{name}": value for name, value in changes.items()})


class OwnWeight(Attention):
    """Softmax attention with a parameter that has no metadata."""

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        self.bias_D = nnx.Param(jnp.zeros(config.d_model))


def test_configs_without_a_rule_are_rejected(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES._entries, "own_weight", OwnWeight)
    monkeypatch.setitem(OPTIMIZERS._entries, "own", lambda config, schedule, decayed: optax.sgd(schedule))
    weight = model_of("diff", model__architecture="own_weight", model__num_heads=4, model__head_norm="none")
    with pytest.raises(UserError, match=r"'own_weight': .* no rule for the parameter attention/bias_D; create it with"):
        make_optimizer(weight)
    with pytest.raises(UserError, match=r"optimizer\.name='own': model\.mup_base_width has rules for adamw and muon"):
        make_optimizer(model_of("diff", optimizer__name="own"))
    make_optimizer(model_of("diff", mup=False, optimizer__name="own"))
    converted = {"model__architecture": "dex", "model__num_heads": 4, "model__head_norm": "none"}
    with pytest.raises(
        UserError, match=r"'dex' continues the training of a Transformer, at a learning rate of its own"
    ):
        make_optimizer(model_of("diff", **converted))
    make_optimizer(model_of("diff", mup=False, **converted))
