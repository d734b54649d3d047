"""Context parallelism: rows that are cut along their tokens over a mesh axis.

Each device keeps its queries and gathers the keys and values of whole rows, for as long as a layer attends. Gathered
they stand in the order of the text; the queries stand in it too, or in zig-zag order, in which device i of n has chunks
i and 2n - 1 - i of a row's 2n (arXiv 2407.21783, §3.3.2), so that causality leaves every device as much to do.
"""
#   B = batch, T = a device's tokens of a row, S = a row's tokens, N = pieces of a row, C = tokens of a piece

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Cut:
    """How rows are cut; except `of`, its methods that take arrays are for inside of `jax.shard_map`."""

    axis: str  # Of the mesh.
    devices: int
    zigzag: bool

    @classmethod
    def of(cls, x_BT: jax.Array, *, zigzag: bool) -> "Cut | None":
        """Return how the rows of an array `[B, T, …]` are cut, as its type says; None: they are whole."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or not mesh.are_all_axes_explicit:
            return None
        axis = jax.typeof(x_BT).sharding.spec[1]
        return None if axis is None or mesh.shape[axis] == 1 else cls(axis, mesh.shape[axis], zigzag)

    @property
    def chunks(self) -> int:
        """Pieces of a row that a device has."""
        return 2 if self.zigzag else 1

    def starts[Index: (int, jax.Array)](self, device: Index, chunk_tokens: int) -> tuple[Index, ...]:
        """Return where in the row a device's chunks start, in the order in which it has them."""
        if not self.zigzag:
            return (device * chunk_tokens,)
        return device * chunk_tokens, (2 * self.devices - 1 - device) * chunk_tokens

    def device(self) -> jax.Array:
        """Return this device's number."""
        return jax.lax.axis_index(self.axis)

    def positions(self, tokens: int) -> jax.Array:
        """Return where in the row this device's tokens stand, int32 `[T]`."""
        chunk_tokens = tokens // self.chunks
        starts = jnp.stack(self.starts(self.device(), chunk_tokens))
        return (starts[:, None] + jnp.arange(chunk_tokens)[None]).reshape(tokens)

    def gather(self, x_BT: jax.Array) -> jax.Array:
        """Return `[B, S, …]` of all devices' `[B, T, …]`, in the order of the text. JAX transposes it to its sums."""
        pieces_NBC = jax.lax.all_gather(x_BT, self.axis)
        if self.zigzag:
            half = x_BT.shape[1] // 2
            pieces_NBC = jnp.concatenate([pieces_NBC[:, :, :half], pieces_NBC[::-1, :, half:]])
        return jnp.moveaxis(pieces_NBC, 0, 1).reshape(x_BT.shape[0], -1, *x_BT.shape[2:])

    def scatter(self, x_BS: jax.Array) -> jax.Array:
        """Return this device's `[B, T, …]` of the sum of all devices' `[B, S, …]`: the transpose of `gather`."""
        B, S, *rest = x_BS.shape
        local = jax.ShapeDtypeStruct((B, S // self.devices, *rest), x_BS.dtype)
        return jax.linear_transpose(self.gather, local)(x_BS)[0]

    def to_zigzag(self, x_BT: jax.Array) -> jax.Array:
        """Return this device's tokens in zig-zag order, where it had those of the text's."""
        even_BC, odd_BC = (
            jax.lax.ppermute(piece_BC, self.axis, self._moves(parity))
            for parity, piece_BC in enumerate(jnp.split(x_BT, 2, axis=1))
        )
        # Of its two chunks, i and 2n - 1 - i, one is even and the other odd.
        is_even = self.device() % 2 == 0
        first_BC, second_BC = jnp.where(is_even, even_BC, odd_BC), jnp.where(is_even, odd_BC, even_BC)
        return jnp.concatenate([first_BC, second_BC], axis=1)

    def from_zigzag(self, x_BT: jax.Array) -> jax.Array:
        """Undo `to_zigzag`."""
        first_BC, second_BC = jnp.split(x_BT, 2, axis=1)
        is_even = self.device() % 2 == 0
        pieces = jnp.where(is_even, first_BC, second_BC), jnp.where(is_even, second_BC, first_BC)
        back = [
            jax.lax.ppermute(piece_BC, self.axis, [(there, here) for here, there in self._moves(parity)])
            for parity, piece_BC in enumerate(pieces)
        ]
        return jnp.concatenate(back, axis=1)

    def _moves(self, parity: int) -> list[tuple[int, int]]:
        """Return where each device's even or odd chunk, 2i or 2i + 1, has its place in zig-zag order."""
        n = self.devices
        return [(i, min(2 * i + parity, 2 * n - 1 - 2 * i - parity)) for i in range(n)]


def to_zigzag(x_BT: jax.Array) -> jax.Array:
    """Return an array `[B, T, …]` with its tokens in zig-zag order, where they are cut; outside of `shard_map`."""
    return _reordered(x_BT, Cut.to_zigzag)


def from_zigzag(x_BT: jax.Array) -> jax.Array:
    """Undo `to_zigzag`."""
    return _reordered(x_BT, Cut.from_zigzag)


def _reordered(x_BT: jax.Array, order: Callable[[Cut, jax.Array], jax.Array]) -> jax.Array:
    cut = Cut.of(x_BT, zigzag=True)
    if cut is None:
        return x_BT
    spec = jax.typeof(x_BT).sharding.spec
    return jax.shard_map(functools.partial(order, cut), in_specs=spec, out_specs=spec, check_vma=False)(x_BT)


def with_whole_keys(call: Callable[..., Any], cut: Cut | None) -> Callable[..., Any]:
    """Return a function of a device's queries, keys and values that calls with keys and values of whole rows.

    Two-dimensional arguments, segment ids, are those of whole rows too; `call` is given the cut as `cut`.
    """
    if cut is None:
        return call

    def local(q_BT: jax.Array, k_BT: jax.Array, v_BT: jax.Array, *others: Any) -> Any:
        whole = (cut.gather(x) if isinstance(x, jax.Array) and x.ndim == 2 else x for x in others)
        return call(q_BT, cut.gather(k_BT), cut.gather(v_BT), *whole, cut=cut)

    return local
