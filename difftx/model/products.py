"""Products of activations and weights in 8 bits, with a scale per row and per column (`model.matmul`).

Each operand becomes numbers of 8 bits times a float32 scale, which has one value for all numbers that a sum contracts:
X W ≈ s_x s_w Σ x̂ ŵ. A scale is the largest magnitude divided by the largest number of the dtype. Each call computes
its scales, so they are not a state of the training, and no row of X affects another row.
"""

import dataclasses
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


def quantize(x: jax.Array, axes: tuple[int, ...], dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return `x` as numbers of a dtype and their float32 scale, which has size 1 along `axes`.

    If a number is not finite, neither is its scale, so a product has such numbers too.
    """
    info = (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype)
    largest, x = float(info.max), x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / largest
    # A subnormal scale has few digits, so that a quotient may exceed the largest number.
    codes = jnp.clip(x / jnp.where(scale > 0, scale, 1), -largest, largest)
    return (jnp.round(codes) if jnp.issubdtype(dtype, jnp.integer) else codes).astype(dtype), scale


def product(
    subscripts: str, left: jax.Array, right: jax.Array, dtypes: tuple[Any, Any], sharding: P | jax.NamedSharding
) -> jax.Array:
    """Return `jnp.einsum(subscripts, left, right)` of operands rounded to `dtypes`, in float32 with this sharding.

    The axes of the result must be those of `left` and then those of `right`, without the contracted ones.
    """
    left_axes, right_axes, _ = subscripts.replace("->", ",").split(",")
    shared = set(left_axes) & set(right_axes)
    in_left, in_right = (
        tuple(names.index(axis) for axis in left_axes if axis in shared) for names in (left_axes, right_axes)
    )
    (left, left_scale), (right, right_scale) = map(quantize, (left, right), (in_left, in_right), dtypes)
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
