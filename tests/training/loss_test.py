"""The chunked loss and its gradients, against optax on whole logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import marked
from helpers.kernels_checks import targeting

from difftx.parallel.layout import Layout
from difftx.training import loss
from difftx.training.loss import token_scores, weighted_loss

MESHES = [{}, {"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2, "tensor": 4}, {"fsdp": 4, "context": 2}]
CASES = [({}, None, 0.0), *((sizes, 3.0, 0.1) for sizes in MESHES), ({}, 3.0, 0.0), ({}, None, 0.1)]
FAST = [({}, None, 0.0), *((sizes, 3.0, 0.1) for sizes in MESHES[1:3])]
B, T, D, V = 4, 6, 16, 24


def inputs(mesh, dtype=np.float32):
    rng = np.random.default_rng(0)
    layout = Layout()
    arrays = [
        (rng.normal(size=(B, T, D)).astype(dtype), layout.act_BTD),
        (rng.normal(size=(V, D)).astype(np.float32), layout.embedding_VD),
        (rng.integers(0, V, (B, T)).astype(np.int32), layout.act_BT),
        (rng.random((B, T)).astype(np.float32), layout.act_BT),
    ]
    return [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in arrays]


def expected(x_BTD, table_VD, targets_BT, weight_BT, cap=None, z_loss=0.0):
    """Return optax's NLL on whole logits, the sums of loss and z-loss, and the gradients of the loss, in float64."""
    with jax.enable_x64(True):
        x_BTD, table_VD, weight_BT = (jnp.asarray(np.asarray(a), jnp.float64) for a in (x_BTD, table_VD, weight_BT))

        def total(x_BTD, table_VD, weight_BT):
            logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD)
            if cap is not None:
                logits_BTV = cap * jnp.tanh(logits_BTV / cap)
            nll_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, np.asarray(targets_BT))
            z = jnp.sum(z_loss * jnp.log(jnp.sum(jnp.exp(logits_BTV), axis=-1)) ** 2 * weight_BT)
            return jnp.sum(nll_BT * weight_BT) + z, (nll_BT, z)

        call = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
        (value, (nll_BT, z)), grads = call(x_BTD, table_VD, weight_BT)
        return np.asarray(nll_BT), float(value), float(z), [np.asarray(g) for g in grads]


# One chunk, and chunks whose size does not divide the number of tokens.
@pytest.mark.parametrize("chunk_logits", [2**26, 5 * V])
@pytest.mark.parametrize(("sizes", "cap", "z_loss"), marked(CASES, fast=FAST))
def test_loss_and_gradients_equal_those_of_whole_logits(mesh_of, monkeypatch, sizes, cap, z_loss, chunk_logits):
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk_logits)
    mesh = mesh_of(**sizes)
    x, table, targets, weight = inputs(mesh)
    nll, sum_of_both, sum_of_z, gradients = expected(x, table, targets, weight, cap, z_loss)
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(token_scores, logit_soft_cap=cap))(x, table, targets)[0]
        np.testing.assert_allclose(found, nll, atol=1e-5)

        def scaled(x, table, weight):
            total, (_, of_z) = weighted_loss(x, table, targets, weight, cap, z_loss)
            return 3 * total, of_z

        call = jax.jit(jax.value_and_grad(scaled, argnums=(0, 1, 2), has_aux=True))
        (total, of_z), grads = call(x, table, weight)
        without_gradient = jax.jit(scaled)(x, table, weight)
    assert float(total) == pytest.approx(3 * sum_of_both, rel=1e-6)
    assert float(of_z) == pytest.approx(sum_of_z, rel=1e-6)
    assert list(map(float, without_gradient)) == pytest.approx([float(total), float(of_z)], rel=1e-6)
    for gradient, wanted, like in zip(grads, gradients, (x, table, weight), strict=True):
        np.testing.assert_allclose(gradient, 3 * wanted, atol=3e-5)
        assert gradient.sharding.is_equivalent_to(like.sharding, like.ndim)


@pytest.mark.parametrize(
    ("kind", "tokens", "vocabulary", "chunks", "size"),
    [
        ("NVIDIA H100 80GB HBM3", 16_384, 100_288, 4, 4096),
        ("TPU v5", 16_384, 100_288, 4, 4096),
        ("TPU v5 lite", 16_384, 100_288, 22, 768),  # Without whole tiles, 25 chunks would have 656 tokens.
        ("NVIDIA L4", 1000, 32_768, 1, 1000),
    ],
)
def test_devices_with_much_memory_have_few_chunks(kind, tokens, vocabulary, chunks, size):
    table, targets = jax.ShapeDtypeStruct((vocabulary, 8), jnp.float32), jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    with targeting(kind):
        found = jax.eval_shape(lambda targets: loss._chunks(table, target=targets), targets)
    assert found["target"].shape == (chunks, size)


def test_bfloat16_activations_give_a_float32_gradient_of_the_table(mesh_of):
    mesh = mesh_of(fsdp=2)
    x, table, targets, weight = inputs(mesh)
    *_, gradients = expected(x, table, targets, weight)

    def total(x, table):
        return weighted_loss(x, table, targets, weight, None, 0.0)[0]

    with jax.set_mesh(mesh):
        grads = jax.jit(jax.grad(total, argnums=(0, 1)))(x.astype(jnp.bfloat16), table)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32]
    for gradient, wanted in zip(grads, gradients[:2], strict=True):
        error = np.linalg.norm(np.asarray(gradient, np.float64) - wanted) / np.linalg.norm(wanted)
        assert error < 1e-2


def test_large_logits_are_finite(mesh_of):
    mesh, layout = mesh_of(), Layout()
    x, table = np.array([[[1e4], [1e4]]], np.float32), np.array([[1.0], [-1.0], [0.0]], np.float32)
    specs = (layout.act_BTD, layout.embedding_VD, layout.act_BT)
    arrays = (x, table, np.array([[1, 0]], np.int32))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
        np.testing.assert_allclose(token_scores(*placed, logit_soft_cap=None)[0], [[2e4, 0.0]])
        np.testing.assert_allclose(token_scores(*placed, logit_soft_cap=30.0)[0], [[60.0, 0.0]], atol=1e-6)
