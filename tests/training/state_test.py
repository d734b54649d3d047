"""The training state and step: initialisation, accumulation and averages of weights."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.model_layers import MUP
from model.oracle import SIZES

from difftx.data.loader import Batch
from difftx.launch.estimate import trace_step
from difftx.model.architectures import ARCHITECTURES
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import make_mesh
from difftx.training.state import graph, init_state, jit_init, make_train_step, split_microbatches


def ragged_batch(mesh, c, seed=0):
    """Return a batch whose rows have very different numbers of counted tokens, one of them 0."""
    rng = np.random.default_rng(seed)
    shape = (c.batch_rows, c.data.sequence_length)
    counted = np.linspace(0, shape[1], shape[0]).astype(int)
    mask = (np.arange(shape[1]) < counted[:, None]).astype(np.float32)
    tokens, targets = (rng.integers(0, 257, shape).astype(np.int32) for _ in range(2))
    put = [jax.device_put(x, jax.NamedSharding(mesh, Layout().act_BT)) for x in (tokens, targets, mask)]
    return Batch(tokens_BT=put[0], targets_BT=put[1], loss_mask_BT=put[2])


@pytest.mark.long
def test_seed_as_an_argument_gives_the_same_parameters(config, mesh_of):
    c = config("diff", train__seed=2**32 - 1)
    with jax.set_mesh(mesh_of()):
        as_constant, as_argument = jax.jit(lambda: init_state(c))(), jit_init(init_state, c)
    jax.tree.map(np.testing.assert_array_equal, as_constant, as_argument)


def run_steps(c, mesh, count=2):
    """Return the state at the start and after each step, and the metrics of the last step."""
    with jax.set_mesh(mesh):
        states = [jax.jit(lambda: init_state(c))()]
        step = jax.jit(make_train_step(c))
        for seed in range(count):
            state, metrics = step(states[-1], ragged_batch(mesh, c, seed))
            states.append(state)
    return jax.device_get(states), jax.device_get(metrics)


@pytest.mark.long
def test_accumulation_changes_nothing(config, mesh_of):
    options, mesh = {"train__global_batch_tokens": 16 * 32, "optimizer__eps": 1e-4}, mesh_of(data=2, fsdp=2, tensor=2)
    one, metrics_one = run_steps(config(train__accumulation=1, **options), mesh)
    four, metrics_four = run_steps(config(train__accumulation=4, **options), mesh)
    for a, b in zip(jax.tree.leaves(one[-1]), jax.tree.leaves(four[-1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name in metrics_one:
        np.testing.assert_allclose(metrics_one[name], metrics_four[name], rtol=1e-5)


def test_microbatches_keep_every_row_on_its_device(config, mesh_of):
    mesh = mesh_of(fsdp=4)
    c = config(train__global_batch_tokens=16 * 32, train__accumulation=2)
    with jax.set_mesh(mesh):
        batch = ragged_batch(mesh, c)
        compiled = jax.jit(lambda b: split_microbatches(b, 2)).lower(batch).compile()
        parts = compiled(batch)
    assert "all-" not in compiled.as_text()
    assert "collective" not in compiled.as_text()
    rows = np.asarray(batch.tokens_BT)
    np.testing.assert_array_equal(parts.tokens_BT, rows.reshape(8, 2, -1).transpose(1, 0, 2))


@pytest.mark.long
def test_average_of_the_weights_equals_its_definition(config, mesh_of):
    """Compare with the definition in float64. A skipped update counts neither in the average nor in its weights."""
    decay, skipped = 0.7, 3
    c = config("transformer", train__ema_decay=decay, optimizer__name="muon")
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    after = []
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: init_state(c))()
        step = jax.jit(make_train_step(c), donate_argnums=0)
        for n in range(6):
            batch = ragged_batch(mesh, c, n)
            if n == skipped:
                batch = dataclasses.replace(batch, loss_mask_BT=batch.loss_mask_BT * np.inf)
            state, metrics = step(state, batch)
            assert bool(metrics["skipped"]) == (n == skipped)
            if n != skipped:
                after.append(jax.tree.map(np.float64, jax.device_get(state.params)))
    weights = decay ** np.arange(len(after))[::-1]

    def check(average, *params):
        assert average.dtype == np.float32
        np.testing.assert_allclose(average, np.average(params, axis=0, weights=weights), rtol=1e-5, atol=1e-7)

    jax.tree.map(check, jax.device_get(state.ema), *after)
    assert [mean.sharding for mean in jax.tree.leaves(state.ema)] == [p.sharding for p in jax.tree.leaves(state.params)]


def test_loss_is_the_mean_over_counted_tokens(config, mesh_of):
    c, mesh = config(), mesh_of()
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: init_state(c))()
        batch = ragged_batch(mesh, c)
        step = jax.jit(make_train_step(c))
        _, metrics = step(state, batch)
        after, empty = step(state, dataclasses.replace(batch, loss_mask_BT=0 * batch.loss_mask_BT))
        huge = state.params | {"final_norm": jax.tree.map(lambda gain_D: 1e25 * gain_D, state.params["final_norm"])}
        _, overflow = step(dataclasses.replace(state, params=huge), batch)
        logits = jax.jit(lambda params: nnx.merge(graph(c), params)(batch.tokens_BT)[0])(state.params)
    logits = np.asarray(logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    rows, columns = np.nonzero(np.asarray(batch.loss_mask_BT))
    expected = -np.mean(log_p[rows, columns, np.asarray(batch.targets_BT)[rows, columns]])
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)
    assert np.isnan(empty["loss"])  # The mean over no token.
    assert [np.isfinite(overflow[name]) for name in ("loss", "grad_norm")] == [True, False]
    assert empty["skipped"]
    assert overflow["skipped"]
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, state.opt_state))
    assert metrics["lambda"].shape == (2,)


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "options"), [("transformer", {}), ("diff", {"model__window": 5, "model__window_pattern": "LG"})]
)
def test_compiled_step_does_not_grow_with_depth(config, mesh_of, architecture, options):
    """The step scans over layers or groups of layers, so programs of 24 and of 2 layers differ only in their sizes."""
    lines = {}
    for layers in (2, 24):
        c, mesh = config(architecture, model__num_layers=layers, **options), mesh_of()
        with jax.set_mesh(mesh):
            state = jax.eval_shape(functools.partial(init_state, c))
            lowered = jax.jit(make_train_step(c)).lower(state, ragged_batch(mesh, c))
        lines[layers] = len(lowered.as_text().splitlines())
    assert lines[24] <= 1.05 * lines[2]


ALL_ELSE = {
    "train__accumulation": 2,
    "train__ema_decay": 0.9,
    "train__z_loss": 1e-4,
    "model__window": 5,
    "model__qk_norm": True,
    "model__logit_soft_cap": 2.0,
    **MUP,
    "model__remat": "full",
    "data__document_mask": True,
}
SHARDED = {"mesh__tensor": 2, "mesh__context": 2, "mesh__context_method": "zigzag"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("transformer", {}),
        pytest.param("gdla", ALL_ELSE, marks=pytest.mark.long),
        pytest.param("diff", {"optimizer__name": "muon"} | SHARDED, marks=pytest.mark.long),
        *(pytest.param(name, {}, marks=pytest.mark.long) for name in ARCHITECTURES if name != "transformer"),
    ],
)
def test_training_needs_no_implicit_promotion_of_dtypes(config, name, options):
    """Users may set jax_numpy_dtype_promotion=strict."""
    options = SIZES.get(name, {}) | {"model__compute_dtype": "bfloat16"} | options
    c = config(name, train__global_batch_tokens=16 * 32, **options)
    with jax.numpy_dtype_promotion("strict"):
        trace_step(c, make_mesh(c.mesh, jax.devices()[: c.mesh.context * c.mesh.tensor]))
