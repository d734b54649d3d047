"""The loss of a distillation, against whole logits in float64, and runs with a teacher."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.training_runs import train_losses

from difftx.training import loss
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.loss import Distillation, weighted_loss
from difftx.training.state import init_params, init_state, make_train_step
from training.loss_test import MESHES, V, inputs
from training.resume_test import train
from training.state_test import ragged_batch

ARGUMENTS = (0, 1, 3)  # Hidden state, table and weights of the tokens.


def expected(x_BTD, table_VD, targets_BT, weight_BT, teacher, cap, z_loss, d):
    """Return the loss, the KL divergence and the gradients on whole logits in float64."""
    with jax.enable_x64(True):
        as_float64 = functools.partial(jax.tree.map, lambda x: jnp.asarray(np.asarray(x), jnp.float64))

        def logits(x_BTD, table_VD, cap):
            logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD)
            return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)

        def total(x_BTD, table_VD, weight_BT):
            ours, theirs = logits(x_BTD, table_VD, cap), logits(*as_float64(teacher), d.logit_soft_cap)
            log_q, log_p = (jax.nn.log_softmax(each / d.temperature) for each in (ours, theirs))
            kl_BT = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
            nll_BT = -jnp.take_along_axis(jax.nn.log_softmax(ours), np.asarray(targets_BT)[..., None], axis=-1)[..., 0]
            z_BT = z_loss * jax.nn.logsumexp(ours, axis=-1) ** 2
            of_tokens = (1 - d.weight) * nll_BT + z_BT + d.weight * d.temperature**2 * kl_BT
            return jnp.sum(of_tokens * weight_BT), jnp.sum(kl_BT * weight_BT)

        call = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
        return jax.device_get(call(*as_float64((x_BTD, table_VD, weight_BT))))


def found(x, table, targets, weight, teacher, cap, z_loss, d):
    call = jax.jit(jax.value_and_grad(weighted_loss, argnums=ARGUMENTS, has_aux=True), static_argnums=(4, 5, 7))
    return call(x, table, targets, weight, cap, z_loss, teacher, d)


def teacher_of(mesh):
    """Return another model's hidden state, and its unembedding."""
    x, table, *_ = inputs(mesh)
    return tuple(jax.device_put(np.roll(each, 3, axis=0) * 0.7, each.sharding) for each in (x, table))


@pytest.mark.parametrize(
    ("chunk_logits", "sizes", "d"),
    [
        (2**26, {}, Distillation(0.3, 2.0, 2.5)),
        (5 * V, {"fsdp": 2, "tensor": 2}, Distillation(1.0, 1.0, None)),
        *(pytest.param(5 * V, sizes, Distillation(0.3, 2.0, 2.5), marks=pytest.mark.long) for sizes in MESHES[1:]),
    ],
)
def test_loss_and_gradients_equal_those_of_whole_logits(mesh_of, monkeypatch, sizes, chunk_logits, d):
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk_logits)
    mesh, rest = mesh_of(**sizes), (3.0, 0.1, d)
    arrays, teacher = inputs(mesh), teacher_of(mesh)
    (value, kl), gradients = expected(*arrays, teacher, *rest)
    with jax.set_mesh(mesh):
        (total, sums), grads = found(*arrays, teacher, *rest)
        without_gradient = jax.jit(weighted_loss, static_argnums=(4, 5, 7))(*arrays, *rest[:2], teacher, d)[0]
    assert [float(total), float(sums[2])] == pytest.approx([float(value), float(kl)], rel=2e-6)
    assert float(without_gradient) == pytest.approx(float(value), rel=2e-6)
    for gradient, wanted in zip(grads, gradients, strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=3e-5)


def test_a_teacher_equal_to_the_model_gives_zero_and_weight_0_the_usual_loss(mesh_of):
    mesh = mesh_of(fsdp=2, tensor=2)
    arrays = inputs(mesh)
    with jax.set_mesh(mesh):
        (total, sums), grads = found(*arrays, tuple(arrays[:2]), 3.0, 0.0, Distillation(1.0, 2.0, 3.0))
        assert [float(total), float(sums[2])] == [0, 0]
        assert not any(np.any(gradient) for gradient in grads)
        usual = jax.jit(jax.value_and_grad(weighted_loss, argnums=ARGUMENTS, has_aux=True), static_argnums=(4, 5))
        (plain, _), plain_grads = usual(*arrays, 3.0, 0.1)
        (total, sums), grads = found(*arrays, teacher_of(mesh), 3.0, 0.1, Distillation(0.0, 2.0, None))
    assert float(total) == float(plain)
    assert float(sums[2]) > 1
    jax.tree.map(np.testing.assert_array_equal, grads, plain_grads)


@pytest.mark.long
def test_the_step_has_the_gradient_of_the_teachers_distribution(config, mesh_of):
    """With itself as its teacher, a model does not move. With weight 0, it takes the usual step. Sharded 2 × 2."""
    mesh = mesh_of(fsdp=2, tensor=2)
    c = config(train__global_batch_tokens=8 * 32, optimizer__weight_decay=0, model__compute_dtype="float32")
    with jax.set_mesh(mesh):
        state, batch = jax.jit(lambda: init_state(c))(), ragged_batch(mesh, c)
        other = jax.jit(lambda: init_params(c, 7))()

        def step(teacher, **train):
            changed = c.but(train=train)
            return jax.jit(make_train_step(changed, None if teacher is None else c))(
                state, batch, *(() if teacher is None else (teacher,))
            )

        usual, plain = step(None)
        for accumulation in (1, 2):
            _, metrics = step(state.params, distill_weight=1.0, accumulation=accumulation)
            # Compiled with its gradient, the model rounds differently than as a teacher.
            assert [float(metrics["teacher_kl"]), float(metrics["grad_norm"])] == pytest.approx([0, 0], abs=1e-6)
        same, metrics = step(other, distill_weight=0.0)
        _, drawn = step(other, distill_weight=1.0)
    jax.tree.map(np.testing.assert_array_equal, same.params, usual.params)
    assert {name: float(metrics[name]) for name in ("loss", "grad_norm")} == {
        name: float(plain[name]) for name in ("loss", "grad_norm")
    }
    assert float(metrics["teacher_kl"]) == float(drawn["teacher_kl"]) > 1e-3
    assert float(drawn["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-6)  # "loss" remains the NLL.


@pytest.mark.long
def test_a_run_records_its_teacher_and_refuses_another(text_file, tmp_path):
    teacher, other, student = (tmp_path / name for name in ("teacher", "other", "student"))
    short = {"train__steps": 20, "eval__every_steps": 1000, "checkpoint__every_steps": 10}
    for seed, workdir in enumerate((teacher, other)):
        result = train(text_file, workdir, train__seed=seed, **short)
        assert result.returncode == 0, result.stderr
    result = train(text_file, student, train__teacher=teacher, **(short | {"train__steps": 10}))
    assert result.returncode == 0, result.stderr
    assert f"teacher from {teacher}/checkpoints/20" in result.stdout
    manifest = Checkpoints(student).read(10)
    assert manifest.loader["teacher"] == Checkpoints(teacher).read(20).weights
    _, rows = train_losses(student)
    assert all(row["teacher_kl"] > 0 for row in rows if row["split"] == "train")
    result = train(text_file, student, train__teacher=other, **short)
    assert result.returncode == 2
    assert "has other weights than the teacher up to step 10; name the checkpoint" in result.stderr
    result = train(text_file, student, train__teacher=teacher / "checkpoints" / "20", devices=2, **short)
    assert result.returncode == 0, result.stderr
    assert dataclasses.asdict(Checkpoints(student).read(20))["loader"]["teacher"] == manifest.loader["teacher"]
