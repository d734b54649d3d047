"""Context parallelism: attention over rows that are split along their tokens over a mesh axis.

Each device keeps its queries. In each layer, it gathers the keys and values of whole rows in text order. The queries
are in text order or in zig-zag order. In zig-zag order, a row has 2n chunks, and device i of n holds chunks i and
2n - 1 - i (arXiv 2407.21783, §3.3.2). Every device then has the same amount of work under a causal mask.
"""
# Axes: B = batch, T = tokens on one device, S = tokens of a whole row, N = chunks of a row, C = tokens of a chunk

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def is_explicit_mesh() -> bool:
    """Return whether all axes of the current mesh are explicit. The types of arrays then contain their shardings."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.are_all_axes_explicit


def automatic_axes(x: jax.Array | jax.ShapeDtypeStruct) -> tuple[str, ...]:
    """Return the mesh axes of size 2 or more along which XLA partitions automatically.

    Use the current mesh, or the mesh of the array `x` if no mesh is set.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and isinstance(x, jax.Array):
        mesh = jax.typeof(x).sharding.mesh
    return tuple(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)


@dataclasses.dataclass(frozen=True)
class SequenceSharding:
    """How rows are sharded along their tokens. Methods with array arguments must run inside `jax.shard_map`."""

    axis: str | tuple[str, ...]  # Mesh axis, or several axes (outermost first), that shard the tokens.
    devices: int  # Number of devices along `axis`, over which a row is split.
    zigzag: bool  # Whether tokens are in zig-zag order.

    @classmethod
    def of(cls, x_BT: jax.Array, *, zigzag: bool) -> "SequenceSharding | None":
        """Return the token sharding of an array `[B, T, …]`, or None if each device holds whole rows.

        Call this method outside `jax.shard_map`, where the array's type contains its sharding. Raise `ValueError` if
        the array's type has a mesh with explicit axes but no mesh is set.
        """
        if not is_explicit_mesh():
            explicit = jax.typeof(x_BT).sharding.mesh.explicit_axes
            if explicit and jax.sharding.get_abstract_mesh().empty:
                axes = ", ".join(map(repr, explicit))
                raise ValueError(f"q lies on a mesh with the explicit axes {axes}; set this mesh by jax.set_mesh(mesh)")
            return None
        axis, shape = jax.typeof(x_BT).sharding.spec[1], jax.sharding.get_abstract_mesh().shape
        axes = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
        devices = math.prod(shape[name] for name in axes)
        return None if devices == 1 else cls(axis, devices, zigzag)

    @property
    def chunks(self) -> int:
        """Number of contiguous chunks of a row on each device."""
        return 2 if self.zigzag else 1

    @property
    def row_chunks(self) -> int:
        """Number of contiguous chunks of a row on all devices."""
        return self.devices * self.chunks

    def starts[Index: (int, jax.Array)](self, device: Index, chunk_tokens: int) -> tuple[Index, ...]:
        """Return the position in the row where each chunk of a device starts."""
        if not self.zigzag:
            return (device * chunk_tokens,)
        return device * chunk_tokens, (2 * self.devices - 1 - device) * chunk_tokens

    def device(self) -> jax.Array:
        return jax.lax.axis_index(self.axis)

    def positions(self, tokens: int) -> jax.Array:
        """Return the row positions of this device's tokens, int32 `[T]`."""
        chunk_tokens = tokens // self.chunks
        starts = jnp.stack(self.starts(self.device(), chunk_tokens))
        return (starts[:, None] + jnp.arange(chunk_tokens)[None]).reshape(tokens)

    def gather(self, x_BT: jax.Array) -> jax.Array:
        """Gather the shards `[B, T, …]` of all devices to whole rows `[B, S, …]` in text order."""
        chunks_NBC = jax.lax.all_gather(x_BT, self.axis)
        if self.zigzag:
            half = x_BT.shape[1] // 2
            chunks_NBC = jnp.concatenate([chunks_NBC[:, :, :half], chunks_NBC[::-1, :, half:]])
        return jnp.moveaxis(chunks_NBC, 0, 1).reshape(x_BT.shape[0], -1, *x_BT.shape[2:])

    def scatter(self, x_BS: jax.Array) -> jax.Array:
        """Reduce-scatter: sum `[B, S, …]` over all devices and return this device's shard `[B, T, …]`."""
        B, S, *rest = x_BS.shape
        local = jax.ShapeDtypeStruct((B, S // self.devices, *rest), x_BS.dtype)
        return jax.linear_transpose(self.gather, local)(x_BS)[0]

    def to_zigzag(self, x_BT: jax.Array) -> jax.Array:
        """Move tokens between devices from text order to zig-zag order. Return this device's new shard `[B, T, …]`."""
        even_and_odd = [
            jax.lax.ppermute(chunk_BC, self.axis, self._moves(parity))
            for parity, chunk_BC in enumerate(jnp.split(x_BT, 2, axis=1))
        ]
        return jnp.concatenate(self._swapped_on_odd_devices(*even_and_odd), axis=1)

    def from_zigzag(self, x_BT: jax.Array) -> jax.Array:
        """Move tokens between devices from zig-zag order back to text order, the inverse of `to_zigzag`."""
        even_and_odd = self._swapped_on_odd_devices(*jnp.split(x_BT, 2, axis=1))
        back = [
            jax.lax.ppermute(chunk_BC, self.axis, [(there, here) for here, there in self._moves(parity)])
            for parity, chunk_BC in enumerate(even_and_odd)
        ]
        return jnp.concatenate(back, axis=1)

    def _swapped_on_odd_devices(self, a_BC: jax.Array, b_BC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Swap the two chunks on odd devices, so that the even-numbered chunk comes first. Its own inverse."""
        is_even = self.device() % 2 == 0
        return jnp.where(is_even, a_BC, b_BC), jnp.where(is_even, b_BC, a_BC)

    def _moves(self, parity: int) -> list[tuple[int, int]]:
        """Return pairs (i, j): chunk 2i + `parity` moves from device i (text order) to device j (zig-zag order)."""
        n = self.devices
        return [(i, min(2 * i + parity, 2 * n - 1 - 2 * i - parity)) for i in range(n)]


def to_zigzag(x_BT: jax.Array) -> jax.Array:
    """Move the tokens of `[B, T, …]` to zig-zag order if they are sharded. If not, return the array unchanged."""
    return _reordered(x_BT, SequenceSharding.to_zigzag)


def from_zigzag(x_BT: jax.Array) -> jax.Array:
    """Move the tokens of `[B, T, …]` back to text order, the inverse of `to_zigzag`."""
    return _reordered(x_BT, SequenceSharding.from_zigzag)


def _reordered(x_BT: jax.Array, order: Callable[[SequenceSharding, jax.Array], jax.Array]) -> jax.Array:
    sharding = SequenceSharding.of(x_BT, zigzag=True)
    if sharding is None:
        return x_BT
    spec = jax.typeof(x_BT).sharding.spec
    return jax.shard_map(functools.partial(order, sharding), in_specs=spec, out_specs=spec, check_vma=False)(x_BT)


def with_whole_keys(call: Callable[..., Any], sharding: SequenceSharding) -> Callable[..., Any]:
    """Wrap `call` so that it receives the keys, values and segment ids (2-D arguments) of whole rows."""

    def local(q_BT: jax.Array, k_BT: jax.Array, v_BT: jax.Array, *others: Any) -> Any:
        whole = (sharding.gather(x) if isinstance(x, jax.Array) and x.ndim == 2 else x for x in others)
        return call(q_BT, sharding.gather(k_BT), sharding.gather(v_BT), *whole, sharding=sharding)

    return local
