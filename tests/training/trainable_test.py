"""Training of a part of the parameters, and of adapters (LoRA)."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from model import oracle

from difftx.errors import UserError
from difftx.launch.estimate import trace_step
from difftx.model.architectures import ARCHITECTURES
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.checkpoint.restoring import restore_params, restore_state
from difftx.training.fit import fit
from difftx.training.loss import batch_loss
from difftx.training.optimizer import make_optimizer
from difftx.training.state import graph, init_state, init_trained, make_train_step, state_bytes
from difftx.training.trainable import LORA, flatten, merged, with_adapters
from training.mesh_test import results
from training.state_test import ragged_batch, run_steps

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("options", "trains"),
    [
        ({"train__trainable": "blocks/attention/lambda_*"}, lambda name: "lambda_" in name),
        pytest.param(
            {"train__trainable": "blocks/mlp/up_DF,embedding_VD", "optimizer__name": "muon", "train__ema_decay": 0.9},
            lambda name: name in ("blocks/mlp/up_DF", "embedding_VD"),
            marks=pytest.mark.long,
        ),
        ({"train__lora_rank": 3, "train__accumulation": 2}, lambda name: name.startswith("lora/")),
    ],
)
def test_frozen_leaves_keep_their_bits_and_have_no_moments(config, mesh_of, options, trains):
    c = config(**options)
    start, *_, state = run_steps(c, mesh_of(**MESH))[0]
    before, after = flatten(start.params), flatten(state.params)
    assert {name for name in after if not np.array_equal(before[name], after[name])} == set(filter(trains, after))
    expected = sum(x.size for name, x in after.items() if trains(name))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    of_muon = after["blocks/mlp/up_DF"].size if "optimizer__name" in options else 0
    assert count(moments) == 2 * expected - of_muon
    assert state_bytes(c) == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    if state.ema is not None:
        jax.tree.map(lambda p, mean: np.testing.assert_allclose(mean, p, rtol=0.3, atol=0.1), state.params, state.ema)


@pytest.mark.long
def test_no_gradient_of_frozen_parameters_is_computed(config, mesh_of):
    """No matrix product of the compiled step has the shape of a frozen weight, which its gradient would have."""

    def products(**options):
        c = config(model__mlp_dim=80, data__sequence_length=48, train__global_batch_tokens=48 * 4, **options)
        return {tuple(sorted(s)) for s in results(trace_step(c, mesh_of()).lower().compile().as_text(), "dot")}

    gradients = {(32, 80), (32, 264)}
    assert gradients <= products()
    assert gradients.isdisjoint(products(train__trainable="blocks/attention/lambda_*,final_norm/scale"))
    assert products(train__trainable="embedding_VD") & gradients == {(32, 264)}
    assert gradients.isdisjoint(products(train__lora_rank=3))


def test_a_pattern_without_a_match_names_the_nearest_path(config, mesh_of):
    for pattern, message in (
        ("blocks/attention/lambda_quer", "Did you mean 'blocks/attention/lambda_query_Gd'?"),
        ("lora/*", "train.trainable='lora/*' matches"),
    ):
        with pytest.raises(UserError, match="matches no path of a parameter") as error:
            fit(config(train__trainable=pattern), mesh_of())
        assert message in str(error.value)


def random_adapters(c, mesh):
    """Return new parameters, and the same with random numbers in place of B = 0."""
    with jax.set_mesh(mesh):
        params = jax.jit(lambda: init_trained(c))()
    rng = np.random.default_rng(0)

    def draw(x):
        return jax.device_put(rng.normal(size=x.shape).astype(np.float32) / 8, x.sharding)

    return params, params | {LORA: jax.tree.map(draw, params[LORA])}


@pytest.mark.parametrize(
    "architecture", ["diff", *(pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES if name != "diff")]
)
def test_adapters_equal_merged_weights_and_new_ones_change_nothing(config, mesh_of, architecture):
    """Each weight is compared with W + 2 A B in float64."""
    mesh, options = mesh_of(**MESH), {"model__num_layers": 1, "data__sequence_length": 16}
    options |= oracle.SIZES.get(architecture, {})
    options |= {"train__global_batch_tokens": 8 * 16}
    base = config(architecture, **options)
    c = config(architecture, train__lora_rank=3, train__lora_alpha=6, **options)
    new, drawn = random_adapters(c, mesh)
    with jax.set_mesh(mesh):
        graphdef, batch = graph(c), ragged_batch(mesh, c)

    @jax.jit
    def loss(params):
        model = nnx.merge(graphdef, with_adapters(params, c.train))
        return batch_loss(model, batch)[0], model(batch.tokens_BT)[0]

    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        without = {name: part for name, part in new.items() if name != LORA}
        first = jax.jit(lambda: init_state(base).params)()
        jax.tree.map(np.testing.assert_array_equal, without, first)
        jax.tree.map(np.testing.assert_array_equal, loss(new), loss(without))
        adapted, sums = loss(drawn), merged(drawn, c.train)
        for a, b in zip(adapted, loss(sums), strict=True):
            assert np.linalg.norm(a - b) < 1e-6 * np.linalg.norm(b)
        assert not np.allclose(adapted[1], loss(new)[1], atol=1e-2)
    weights, adapters, found = flatten(drawn), flatten(drawn[LORA]), flatten(sums)
    assert [x.sharding for x in found.values()] == [weights[name].sharding for name in found]
    for name in {path.rpartition("/")[0] for path in adapters}:
        w, a, b = (np.float64(x)[0] for x in (weights[name], adapters[f"{name}/a"], adapters[f"{name}/b"]))
        np.testing.assert_allclose(found[name][0], w + 2 * np.tensordot(a, b, axes=1), atol=1e-6)


@pytest.mark.long
def test_adapters_are_sharded_like_their_weights(config, mesh_of):
    c, mesh = config(train__lora_rank=4), mesh_of(**MESH)
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: init_state(c))()
        step = jax.jit(make_train_step(c), donate_argnums=0)
        after, _ = step(state, ragged_batch(mesh, c))
    for tree in (after.params, optax.tree.get(after.opt_state, "mu")):
        a, b = (tree[LORA]["blocks"]["mlp"]["down_FD"][part].sharding.spec for part in ("a", "b"))
        assert (a, b) == (jax.P(None, "tensor", None), jax.P(None, None, "fsdp"))


@pytest.mark.long
def test_a_run_with_adapters_resumes_on_another_mesh(config, mesh_of, tmp_path):
    c, first = config(train__lora_rank=3), mesh_of(fsdp=4)
    checkpointer = Checkpointer(tmp_path, c.checkpoint)
    with jax.set_mesh(first):
        step = jax.jit(make_train_step(c))
        state, _ = step(jax.jit(lambda: init_state(c))(), ragged_batch(first, c))
        checkpointer.save_and_wait(state, {"examples": 0, "signature": {}}, c)
        expected, expected_params = step(state, ragged_batch(first, c, 1))[1], merged(state.params, c.train)
    checkpointer.close()
    second = mesh_of(**MESH)
    with jax.set_mesh(second):
        restored = restore_state(checkpointer.read(1), jax.eval_shape(lambda: init_state(c)), second)
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        metrics = jax.jit(make_train_step(c))(restored, ragged_batch(second, c, 1))[1]
    for name in ("loss", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(float(expected[name]), rel=1e-4)
    params = restore_params(checkpointer.read(1), c, second)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), params, expected_params)


def test_mup_refuses_adapters(config):
    c = config()
    model = dataclasses.replace(c.model, mup_base_width=32, mup_base_layers=2, mup_base_head_dim=8)
    with pytest.raises(UserError, match=r"train.lora_rank=4: .* leave one of them at None"):
        make_optimizer(dataclasses.replace(c.but(train={"lora_rank": 4}), model=model))
