"""A weight with a low-rank adapter (LoRA, arXiv 2106.09685)."""

import dataclasses
import functools
import string
from typing import Any

import jax
import jax.numpy as jnp

LORA = "lora"  # Key of the adapters in the parameter tree.


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight W with an adapter A B. `layers.linear` computes x W + x A B. Other code uses the merged W + A B."""

    weight: jax.Array  # Axes: layers (if stacked), inputs, outputs.
    a: jax.Array  # Axes: layers, inputs, rank.
    b: jax.Array  # Axes: layers, rank, outputs.
    scale: float

    def astype(self, dtype: Any) -> jax.Array:
        """Return the merged weight W + A B in a dtype, like `jax.Array.astype`."""
        sharding = jax.typeof(self.weight).sharding.spec
        change = jnp.einsum(product_subscripts(self.weight, self.a, self.b), self.a, self.b, out_sharding=sharding)
        return (self.weight + self.scale * change).astype(dtype)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.astype(self.weight.dtype)[index]


def product_subscripts(weight: Any, a: Any, b: Any) -> str:
    """Return the einsum subscripts of the product A B. The arrays may have a leading layer axis."""
    layers, inputs, axes = a.ndim + b.ndim - weight.ndim - 2, a.ndim - 1, string.ascii_uppercase[: weight.ndim]
    return f"{axes[:inputs]}r,{axes[:layers]}r{axes[inputs:]}->{axes}"
