"""Linear layers and the remat policies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.evals_params import one_device
from jax import P

from difftx.kernels import target
from difftx.model.decoder import REMAT_POLICIES
from difftx.model.layers import linear


@pytest.mark.parametrize(
    ("subscripts", "x_shape", "weight_shape"),
    [
        ("BTD,DF->BTF", (2, 3, 5), (5, 7)),
        ("BTD,DHGd->BTHGd", (2, 3, 5), (5, 4, 2, 3)),
        ("BTHE,HED->BTD", (2, 3, 4, 6), (4, 6, 5)),
    ],
)
def test_a_linear_layer_and_its_gradients_are_those_of_its_formula(subscripts, x_shape, weight_shape, monkeypatch):
    """Compare with float64 products by NumPy. The gradient of Σ c ∘ (x W) is c Wᵀ for x, and xᵀ c for W."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=x_shape), rng.normal(size=weight_shape)
    out = np.einsum(subscripts, x, weight)
    c = rng.normal(size=out.shape)
    names = subscripts.replace("->", ",").split(",")
    expected = (
        np.einsum(f"{names[2]},{names[1]}->{names[0]}", c, weight),
        np.einsum(f"{names[2]},{names[0]}->{names[1]}", c, x),
    )

    def loss(x, weight):
        return jnp.sum(linear(subscripts, x, nnx.Param(weight), P()) * jnp.float32(c))

    monkeypatch.setattr(target, "platform", lambda: "gpu")  # Products of one token are special on GPUs.
    with jax.set_mesh(one_device()):
        found = jax.jit(jax.grad(loss, (0, 1)))(jnp.float32(x), jnp.float32(weight))
        first = linear(subscripts, jnp.float32(x[:, :1]), nnx.Param(jnp.float32(weight)), P())
    np.testing.assert_allclose(first, out[:, :1], rtol=1e-5, atol=1e-5)
    for gradient, formula in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, formula, rtol=1e-5, atol=1e-5)


def test_a_linear_layer_computes_in_the_dtype_of_its_input():
    x = jnp.ones((1, 2, 3), jnp.bfloat16)
    weight = nnx.Param(jnp.ones((3, 4), jnp.float32))
    with jax.set_mesh(one_device()):
        out, gradients = jax.vjp(lambda x, w: linear("BTD,DF->BTF", x, nnx.Param(w), P()), x, weight[...])
        assert out.dtype == jnp.bfloat16
        assert [gradient.dtype for gradient in gradients(out)] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize(("policy", "products"), [("dots", 3), ("full", 4)])
def test_the_remat_policy_decides_whether_a_product_is_computed_again(policy, products):
    """The backward pass of sin(x W) needs x W, and two products for the gradients."""

    def loss(x, weight):
        return jnp.sum(jnp.sin(linear("BTD,DF->BTF", x, nnx.Param(weight), P())))

    loss = jax.checkpoint(loss, policy=REMAT_POLICIES[policy])
    with jax.set_mesh(one_device()):
        jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((1, 2, 3)), jnp.ones((3, 4))))
    assert jaxpr.count("dot_general[") == products
