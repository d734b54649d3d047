"""Products with weights in 8 bits (`model.matmul`), against NumPy."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import replace
from flax import nnx
from helpers.evals_params import one_device
from helpers.model_layers import batch_on
from jax import P

from difftx.errors import UserError
from difftx.launch.arithmetic import executed_flops
from difftx.launch.estimate import trace_step
from difftx.model.abstract import count_parameters
from difftx.model.architectures import heads_of
from difftx.model.decoder import REMAT_POLICIES
from difftx.model.layers import linear, multiply
from difftx.model.products import PRECISIONS, ROUNDED_WEIGHTS, rounded_weight
from difftx.training.fit import check_products
from difftx.training.state import init_state, make_train_step

GDLA = {"model__num_heads": 4, "model__gdla__signal_heads": 2}
SHAPES = [
    ("BTD,DF->BTF", (2, 3, 64), (64, 7)),
    ("BTD,DHGd->BTHGd", (2, 3, 64), (64, 4, 2, 3)),
    ("BTHE,HED->BTD", (2, 3, 4, 16), (4, 16, 5)),
]
LARGEST = {ml_dtypes.float8_e4m3fn: 448, ml_dtypes.float8_e5m2: 57344, np.int8: 127}
# Dtypes of activations and weights, of the output's gradient, and whether the weight's gradient is in 8 bits.
FORMATS = {"fp8": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, True), "int8": (np.int8, np.int8, False)}


def rounded(x, axes, dtype):
    """Return numbers rounded to a dtype with a float32 scale along axes, float64."""
    scale = np.abs(np.float32(x)).max(axes, keepdims=True) / np.float32(LARGEST[dtype])
    codes = np.float32(x) / np.where(scale > 0, scale, 1)
    codes = np.rint(codes) if dtype is np.int8 else codes.astype(dtype)
    return np.float64(codes) * np.float64(scale)


def simulated(subscripts, left, right, dtypes):
    """Return the product of rounded operands in float64, and a bound of its difference from the exact product."""
    left_axes, right_axes, _ = subscripts.replace("->", ",").split(",")
    shared = set(left_axes) & set(right_axes)
    operands = (left, left_axes, dtypes[0]), (right, right_axes, dtypes[1])
    (left_hat, left_error), (right_hat, right_error) = (
        (rounded(x, axes, dtype), rounding_bound(x, axes, dtype))
        for x, names, dtype in operands
        for axes in [tuple(i for i, name in enumerate(names) if name in shared)]
    )
    bound = np.einsum(subscripts, left_error, np.abs(right)) + np.einsum(subscripts, np.abs(left_hat), right_error)
    return np.einsum(subscripts, left_hat, right_hat), bound


def rounding_bound(x, axes, dtype):
    """Return the largest error of each number: half a step of the grid."""
    scale = np.abs(x).max(axes, keepdims=True) / LARGEST[dtype]
    if dtype is np.int8:
        return 0 * x + 0.501 * scale
    info = ml_dtypes.finfo(dtype)
    return 1.001 * np.maximum(np.abs(x) * float(info.eps) / 2, scale * float(info.smallest_subnormal) / 2)


@pytest.mark.parametrize(("subscripts", "x_shape", "weight_shape"), SHAPES)
@pytest.mark.parametrize("matmul", PRECISIONS)
def test_a_product_and_its_gradients_are_those_of_rounded_operands(matmul, subscripts, x_shape, weight_shape):
    """Rows, columns and gradients differ in magnitude by up to 2^20, so that one scale for all would lose most."""
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape) * 2.0 ** rng.integers(-10, 10, (shape[0],) + (1,) * (len(shape) - 1))
                 for shape in (x_shape, weight_shape))  # fmt: skip
    x, weight = np.float32(x), np.float32(weight)
    names = subscripts.replace("->", ",").split(",")
    forward, gradient, rounds_weight_gradient = FORMATS[matmul]
    out, bound = simulated(subscripts, x, weight, (forward, forward))
    exact = np.einsum(subscripts, np.float64(x), np.float64(weight))
    c = np.float32(rng.normal(size=out.shape))
    dx, _ = simulated(f"{names[2]},{names[1]}->{names[0]}", c, weight, (gradient, forward))
    of_weight = f"{names[0]},{names[2]}->{names[1]}"
    dw = np.einsum(of_weight, np.float64(x), np.float64(c))
    if rounds_weight_gradient:
        dw, _ = simulated(of_weight, x, c, (forward, gradient))

    @jax.jit
    def product(x, weight, c):
        found, vjp = jax.vjp(lambda x, w: linear(subscripts, x, nnx.Param(w, matmul=matmul), P()), x, weight)
        return found, *vjp(c)

    with jax.set_mesh(one_device()):
        found, *gradients = product(x, weight, c)
    for array, expected in zip((found, *gradients), (out, dx, dw), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    assert (np.abs(found - exact) <= bound + 1e-5 * np.abs(exact).max()).all()
    assert np.abs(found - exact).max() > 1e-3 * np.abs(exact).max()  # Nothing would be rounded otherwise.


def test_an_identity_returns_the_rounded_input_and_whole_numbers_are_exact():
    x = np.random.default_rng(0).normal(size=(2, 3, 64)).astype(np.float32)
    whole = np.float32(np.random.default_rng(0).integers(-127, 128, size=(2, 3, 64)))
    whole[..., 0] = 127  # The scale of each row is then 1.
    identity = nnx.Param(jnp.eye(64), matmul="int8")
    with jax.set_mesh(one_device()):
        np.testing.assert_array_equal(linear("BTD,DF->BTF", whole, identity, P()), whole)
        found = linear("BTD,DF->BTF", x, identity, P())
    np.testing.assert_allclose(found, rounded(x, -1, np.int8), rtol=2**-23)


@pytest.mark.parametrize("matmul", PRECISIONS)
def test_a_static_scale_clips_larger_inputs(matmul):
    rng, dtype = np.random.default_rng(0), FORMATS[matmul][0]
    x, weight = (np.float32(rng.normal(size=shape)) for shape in ((2, 3, 64), (64, 5)))
    with jax.set_mesh(one_device()):
        found = multiply(matmul, "BTD,DF->BTF", jnp.asarray(x), jnp.asarray(weight), P(), jnp.float32(1.5))
    # A further number of 1.5 makes the scale of each row the static one.
    clipped = np.append(np.clip(x, -1.5, 1.5), np.full((2, 3, 1), 1.5, np.float32), axis=-1)
    x_hat = rounded(clipped, -1, dtype)[..., :-1]
    np.testing.assert_allclose(found, x_hat @ rounded(weight, 0, dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("inputs", "shape"), [(1, (256, 3, 5)), (2, (4, 96, 6)), (1, (40, 7))])
@pytest.mark.parametrize(("matmul", "levels"), [("int8_weights", 127), ("int4_weights", 7)])
def test_weights_alone_are_rounded_and_gradients_pass(mesh_of, matmul, levels, inputs, shape):
    """Inputs and outputs are sharded, and groups of 128 inputs span several devices."""
    weight = np.float32(np.random.default_rng(0).normal(size=shape))
    count = math.prod(shape[:inputs])
    groups = weight.reshape(count // (size := math.gcd(count, 128) if levels == 7 else count), size, -1)
    scale = np.abs(groups).max(1, keepdims=True) / np.float32(levels)
    expected = (np.rint(groups / scale) * scale).reshape(shape)

    @jax.jit
    def rounded_and_gradient(weight):
        found, vjp = jax.vjp(lambda w: rounded_weight(w, inputs, ROUNDED_WEIGHTS[matmul]), weight)
        return found, *vjp(found)

    mesh = mesh_of(fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        spec = P("fsdp", *[None] * (len(shape) - 1))
        placed = jax.device_put(weight, jax.NamedSharding(mesh, spec))
        found, gradient = rounded_and_gradient(placed)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(gradient, found)
    assert jax.typeof(found).sharding.spec == spec


@pytest.mark.parametrize("matmul", PRECISIONS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_numbers_that_are_not_finite_stay_so(matmul, wrong):
    x = np.ones((1, 2, 4), np.float32)
    x[0, 1, 2] = wrong
    with jax.set_mesh(one_device()):
        out = linear("BTD,DF->BTF", x, nnx.Param(jnp.zeros((4, 3)), matmul=matmul), P())
    assert np.isfinite(out[0, 0]).all()
    assert np.isnan(out[0, 1]).all()


@pytest.mark.parametrize("matmul", PRECISIONS)
@pytest.mark.parametrize(("policy", "products", "saved"), [("dots", 3, "bf16[2,128,64]"), ("full", 4, None)])
def test_the_policy_dots_saves_products_in_the_dtype_of_the_input(matmul, policy, products, saved):
    """The sums of 32 bits are not saved, although they are the results of products."""

    def loss(x, weight):
        product = linear("BTD,DF->BTF", x, nnx.Param(weight, matmul=matmul), P())
        return jnp.sum(jnp.sin(product).astype(jnp.float32))

    arguments = jnp.ones((2, 128, 32), jnp.bfloat16), jnp.ones((32, 64))
    with jax.set_mesh(one_device()):
        loss = jax.checkpoint(loss, policy=REMAT_POLICIES[policy])
        jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arguments))
        _, vjp = jax.vjp(loss, *arguments)
        kept = {str(jax.typeof(leaf)) for leaf in jax.tree.leaves(vjp)}
    assert jaxpr.count("dot_general[") == products
    of_product = {kind for kind in kept if "128,64" in kind}
    assert of_product == ({"bfloat16[2,128,64]"} if saved else set())


CASES = [
    ("diff", {"data": 2, "fsdp": 2, "tensor": 2}, {"model__num_kv_heads": 2, "model__num_heads": 4}),
    ("transformer", {"context": 2, "fsdp": 4}, {"model__remat": "dots"}),
    ("gdla", {"fsdp": 2, "tensor": 2}, {"model__remat": "full", **GDLA}),
    ("diff_v2", {"fsdp": 2, "tensor": 2}, {"model__remat": "dots"}),
    ("dex", {"fsdp": 2, "tensor": 2}, {"model__remat": "dots"}),
]


@pytest.mark.long
@pytest.mark.parametrize("matmul", PRECISIONS)
@pytest.mark.parametrize(("name", "sizes", "fields"), CASES)
def test_a_step_on_a_mesh_is_that_of_one_device_and_counts_the_same_flops(config, mesh_of, matmul, name, sizes, fields):
    c, found = config(name, model__matmul=matmul, **fields), []
    # On one device, nothing is recomputed.
    for mesh, each in ((mesh_of(), replace(c, "model", remat="none")), (mesh_of(**sizes), c)):
        with jax.set_mesh(mesh):
            state = jax.jit(lambda each=each: init_state(each))()
            metrics = jax.jit(make_train_step(each))(state, batch_on(mesh, each))[1]
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    # A number between two levels may be rounded either way.
    assert found[0] == pytest.approx(found[1], rel=2e-3)

    def flops(each, **kind):
        return executed_flops(trace_step(each, mesh_of()).jaxpr, **kind)

    plain = replace(c, "model", matmul="compute_dtype")
    assert flops(c) == flops(plain)
    assert flops(plain, only_8_bits=True) == 0
    numbers, model = count_parameters(c.model).projections, c.model
    if name in ("diff_v2", "gdla"):
        numbers -= model.num_layers * model.d_model * model.num_heads  # Of λ, which is computed in float32.
    if name == "dex":
        numbers += model.num_layers * (model.num_heads - 1) * heads_of(model).d_head ** 2  # Each head has the product.
    products = 3 - (matmul == "int8")
    expected = 2 * products * numbers * c.train.global_batch_tokens
    assert flops(replace(c, "model", remat="none"), only_8_bits=True) == expected


@pytest.mark.parametrize(
    ("kind", "matmul", "message"),
    [
        ("NVIDIA A100-SXM4-80GB", "fp8", "has no units for such products; use 'int8' or 'compute_dtype'"),
        ("TPU v5", "fp8", "has no units for such products; use 'int8' or 'compute_dtype'"),
        ("TPU7x", "int8", "has no units for such products; use 'fp8' or 'compute_dtype'"),
        ("NVIDIA H100 80GB HBM3", "fp8", None),
        ("TPU v5", "int8", None),
        ("cpu", "fp8", None),
    ],
)
def test_a_device_without_units_is_refused(kind, matmul, message):
    if message is None:
        return check_products(matmul, kind)
    with pytest.raises(UserError, match=rf"model\.matmul='{matmul}': {kind} {message}"):
        check_products(matmul, kind)
