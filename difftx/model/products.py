"""8-bit products of activations and weights, with one scale per row and per column (`model.matmul`).

Each operand is rounded to 8-bit numbers times a float32 scale: X W ≈ s_x s_w Σ x̂ ŵ. Each row of X has one scale s_x,
and each column of W one scale s_w. A scale is the largest magnitude divided by the largest number of the 8-bit dtype.
Each call computes its scales, so no training state holds them, and no row of X affects another row.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

from difftx.kernels.context import is_explicit_mesh

COMPUTE_DTYPE = "compute_dtype"  # The value of `model.matmul` that selects products in `model.compute_dtype`.
PRODUCT = "low_precision_product"  # Name of a product's result in remat policies.


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of the operands in a product with a weight, for the forward pass and for the gradients."""

    forward: Any  # Dtype of activations and weights.
    gradient: Any  # Dtype of the output's gradient.
    rounds_weight_gradient: bool  # Whether the product that computes the weight's gradient also uses these dtypes.


PRECISIONS = {
    # Gradients vary more in magnitude than activations, so they use e5m2 with its wider exponent (arXiv 2209.05433).
    "fp8": Precision(jnp.float8_e4m3fn, jnp.float8_e5m2, True),
    # A weight's gradient is a sum over tokens. Their gradients differ too much in magnitude for 255 equal steps, so
    # this product stays in 16 bits, as in SwitchBack (arXiv 2304.13013) and MaxText.
    "int8": Precision(jnp.int8, jnp.int8, False),
}
# `model.matmul` → dtype to which only the weights are rounded. The product itself is in `model.compute_dtype`.
ROUNDED_WEIGHTS = {"int8_weights": jnp.int8, "int4_weights": jnp.int4}
GROUP = 128  # In int4, this many consecutive input weights of an output share a scale.


def quantize(
    x: jax.Array, axes: tuple[int, ...], dtype: Any, largest_x: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Round `x` to numbers of `dtype` times a float32 scale. Return both. The scale has size 1 along `axes`.

    If a number in `x` is not finite, its scale is not finite either, so products show it. If the scalar `largest_x` is
    given, the scale is static, and larger magnitudes are clipped.
    """
    info = (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype)
    largest, x = float(info.max), x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / largest
    if largest_x is not None:
        scale = jnp.full_like(scale, largest_x / largest)
    # Clip, because a subnormal scale has few digits, and the quotient may exceed the dtype's largest number.
    codes = jnp.clip(x / jnp.where(scale > 0, scale, 1), -largest, largest)
    return (jnp.round(codes) if jnp.issubdtype(dtype, jnp.integer) else codes).astype(dtype), scale


def group_size(inputs: int, dtype: Any) -> int:
    """Return how many consecutive input weights of an output share a scale.

    In int8, all of them. In int4, `GROUP`, or fewer if `GROUP` does not divide the number of inputs.
    """
    return math.gcd(inputs, GROUP) if dtype == jnp.int4 else inputs


def groups_of(weight: jax.Array, inputs: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Quantise a weight `[inputs…, outputs…]` to numbers `[groups, inputs per group, outputs…]` and their scales.

    `inputs` is the number of input axes of the weight.
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
    """Quantise and dequantise a weight. The result is float32, and gradients pass through the rounding unchanged."""
    codes, scale = groups_of(weight, inputs, dtype)
    spec = jax.typeof(weight).sharding.spec if is_explicit_mesh() else None
    of_inputs = None if spec is None else P(*[None] * inputs, *spec[inputs:])
    rounded = jnp.reshape(codes.astype(jnp.float32) * scale, weight.shape, out_sharding=of_inputs)
    rounded = rounded if spec is None else jax.sharding.reshard(rounded, spec)
    # Straight-through estimator (arXiv 1308.3432): the difference is 0, and only `weight` has a gradient.
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
    """Round the operands to `dtypes` and return `jnp.einsum(subscripts, left, right)` in float32 with this sharding.

    The result must have the axes of `left` and then those of `right`, without the contracted axes. If `largest_left`,
    the largest magnitude of `left`, is given, the scale of `left` is static.
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
    rows = left.ndim - len(shared)  # Number of axes in the result that come from `left`.
    left_scale = jnp.expand_dims(jnp.squeeze(left_scale, in_left), tuple(range(rows, out.ndim)))
    right_scale = jnp.expand_dims(jnp.squeeze(right_scale, in_right), tuple(range(rows)))
    return out.astype(jnp.float32) * _shard_scale(left_scale, sharding) * _shard_scale(right_scale, sharding)


def _shard_scale(scale: jax.Array, sharding: P | jax.NamedSharding) -> jax.Array:
    """Shard a scale along its axes like the array that it multiplies."""
    if not is_explicit_mesh():
        return scale
    spec = sharding.spec if isinstance(sharding, jax.NamedSharding) else sharding
    # The spec may be shorter than the axes: it is empty for `Inferred` and for weights created without a mesh.
    axes = [*spec, *[None] * (scale.ndim - len(spec))]
    return jax.sharding.reshard(
        scale, P(*(axis if size > 1 else None for axis, size in zip(axes, scale.shape, strict=True)))
    )
