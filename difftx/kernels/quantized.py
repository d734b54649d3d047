"""Quantise vectors to 8 or 4 bits with one scale per vector, for key/value caches and for the inputs of attention.

The scale of a vector is its largest magnitude divided by the largest integer (absmax quantisation). Each token and head
has its own key vector and value vector, so the quantised cache of a token does not depend on other tokens.
"""
# Axes: W = width of a vector, … = all other axes

import dataclasses
import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes_W", "scale_1"), meta_fields=("bits",))
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Vectors `[…, W]` as 8-bit or 4-bit integers with one scale per vector."""

    codes_W: jax.Array  # int8. 8 bits: `[…, W]`. 4 bits: `[…, W / 2]`, where byte i holds the numbers i and W / 2 + i.
    scale_1: jax.Array  # bfloat16 `[…, 1]`.
    bits: int


def quantize(x_W: jax.Array, bits: int) -> Quantized:
    """Round vectors `[…, W]` to `bits` (8 or 4) bits. The error of a number is at most half the vector's scale."""
    levels = 2 ** (bits - 1) - 1
    x_W = x_W.astype(jnp.float32)
    # Round the scale to bfloat16 before dividing by it, so that rounding the scale adds no error.
    scale_1 = (jnp.max(jnp.abs(x_W), axis=-1, keepdims=True) / levels).astype(jnp.bfloat16)
    divisor_1 = jnp.where(scale_1 > 0, scale_1, 1).astype(jnp.float32)
    codes_W = jnp.clip(jnp.round(x_W / divisor_1), -levels, levels).astype(jnp.int8)
    if bits == 4:
        low_W, high_W = jnp.split(codes_W, 2, axis=-1)
        codes_W = (low_W & 15) | (high_W << 4)
    return Quantized(codes_W, scale_1, bits)


def dequantized(x: Quantized | jax.Array) -> jax.Array:
    """Return quantised vectors as float32 `[…, W]`, and arrays unchanged."""
    if not isinstance(x, Quantized):
        return x
    codes_W = x.codes_W
    if x.bits == 4:  # Unpack two numbers per byte. `>>` repeats the sign bit.
        codes_W = jnp.concatenate([(codes_W << 4) >> 4, codes_W >> 4], axis=-1)
    return codes_W.astype(jnp.float32) * x.scale_1.astype(jnp.float32)


def rounded(x_W: jax.Array, bits: int) -> jax.Array:
    """Quantise vectors to `bits` bits and dequantise them to their dtype.

    Gradients pass through unchanged (straight-through estimator, arXiv 1308.3432).
    """
    change_W = dequantized(quantize(x_W, bits)).astype(x_W.dtype) - x_W
    return x_W + jax.lax.stop_gradient(change_W)
