"""Schedules, AdamW and Muon, against their formulas in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.model_layers import batch_on
from helpers.training_updates import by_name, random_tree, shapes_of, updated
from jax import P

from difftx.errors import UserError
from difftx.model.abstract import count_parameters
from difftx.training.optimizer import decay_mask, learning_rate, make_optimizer, stochastically_rounded
from difftx.training.state import init_state, make_train_step, state_bytes

STEPS, WARMUP, DECAY, PEAK, FINAL = 100, 10, 25, 1e-2, 1e-3
# Schedule → fraction of the decay from peak to final learning rate at update n, counted from the start of the run.
FALL = {
    "linear": lambda n: (n - WARMUP) / (STEPS - WARMUP),
    "cosine": lambda n: (1 - np.cos(np.pi * (n - WARMUP) / (STEPS - WARMUP))) / 2,
    "constant": lambda n: 0 * n,
    "wsd": lambda n: np.sqrt(np.maximum(n - (STEPS - DECAY), 0) / DECAY),
    "wsd linear": lambda n: np.maximum(n - (STEPS - DECAY), 0) / DECAY,
}


@pytest.mark.parametrize("name", FALL)
@pytest.mark.parametrize("total", [1, STEPS])
def test_schedules_equal_their_formulas(config, name, total):
    """The lengths are numbers of steps, or shares of all steps."""
    schedule, _, shape = name.partition(" ")
    c = config(
        train__steps=STEPS,
        optimizer__schedule=schedule,
        optimizer__decay_shape=shape or "sqrt",
        optimizer__learning_rate=PEAK,
        optimizer__final_learning_rate=FINAL,
        optimizer__warmup_steps=WARMUP if total == 1 else WARMUP / total,
        optimizer__decay_steps=DECAY if total == 1 else DECAY / total,
    )
    n = np.arange(STEPS + 1)
    expected = np.where(n < WARMUP, PEAK * (n + 1) / WARMUP, PEAK + (FINAL - PEAK) * FALL[name](np.maximum(n, WARMUP)))
    np.testing.assert_allclose([float(learning_rate(c)(step)) for step in n], expected, rtol=1e-5)


@pytest.mark.parametrize(("steps", "warmup_steps"), [(15, 2), (1015, 102), (20, 2)])
def test_shares_that_add_up_to_one_fill_the_run(config, steps, warmup_steps):
    """A warm-up of 1.5 steps and a decay of 13.5 are both rounded up."""
    fractions = {"optimizer__warmup_steps": 0.1, "optimizer__decay_steps": 0.9}
    c = config(train__steps=steps, optimizer__schedule="wsd", optimizer__learning_rate=PEAK, **fractions)
    rates = [float(learning_rate(c)(step)) for step in (warmup_steps - 1, warmup_steps, warmup_steps + 1, steps)]
    fall = PEAK * np.sqrt(1 / (steps - warmup_steps))  # The final learning rate is 0.
    np.testing.assert_allclose(rates, [PEAK, PEAK, PEAK - fall, 0], rtol=1e-5, atol=1e-9)


def test_too_long_decay_is_rejected(config):
    c = config(train__steps=100, optimizer__schedule="wsd", optimizer__warmup_steps=50, optimizer__decay_steps=0.6)
    with pytest.raises(UserError, match=r"train\.steps=100 has no room for 50 steps of warm-up and 60 of decay"):
        learning_rate(c)


@pytest.mark.parametrize("architecture", ["diff", "transformer", "sink", "zero_branch", "dex"])
def test_only_matrices_have_weight_decay(config, mesh_of, architecture):
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(config(architecture, model__attention_bias=True)))
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): decayed for path, decayed in mask}
    kept = {name for name, decayed in names.items() if not decayed}
    expected = {"blocks/attention_norm/scale", "blocks/mlp_norm/scale", "final_norm/scale"}
    expected |= {f"blocks/attention/{name}_bias" for name in ("query", "key", "value")}
    if architecture == "diff":
        expected |= {f"blocks/attention/{n}" for n in ("head_norm/scale", "lambda_query_Gd", "lambda_key_Gd")}
    if architecture == "sink":
        expected.add("blocks/attention/sink_H")
    if architecture == "zero_branch":
        expected |= {f"blocks/attention/{n}" for n in ("lambda_query_Gd", "lambda_key_Gd", "progress")}
    if architecture == "dex":
        expected |= {f"blocks/attention/{n}" for n in ("lambda_learned", "chosen_H", "progress")}
    assert kept == expected


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "optimizer"), [("zero_branch", "adamw"), ("dex", "muon")])
def test_prescribed_parameters_do_not_follow_a_gradient(config, mesh_of, architecture, optimizer):
    """The progress grows by 1/4 per update up to 1, from any starting value. The chosen heads do not change."""
    c = config(architecture, optimizer__name=optimizer, train__steps=20, **{f"model__{architecture}__anneal_steps": 4})
    with jax.set_mesh(mesh_of()):
        init, step, batch = jax.jit(lambda: init_state(c)), jax.jit(make_train_step(c)), batch_on(mesh_of(), c)
        state = init()
        attention = state.params["blocks"]["attention"]
        if architecture == "dex":
            chosen_LH = np.float32([[1, 0], [0, 1]])
            attention["chosen_H"] = jnp.asarray(chosen_LH)
        found = []
        for _ in range(6):
            state, metrics = step(state, batch)
            attention = state.params["blocks"]["attention"]
            found.append(attention["progress"].tolist())
        # The metric has the λ of the parameters before the last update, whose progress is 1.
        if architecture == "dex":
            np.testing.assert_array_equal(attention["chosen_H"], chosen_LH)
            assert np.abs(metrics["lambda"]).max() < 0.05
        else:
            np.testing.assert_allclose(metrics["lambda"], [0.2, 0.3555], atol=0.2)
        # A run that starts from these weights, with a new state of the optimizer, does not begin with λ = 0 again.
        attention["progress"] = jnp.full((2,), 0.875, jnp.float32)
        again = dataclasses.replace(init(), params=state.params)
        assert step(again, batch)[0].params["blocks"]["attention"]["progress"].tolist() == [1, 1]
    assert found == [[0.25] * 2, [0.5] * 2, [0.75] * 2, [1] * 2, [1] * 2, [1] * 2]


def test_updates_equal_those_of_adamw_in_float64(config):
    """Compare three updates with Algorithm 2 of arXiv 1711.05101, with clipping, in float64."""
    c = config(optimizer__weight_decay=0.3, optimizer__b1=0.8, optimizer__b2=0.9, optimizer__clip_norm=0.5)
    optimizer = make_optimizer(c, {"w": True, "scale": False})
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "scale": jnp.ones(2)}
    expected = {name: np.asarray(p, np.float64) for name, p in params.items()}
    moments = {name: (0.0, 0.0) for name in params}
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for n in range(3):
        grads = {name: jnp.asarray(rng.normal(size=p.shape), jnp.float32) for name, p in params.items()}
        updates, state = update(grads, state, params)
        params = {name: params[name] + updates[name] for name in params}
        norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in grads.values()))
        for name, grad in grads.items():
            g = np.float64(grad) * min(1, 0.5 / norm)
            m = 0.8 * moments[name][0] + 0.2 * g
            v = 0.9 * moments[name][1] + 0.1 * g**2
            moments[name] = (m, v)
            step = (m / (1 - 0.8 ** (n + 1))) / (np.sqrt(v / (1 - 0.9 ** (n + 1))) + 1e-8)
            decay = 0.3 * expected[name] if name == "w" else 0.0
            expected[name] = expected[name] - float(learning_rate(c)(n)) * (step + decay)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-5)


def orthogonalized(m):
    """Return Muon's update: five Newton–Schulz iterations in float64 (kellerjordan.github.io/posts/muon).

    The iterations change only the singular values.
    """
    u, s, v = np.linalg.svd(m, full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return 0.2 * np.sqrt(max(m.shape)) * (u * s) @ v


def muon_by_hand(weight, axes, matrices):
    """Return the weight with orthogonalised matrices. `matrices` names their batch axes, input axes and output axes."""
    batch, inputs, outputs = matrices.split()
    order = [axes.index(axis) for axis in batch + inputs + outputs]
    moved = weight.transpose(order)
    rows = np.prod(moved.shape[len(batch) : -len(outputs)])
    flat = moved.reshape(-1, rows, np.prod(moved.shape[-len(outputs) :]))
    return np.stack([orthogonalized(m) for m in flat]).reshape(moved.shape).transpose(np.argsort(order))


# AXES: weight → its axes. Then, for each split: weight → the batch axes, input axes and output axes of its matrices.
AXES = {"query_DHGd": "LDHGd", "key_DKGd": "LDHGd", "value_DKE": "LDHE", "output_HED": "LHED"}
AXES |= {"gate_DF": "LDF", "up_DF": "LDF", "down_FD": "LFD"}
WHOLE = {"query_DHGd": "L D HGd", "key_DKGd": "L D HGd", "value_DKE": "L D HE", "output_HED": "L HE D"}
WHOLE |= {"gate_DF": "L D F", "up_DF": "L D F", "down_FD": "L F D"}
GROUPS = WHOLE | {"query_DHGd": "LG D Hd", "key_DKGd": "LG D Hd"}
HEADS = WHOLE | {"query_DHGd": "LHG D d", "key_DKGd": "LHG D d", "value_DKE": "LH D E"}


@pytest.mark.parametrize(
    ("split", "matrices"),
    [
        pytest.param("none", WHOLE, marks=pytest.mark.long),
        pytest.param("groups", GROUPS, marks=pytest.mark.long),
        ("heads", HEADS),
    ],
)
def test_twenty_updates_equal_those_of_muon_in_float64(config, mesh_of, split, matrices):
    """Compare with orthogonalised matrices of Nesterov's momentum, and Adam for embeddings and vectors, in float64."""
    c = config(
        optimizer__name="muon",
        optimizer__muon__split=split,
        optimizer__muon__momentum=0.9,
        optimizer__weight_decay=0.3,
        optimizer__b1=0.8,
        optimizer__b2=0.95,
        optimizer__clip_norm=None,
        train__steps=25,
    )
    expected, found, grads = updated(c, mesh_of(), 20)
    momentum, mean, square = (dict.fromkeys(expected, 0.0) for _ in range(3))
    for n, grad in enumerate(grads):
        for name, g in grad.items():
            weight = name.split("/")[-1]
            if weight in AXES:
                momentum[name] = 0.9 * momentum[name] + g
                step = muon_by_hand(g + 0.9 * momentum[name], AXES[weight], matrices[weight])
            else:
                mean[name] = 0.8 * mean[name] + 0.2 * g
                square[name] = 0.95 * square[name] + 0.05 * g**2
                step = mean[name] / (1 - 0.8 ** (n + 1)) / (np.sqrt(square[name] / (1 - 0.95 ** (n + 1))) + 1e-8)
            if weight in AXES or weight == "embedding_VD":
                step = step + 0.3 * expected[name]
            expected[name] = expected[name] - float(learning_rate(c)(n)) * step
    for name, value in expected.items():  # All parameters have changed by about 0.01.
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_sharded_weights_are_orthogonalised_as_on_one_device(config, mesh_of):
    """There are three layers, so some devices have none. The two groups of a layer are matrices on the same device."""
    c = config(optimizer__name="muon", optimizer__muon__split="groups", model__num_layers=3)
    _, one, _ = updated(c, mesh_of(), 3)
    _, eight, _ = updated(c, mesh_of(data=2, fsdp=2, tensor=2), 3)
    for name, value in one.items():
        np.testing.assert_allclose(eight[name], value, atol=1e-5, err_msg=name)


@pytest.mark.long
def test_split_by_groups_has_no_effect_without_groups(config, mesh_of):
    options = {"optimizer__name": "muon", "model__num_layers": 1}
    (_, none, _), (_, groups, _) = (
        updated(config("transformer", optimizer__muon__split=split, **options), mesh_of(), 1)
        for split in ("none", "groups")
    )
    for name, value in none.items():
        np.testing.assert_array_equal(groups[name], value, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_lambda_vectors_have_their_own_learning_rate(config, mesh_of, optimizer):
    options = {"optimizer__name": optimizer, "model__num_layers": 1}
    (first, plain, _), (_, scaled, _) = (
        updated(config(optimizer__lambda_learning_rate_factor=factor, **options), mesh_of(), 1) for factor in (1, 0.25)
    )
    assert {name for name in plain if (plain[name] != scaled[name]).any()} == {
        f"blocks/attention/lambda_{of}_Gd" for of in ("query", "key")
    }
    for name, value in first.items():
        factor = 0.25 if "lambda" in name else 1
        np.testing.assert_allclose(scaled[name] - value, factor * (plain[name] - value), atol=3e-7)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_lambda_vectors_decay_at_their_own_rate(config, mesh_of, optimizer):
    """Gradients of zero leave only the weight decay: each update multiplies a λ vector by 1 - rate · factor · decay."""
    options = {
        "lambda_learning_rate_factor": 0.5,
        "lambda_weight_decay": 3.0,
        "weight_decay": 0.0,
        "learning_rate": 0.02,
    }
    c = config(optimizer__name=optimizer, **{f"optimizer__{name}": value for name, value in options.items()})
    with jax.set_mesh(mesh_of()):
        params = random_tree(shapes_of(c), 0)
        zeros, first = jax.tree.map(jnp.zeros_like, params), by_name(params)
        tx = make_optimizer(c)
        state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
        shrunk = 1.0
        for count in range(4):
            changes, state = update(zeros, state, params)
            params = jax.tree.map(jnp.add, params, changes)
            shrunk *= 1 - float(learning_rate(c)(count)) * 0.5 * 3.0
    assert shrunk < 0.98
    for name, value in by_name(params).items():
        np.testing.assert_allclose(value, (shrunk if "lambda" in name else 1) * first[name], rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_bytes_include_the_optimizer_state(config, optimizer):
    c = config(optimizer__name=optimizer)
    sizes = count_parameters(c.model)
    moments = {"adamw": 2 * sizes.total, "muon": 2 * (sizes.total - sizes.projections) + sizes.projections}
    assert state_bytes(c) == 4 * (sizes.total + moments[optimizer] + 3)  # 3: the step and two counts of updates.
    averaged = config(optimizer__name=optimizer, train__ema_decay=0.9)
    assert state_bytes(averaged) == state_bytes(c) + 4 * sizes.total
    halved = config(optimizer__name=optimizer, optimizer__moment_dtype="bfloat16")
    assert state_bytes(halved) == state_bytes(c) - 2 * moments[optimizer]


@pytest.mark.parametrize("sharding", [{}, {"fsdp": 4, "tensor": 2}])
def test_moments_in_bfloat16_have_the_expected_values_of_float64(config, mesh_of, sharding):
    """Constant gradients change a second moment by 0.1 % per update at most, and rounding to nearest would stop it."""
    updates, b1, b2 = 300, 0.9, 0.999
    c = config(optimizer__moment_dtype="bfloat16", optimizer__b2=b2, optimizer__clip_norm=None)
    with jax.set_mesh(mesh_of(**sharding)):
        optimizer, normal = make_optimizer(c, {"w": True}), np.random.default_rng(0).normal(size=(64, 256))
        grads = {"w": jnp.asarray(normal, jnp.float32, out_sharding=P("fsdp", "tensor"))}

        @jax.jit
        def updated_state(grads):
            update = lambda _, state: optimizer.update(grads, state, grads)[1]  # noqa: E731
            return jax.lax.fori_loop(0, updates, update, optimizer.init(grads))

        state = updated_state(grads)
    g = np.float64(grads["w"])
    for name, expected in {"mu": (1 - b1**updates) * g, "nu": (1 - b2**updates) * g**2}.items():
        moment = optax.tree.get(state, name)["w"]
        assert (moment.dtype, moment.sharding) == (jnp.bfloat16, grads["w"].sharding)
        ratio = np.float64(moment) / expected
        # An error of rounding lasts 1 / (1 - b) updates, so relative errors are about 0.002 √(1 / (1 - b)) / 2.
        assert abs(ratio.mean() - 1) < 5 * ratio.std() / np.sqrt(ratio.size), (name, ratio.mean())
        assert ratio.std() < {"mu": 0.006, "nu": 0.04}[name]


def test_stochastic_rounding_is_unbiased():
    """Each number goes to one of its neighbours, and their mean is the number. Numbers of bfloat16 do not change."""
    draws = 20_000
    x = np.random.default_rng(0).normal(size=200).astype(np.float32)
    x[:2] = 1.5, 0
    rounded = jax.vmap(stochastically_rounded, (None, 0))(x, jax.random.split(jax.random.key(0), draws))
    assert rounded.dtype == jnp.bfloat16
    found = np.float64(rounded)
    towards_0 = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    away = ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    assert ((found == towards_0) | (found == away)).all()
    np.testing.assert_array_equal(found[:, :2], np.broadcast_to(x[:2], (draws, 2)))
    gap = np.abs(np.float64(away) - towards_0)
    assert (np.abs(found.mean(axis=0) - x) <= 5 * gap * 0.5 / np.sqrt(draws)).all()
