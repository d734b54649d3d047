"""Global batches out of an endless sequence of examples, whose order one integer continues.

Update n reads examples nB … nB + B - 1 and each process the rows of them that its devices hold, so the order depends
neither on the number of processes nor on the mesh. grain does the shuffling (`sources.py`) and the prefetching.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np

from difftx.data.packing import Row, RowSource
from difftx.errors import UserError, shown


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows to learn from or to score, `[B, T]` each: numpy on a host, or sharded jax arrays."""

    tokens_BT: Any  # int32
    targets_BT: Any  # int32: the token after each.
    loss_mask_BT: Any  # float32: 1 where the target counts.
    segment_ids_BT: Any = None  # int32: piece of a document, 0 for padding; None: attention over the whole row.
    positions_BT: Any = None  # int32: place in the document's piece in the row; None: in the row.


@dataclasses.dataclass(frozen=True)
class HostSlice:
    """The examples of `rows_here` out of batches of `rows`: what one process loads."""

    examples: Any  # Random access: a grain.MapDataset or a Mixture.
    rows: int
    rows_here: np.ndarray  # Ascending.

    def __len__(self) -> int:
        # Without end is sys.maxsize, and grain adds to it: a half does where a batch is one row.
        return min(len(self.examples) // self.rows * len(self.rows_here), sys.maxsize // 2)

    def __getitem__(self, index: int) -> Row:
        batch, row = divmod(index, len(self.rows_here))
        example = self.examples[batch * self.rows + int(self.rows_here[row])]
        assert example is not None  # grain drops elements only where a filter says so.
        return example


class Loader:
    """An endless iterator of sharded batches. Its state is the number of examples consumed."""

    def __init__(
        self,
        examples: Any,
        *,
        rows: int,
        prefetch_batches: int,
        sharding: jax.sharding.NamedSharding,
        signature: dict[str, Any],
        vocab_size: int,
        where: Callable[[int], str],
    ):
        """Start at the first example.

        Args:
            examples: rows by number, without end: `Sources.examples`.
            rows: rows of a batch, over all processes.
            prefetch_batches: batches prepared ahead, in a thread.
            sharding: of a `[rows, T]` array.
            signature: what the meaning of the state depends on, as JSON; compared on `restore`.
            vocab_size: of the model; every id of every batch is compared with it.
            where: returns where an example comes from, for messages: `Sources.where`.
        """
        self._rows_here = rows_here(sharding, rows)
        self._iterator = host_batches(HostSlice(examples, rows, self._rows_here), prefetch_batches)
        self._rows, self._sharding, self._signature = rows, sharding, signature
        self._vocab_size, self._where = vocab_size, where
        self._examples = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = next(self._iterator)
        check_ids(rows, self._vocab_size, lambda row: self._where(self._examples + int(self._rows_here[row])))
        batch = make_batch(rows, self._rows, self._sharding)
        self._examples += self._rows
        return batch

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON."""
        return {"examples": self._examples, "signature": self._signature}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the examples of `state`.

        Raises:
            UserError: the state was made from other data, or rows, or in another order; names each difference.
        """
        if changes := signature_changes(state["signature"], self._signature):
            raise UserError(
                f"the checkpoint was made with other data: {', '.join(changes)}; restore what changed, "
                "or start a new --workdir"
            )
        batches, rest = divmod(state["examples"], self._rows)
        if rest:
            raise UserError(
                f"train.global_batch_tokens: the checkpoint's {state['examples']} examples are not a whole "
                f"number of batches of {self._rows} rows; use the old batch, or one that divides it"
            )
        self._iterator.set_state({"next_index": batches})
        self._examples = state["examples"]


def signature_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return "name old → new" for each part of a loader's signature that differs."""
    return [
        f"{name} {shown(old.get(name))} → {shown(new.get(name))}"
        for name in old | new
        if old.get(name) != new.get(name)
    ]


def host_batches(examples: HostSlice, prefetch: int) -> grain.DatasetIterator[Row]:
    """Return one process's rows of each batch, stacked, made ahead in a thread; its state is {"next_index": batch}."""
    batches = grain.MapDataset.source(examples).batch(len(examples.rows_here))
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))


def rows_here(sharding: jax.sharding.NamedSharding, rows: int) -> np.ndarray:
    """Return which of a batch's `rows` the devices of this process hold, ascending.

    They need be neither contiguous nor this process's alone: a mesh follows the wires of a pod, not its hosts.
    """
    indices = sharding.addressable_devices_indices_map((rows, sharding.mesh.shape["context"])).values()
    return np.unique(np.concatenate([np.arange(rows)[index[0]] for index in indices if index is not None]))


def check_ids(rows: Row, vocab_size: int, where: Callable[[int], str]) -> None:
    """Raise `UserError` for a token or target, of `[rows, T]` each, that is not one of the model's ids.

    The model itself would not notice: lookups on a device clamp an index, or return zeros.

    Args:
        rows: of this process.
        vocab_size: of the model; its ids are 0 … vocab_size - 1.
        where: returns where a row, by its index here, comes from.
    """
    for name in ("tokens", "targets"):
        ids = rows[name]
        if ids.min() < 0 or ids.max() >= vocab_size:
            row, at = (int(index[0]) for index in np.nonzero((ids < 0) | (ids >= vocab_size)))
            value = int(ids[row, at])
            unsigned = f" ({value % 2**32} as uint32)" if value < 0 else ""
            raise UserError(
                f"{where(row)}: {name}[{at}] is id {value}{unsigned}, which model.vocab_size={vocab_size} does not "
                "have; restore the data, or prepare it again with the tokenizer of data.tokenizer"
            )


def make_batch(
    rows_of_process: Row, rows: int, sharding: jax.sharding.NamedSharding, counted: np.ndarray | None = None
) -> Batch:
    """Turn the `[rows_here, T]` arrays of this process into a global batch of `rows` rows.

    `counted[i]` = False masks row i of those here: filler.
    """
    here = rows_here(sharding, rows)

    def placed(x_here: np.ndarray) -> jax.Array:
        def on_device(index: Any) -> np.ndarray:  # Slices of rows and of tokens.
            return x_here[np.searchsorted(here, np.arange(rows)[index[0]]), index[1]]

        return jax.make_array_from_callback((rows, x_here.shape[1]), sharding, on_device)

    if counted is not None:
        rows_of_process = rows_of_process | {"loss_mask": rows_of_process["loss_mask"] * counted[:, None]}
    return Batch(**{f"{name}_BT": placed(x_here) for name, x_here in rows_of_process.items()})


def ordered_batches(
    source: RowSource,
    *,
    rows: int,
    limit_tokens: int,
    sharding: jax.sharding.NamedSharding,
    vocab_size: int,
) -> Iterator[Batch]:
    """Yield a source's first rows in order, once; the last batch is filled up with masked rows.

    Raises:
        UserError: an id of a row is not below `vocab_size`, the model's.
    """
    wanted = ordered_rows(source, limit_tokens)
    here = rows_here(sharding, rows)
    for start in range(0, wanted, rows):
        indices = start + here
        examples = [source[min(int(i), wanted - 1)] for i in indices]
        stacked = {name: np.stack([example[name] for example in examples]) for name in examples[0]}
        check_ids(stacked, vocab_size, lambda row, at=indices: f"{source.name}: row {min(int(at[row]), wanted - 1)}")
        yield make_batch(stacked, rows, sharding, (indices < wanted).astype(np.float32))


def ordered_rows(source: RowSource, limit_tokens: int) -> int:
    """Return how many rows `ordered_batches` counts."""
    return min(len(source), max(1, limit_tokens // source.sequence_length))
