"""Global batches from a token store, in an order that one integer continues.

Row i is tokens[iT : iT + T] with the tokens one later as targets. Rows are shuffled anew each epoch; update n reads
examples nB … nB + B - 1 of that sequence and each process the rows of them that its devices hold, so the order depends
neither on the number of processes nor on the mesh. grain does the shuffling and the prefetching.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np

from difftx.data.corpora import TokenStore
from difftx.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows to learn from or to score, `[B, T]` each: numpy on a host, or sharded jax arrays."""

    tokens_BT: Any  # int32
    targets_BT: Any  # int32: the token after each.
    loss_mask_BT: Any  # float32: 1 where the target counts.
    segment_ids_BT: Any = None  # int32: document within the row; None: attention over the whole row.
    positions_BT: Any = None  # int32: position within the document; None: within the row.


class Rows:
    """A random-access source of rows for grain."""

    def __init__(self, store: TokenStore, sequence_length: int):
        self.store, self.sequence_length = store, sequence_length

    def __len__(self) -> int:
        return (len(self.store) - 1) // self.sequence_length  # The last row needs one more token as a target.

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.sequence_length
        return self.store.tokens[start : start + self.sequence_length + 1].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class HostSlice:
    """The examples of `rows_here` out of batches of `rows`: what one process loads."""

    examples: grain.MapDataset[np.ndarray]
    rows: int
    rows_here: np.ndarray  # Ascending.

    def __len__(self) -> int:
        return len(self.examples) // self.rows * len(self.rows_here)

    def __getitem__(self, index: int) -> np.ndarray:
        batch, row = divmod(index, len(self.rows_here))
        example = self.examples[batch * self.rows + int(self.rows_here[row])]
        assert example is not None  # grain drops elements only where a filter says so.
        return example


class Loader:
    """An endless iterator of sharded batches. Its state is the number of examples consumed."""

    def __init__(
        self,
        store: TokenStore,
        *,
        sequence_length: int,
        rows: int,
        seed: int,
        prefetch_batches: int,
        sharding: jax.sharding.NamedSharding,
        signature: dict[str, Any],
    ):
        """Start at the first example.

        Args:
            store: the tokens.
            sequence_length: tokens a row.
            rows: rows of a batch, over all processes.
            seed: order of the rows.
            prefetch_batches: batches prepared ahead, in a thread.
            sharding: of a `[rows, sequence_length]` array.
            signature: what the meaning of the state depends on besides these; compared on `restore`.
        """
        examples = grain.MapDataset.source(Rows(store, sequence_length)).shuffle(seed=seed).repeat()
        slice_ = HostSlice(examples, rows, rows_here(sharding, rows))
        batches = grain.MapDataset.source(slice_).batch(len(slice_.rows_here))
        self._iterator = iter(batches.to_iter_dataset(grain.ReadOptions(1, prefetch_batches)))
        self._rows, self._sharding = rows, sharding
        self._signature = {**signature, "sequence_length": sequence_length, "seed": seed}
        self._examples = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = make_batch(next(self._iterator), self._rows, self._sharding)
        self._examples += self._rows
        return batch

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON."""
        return {"examples": self._examples, "signature": self._signature}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the examples of `state`.

        Raises:
            UserError: the state was made from other data, another tokenizer, row length or seed.
        """
        theirs = state["signature"]
        for name in self._signature | theirs:
            if theirs.get(name) != self._signature.get(name):
                raise UserError(
                    f"the checkpoint was made with {name} = {theirs.get(name)!r}, this run has "
                    f"{self._signature.get(name)!r}; restore the old value, or start a new --workdir"
                )
        batches, rest = divmod(state["examples"], self._rows)
        if rest:
            raise UserError(
                f"train.global_batch_tokens: the checkpoint's {state['examples']} examples are not a whole "
                f"number of batches of {self._rows} rows; use the old batch, or one that divides it"
            )
        self._iterator.set_state({"next_index": batches})
        self._examples = state["examples"]


def rows_here(sharding: jax.sharding.NamedSharding, rows: int) -> np.ndarray:
    """Return which of a batch's `rows` the devices of this process hold, ascending.

    They need be neither contiguous nor this process's alone: a mesh follows the wires of a pod, not its hosts.
    """
    indices = sharding.addressable_devices_indices_map((rows, sharding.mesh.shape["context"])).values()
    return np.unique(np.concatenate([np.arange(rows)[index[0]] for index in indices if index is not None]))


def make_batch(
    tokens_here: np.ndarray, rows: int, sharding: jax.sharding.NamedSharding, counted: np.ndarray | None = None
) -> Batch:
    """Turn the `[rows_here, T + 1]` tokens of this process into a global batch of `rows` rows.

    `counted[i]` = False masks row i of those here: filler.
    """
    mask = np.ones(tokens_here[:, 1:].shape, np.float32)
    if counted is not None:
        mask *= counted[:, None]
    here = rows_here(sharding, rows)

    def placed(x_here: np.ndarray) -> jax.Array:
        def on_device(index: tuple[slice, ...]) -> np.ndarray:
            return x_here[np.searchsorted(here, np.arange(rows)[index[0]]), index[1]]

        return jax.make_array_from_callback((rows, x_here.shape[1]), sharding, on_device)

    return Batch(
        tokens_BT=placed(tokens_here[:, :-1]), targets_BT=placed(tokens_here[:, 1:]), loss_mask_BT=placed(mask)
    )


def ordered_batches(
    store: TokenStore,
    *,
    sequence_length: int,
    rows: int,
    limit_tokens: int,
    sharding: jax.sharding.NamedSharding,
) -> Iterator[Batch]:
    """Yield a store's first `limit_tokens` tokens in order, once; the last batch is filled up with masked rows."""
    source = Rows(store, sequence_length)
    wanted = ordered_rows(store, sequence_length, limit_tokens)
    here = rows_here(sharding, rows)
    for start in range(0, wanted, rows):
        indices = start + here
        tokens_here = np.stack([source[min(int(i), wanted - 1)] for i in indices])
        yield make_batch(tokens_here, rows, sharding, indices < wanted)


def ordered_rows(store: TokenStore, sequence_length: int, limit_tokens: int) -> int:
    """Return how many rows `ordered_batches` counts; their targets are tokens 1 … rows × sequence_length."""
    return min(len(Rows(store, sequence_length)), max(1, limit_tokens // sequence_length))
