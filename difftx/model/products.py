"""Products of activations and weights in 8 bits, with a scale per row and per column (`model.matmul`).

Each operand becomes numbers of 8 bits times a float32 scale, which has one value for all numbers that a sum contracts:
X W ≈ s_x s_w Σ x̂ ŵ. A scale is the largest magnitude divided by the largest number of the dtype. Each call computes
its scales, so they are not a state of the training, and no row of X affects another row.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

from difftx.kernels.context import is_explicit_mesh

COMPUTE_DTYPE = "compute_dtype"  # Value of `model.matmul` for products in `model.compute_dtype`.
PRODUCT = "low_precision_product"  # Name by which a remat policy refers to the result of a product.


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of the operands of a product with a weight, and of the products for its gradients."""

    forward: Any  # Dtype of activations and weights.
    gradient: Any  # Dtype of the gradient of the output.
    rounds_weight_gradient: bool  # Whether the product for the gradient of the weight is in these dtypes.


PRECISIONS = {
    # Gradients vary more in magnitude than activations, and e5m2 has more exponents (arXiv 2209.05433).
    "fp8": Precision(jnp.float8_e4m3fn, jnp.float8_e5m2, True),
    # The gradient of a weight sums over tokens, whose gradients differ too much in magnitude for 255 equal steps.
    # SwitchBack (arXiv 2304.13013) and MaxText leave this product in 16 bits too.
    "int8": Precision(jnp.int8, jnp.int8, False),
}
# `model.matmul` → dtype of rounded weights in products that are otherwise in the compute dtype.
ROUNDED_WEIGHTS = {"int8_weights": jnp.int8, "int4_weights": jnp.int4}
GROUP = 128  # Inputs of an output that share a scale, in int4.


def quantize(
    x: jax.Array, axes: tuple[int, ...], dtype: Any, largest_x: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return `x` as numbers of a dtype and their float32 scale, which has size 1 along `axes`.

    If a number is not finite, neither is its scale, so a product has such numbers too. `largest_x` is the largest
    magnitude for a static scale, a scalar. Larger numbers are clipped.
    """
    info = (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype)
    largest, x = float(info.max), x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / largest
    if largest_x is not None:
        scale = jnp.full_like(scale, largest_x / largest)
    # A subnormal scale has few digits, so that a quotient may exceed the largest number.
    codes = jnp.clip(x / jnp.where(scale > 0, scale, 1), -largest, largest)
    return (jnp.round(codes) if jnp.issubdtype(dtype, jnp.integer) else codes).astype(dtype), scale


def group_size(inputs: int, dtype: Any) -> int:
    """Return the number of consecutive inputs of an output that share a scale.

    In int4, these are `GROUP` inputs, or fewer if that does not divide their number. In int8, they are all inputs.
    """
    return math.gcd(inputs, GROUP) if dtype == jnp.int4 else inputs


def groups_of(weight: jax.Array, inputs: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return a weight `[inputs…, outputs…]` as numbers `[groups, inputs of a group, outputs…]`, and their scales.

    `inputs` is the number of its input axes.
    """
    count, outputs = math.prod(weight.shape[:inputs]), weight.shape[inputs:]
    size = group_size(count, dtype)
    spec = None
    if is_explicit_mesh():
        of_outputs = jax.typeof(weight).sharding.spec[inputs:]
        weight = jax.sharding.reshard(weight, P(*[None] * inputs, *of_outputs))
        spec = P(None, None, *of_outputs)
    return quantize(jnp.reshape(weight, (count // size, size, *outputs), out_sharding=spec), (1,), dtype)


def rounded_weight(weight: jax.Array, inputs: int, dtype: Any) -> jax.Array:
    """Return a weight after `groups_of` and back, in float32. Its gradient is that of the weight itself."""
    codes, scale = groups_of(weight, inputs, dtype)
    spec = jax.typeof(weight).sharding.spec if is_explicit_mesh() else None
    of_inputs = None if spec is None else P(*[None] * inputs, *spec[inputs:])
    rounded = jnp.reshape(codes.astype(jnp.float32) * scale, weight.shape, out_sharding=of_inputs)
    rounded = rounded if spec is None else jax.sharding.reshard(rounded, spec)
    # The straight-through estimator (arXiv 1308.3432). The difference is 0 in the forward pass.
    weight = weight.astype(jnp.float32)
    return jax.lax.stop_gradient(rounded) + (weight - jax.lax.stop_gradient(weight))


def product(
    subscripts: str,
    left: jax.Array,
    right: jax.Array,
    dtypes: tuple[Any, Any],
    sharding: P | jax.NamedSharding,
    largest_left: jax.Array | None = None,
) -> jax.Array:
    """Return `jnp.einsum(subscripts, left, right)` of operands rounded to `dtypes`, in float32 with this sharding.

    The axes of the result must be those of `left` and then those of `right`, without the contracted ones.
    `largest_left` makes the scale of `left` static.
    """
    left_axes, right_axes, _ = subscripts.replace("->", ",").split(",")
    shared = set(left_axes) & set(right_axes)
    in_left, in_right = (
        tuple(names.index(axis) for axis in left_axes if axis in shared) for names in (left_axes, right_axes)
    )
    left, left_scale = quantize(left, in_left, dtypes[0], largest_left)
    right, right_scale = quantize(right, in_right, dtypes[1])
    kind = jnp.int32 if jnp.issubdtype(left.dtype, jnp.integer) else jnp.float32
    axes = (in_left, in_right), ((), ())
    out = jax.lax.dot_general(left, right, axes, preferred_element_type=kind, out_sharding=sharding)
    rows = left.ndim - len(shared)  # Number of axes of the result that are those of `left`.
    left_scale = jnp.expand_dims(jnp.squeeze(left_scale, in_left), tuple(range(rows, out.ndim)))
    right_scale = jnp.expand_dims(jnp.squeeze(right_scale, in_right), tuple(range(rows)))
    return out.astype(jnp.float32) * _aligned(left_scale, sharding) * _aligned(right_scale, sharding)


def _aligned(scale: jax.Array, sharding: P | jax.NamedSharding) -> jax.Array:
    """Return a scale with the sharding of the array that it multiplies, along the axes that it has."""
    if not is_explicit_mesh():
        return scale
    spec = sharding.spec if isinstance(sharding, jax.NamedSharding) else sharding
    # The specs of `Inferred`, and of weights that were created without a mesh, are empty.
    axes = [*spec, *[None] * (scale.ndim - len(spec))]
    return jax.sharding.reshard(
        scale, P(*(axis if size > 1 else None for axis, size in zip(axes, scale.shape, strict=True)))
    )
