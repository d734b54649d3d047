"""Global batches from an endless sequence of examples, resumable from one integer.

Batch n of B rows consists of examples n·B to n·B + B - 1, for every mesh and every number of processes. Each process
reads only the rows that its devices hold.
"""

import concurrent.futures
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
import jax
import numpy as np

from difftx.data.mixture import begun
from difftx.data.packing import Row, Rows, RowSource
from difftx.errors import UserError, shown


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows to train on or to score. All fields are numpy arrays or sharded jax arrays of shape `[B, T]`."""

    tokens_BT: Any  # int32
    targets_BT: Any  # int32. The next token, or the answer of a synthetic task.
    loss_mask_BT: Any  # float32. 1 where the target counts in the loss, else 0.
    segment_ids_BT: Any = None  # int32. 1, 2, … for the documents of a row, 0 for padding. None: one document.
    positions_BT: Any = None  # int32. Position of each token in its document. None: position in the row.
    is_real_BT: Any = None  # bool. False for padding, and for rows that fill a batch. None in batches to train on.


@dataclasses.dataclass(frozen=True)
class HostSlice:
    """The rows that one process loads, as a data source for grain."""

    examples: Any  # Rows with random access: a grain.MapDataset, a Shuffled or a Mixture.
    batch_rows: int  # Number of rows in a global batch.
    rows_here: np.ndarray  # Indices of this process's rows in a global batch, ascending.

    def __len__(self) -> int:
        # The length of endless examples is sys.maxsize. Half of it leaves room for what grain adds to a length.
        return min(len(self.examples) // self.batch_rows * len(self.rows_here), sys.maxsize // 2)

    def __getitem__(self, index: int) -> Row:
        batch, row = divmod(index, len(self.rows_here))
        return self.examples[batch * self.batch_rows + int(self.rows_here[row])]


class Loader(Iterator[Batch]):
    """An endless iterator of sharded batches. Its state is the number of examples consumed, and of their tokens.

    `examples`, `signature` and `where` are those of `Sources`, and `sharding` is that of the `[B, T]` arrays.
    `threads` rows are read at a time.
    """

    def __init__(
        self,
        examples: Any,
        *,
        batch_rows: int,
        prefetch_batches: int,
        threads: int = 1,
        sharding: jax.sharding.NamedSharding,
        signature: dict[str, Any],
        vocab_size: int,
        where: Callable[[int], str],
    ):
        self._rows_here = rows_here(sharding, batch_rows)
        self._source = HostSlice(examples, batch_rows, self._rows_here)
        self._iterator = host_batches(self._source, prefetch_batches, threads)
        self._batch_rows, self._sharding, self._signature = batch_rows, sharding, signature
        self._vocab_size, self._where = vocab_size, where
        self._consumed = 0  # Number of examples, including those that a rewind skips.
        self.tokens = 0  # Number of tokens in all batches of the run so far, padding included.

    def __next__(self) -> Batch:
        rows = next(self._iterator)
        check_ids(rows, self._vocab_size, lambda row: self._where(self._consumed + int(self._rows_here[row])))
        batch = make_batch(rows, self._batch_rows, self._sharding)
        self._consumed += self._batch_rows
        self.tokens += batch.tokens_BT.size
        return batch

    def abstract_batch(self) -> Batch:
        def abstract(x_T: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self._batch_rows, *x_T.shape), x_T.dtype, sharding=self._sharding)

        return Batch(**{f"{name}_BT": abstract(x_T) for name, x_T in self._source[0].items()})

    def state(self) -> dict[str, Any]:
        return {"examples": self._consumed, "tokens": self.tokens, "signature": self._signature}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the examples consumed when `state` was saved. Raise `UserError` if the data are different."""
        if changes := signature_changes(*(begun(s, state["examples"]) for s in (state["signature"], self._signature))):
            raise UserError(
                f"the checkpoint was made with other data: {', '.join(changes)}; restore what changed, "
                "or start a new --workdir"
            )
        batches, rest = divmod(state["examples"], self._batch_rows)
        if rest:
            raise UserError(
                f"train.global_batch_tokens: the checkpoint's {state['examples']} examples are not a whole "
                f"number of batches of {self._batch_rows} rows; use the old batch, or one that divides it"
            )
        self._iterator.set_state({"next_index": batches})
        self._consumed, self.tokens = state["examples"], state["tokens"]


def signature_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a text "name old → new" for each entry that differs between the signatures of two loaders."""
    pairs = {name: (old.get(name), new.get(name)) for name in old | new}
    return [f"{name} {shown(before)} → {shown(after)}" for name, (before, after) in pairs.items() if before != after]


class ConcurrentBatches:
    """The batches of a `HostSlice`, each read by several threads, as a data source for grain."""

    def __init__(self, source: HostSlice, threads: int):
        self._source, self._rows_per_batch = source, len(source.rows_here)
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "difftx rows")

    def __len__(self) -> int:
        return len(self._source) // self._rows_per_batch

    def __getitem__(self, index: int) -> Rows:
        start = index * self._rows_per_batch
        return stacked(self._pool.map(self._source.__getitem__, range(start, start + self._rows_per_batch)))


def host_batches(source: HostSlice, prefetch: int, threads: int = 1) -> grain.DatasetIterator[Rows]:
    """Return an iterator of batches with the rows of one process. A thread reads `prefetch` batches ahead."""
    if threads > 1:
        batches = grain.MapDataset.source(ConcurrentBatches(source, threads))
    else:
        batches = grain.MapDataset.source(source).batch(len(source.rows_here))
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))


def stacked(rows: Iterable[Row]) -> Rows:
    """Return arrays with an axis of rows before that of tokens."""
    rows = list(rows)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def rows_here(sharding: jax.sharding.NamedSharding, batch_rows: int) -> np.ndarray:
    """Return the indices, in ascending order, of the rows of a global batch that this process's devices hold."""
    # The indices may have gaps, and several processes may hold the same row, because the mesh follows the interconnect
    # of a pod and not the boundaries of its hosts.
    indices = sharding.addressable_devices_indices_map((batch_rows, sharding.mesh.shape["context"])).values()
    return np.unique(np.concatenate([np.arange(batch_rows)[index[0]] for index in indices if index is not None]))


def check_ids(rows: Rows, vocab_size: int, where: Callable[[int], str]) -> None:
    """Raise `UserError` if a token or target is not in the vocabulary. `where(row)` describes the origin of a row."""
    # The model itself would not fail, because lookups on a device clamp an invalid index or return zeros.
    for name in ("tokens", "targets"):
        ids = rows[name]
        if len(invalid := np.argwhere((ids < 0) | (ids >= vocab_size))):
            row, position = invalid[0].tolist()
            value = int(ids[row, position])
            unsigned = f" ({value % 2**32} as uint32)" if value < 0 else ""
            raise UserError(
                f"{where(row)}: {name}[{position}] is id {value}{unsigned}, which model.vocab_size={vocab_size} does "
                "not have; restore the data, or prepare it again with the tokenizer of data.tokenizer"
            )


def make_batch(rows_of_process: Rows, batch_rows: int, sharding: jax.sharding.NamedSharding) -> Batch:
    """Make a global batch of `batch_rows` rows. `rows_of_process` holds this process's rows (`rows_here`)."""
    here = rows_here(sharding, batch_rows)

    def global_array(x_here: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:  # `index` has a slice of the rows and a slice of the tokens.
            return x_here[np.searchsorted(here, np.arange(batch_rows)[index[0]]), index[1]]

        return jax.make_array_from_callback((batch_rows, x_here.shape[1]), sharding, shard)

    return Batch(**{f"{name}_BT": global_array(x_here) for name, x_here in rows_of_process.items()})


def ordered_batches(
    source: RowSource, *, batch_rows: int, limit_tokens: int, sharding: jax.sharding.NamedSharding, vocab_size: int
) -> Iterator[Batch]:
    """Yield the first `limit_tokens` tokens of a source as batches. Rows with a loss mask of 0 pad the last batch."""
    total = ordered_rows(source, limit_tokens)
    here = rows_here(sharding, batch_rows)
    with concurrent.futures.ThreadPoolExecutor(source.threads) as pool:
        for start in range(0, total, batch_rows):
            indices = np.minimum(start + here, total - 1).tolist()  # Copies of the last row serve as padding.
            rows = stacked((pool.map if source.threads > 1 else map)(source.__getitem__, indices))
            check_ids(rows, vocab_size, lambda row, indices=indices: f"{source.name}: row {indices[row]}")
            is_filler = start + here >= total
            rows["loss_mask"][is_filler] = 0
            row_tokens = np.where(is_filler, 0, [source.row_tokens(index) for index in indices])
            rows["is_real"] = np.arange(source.sequence_length) < row_tokens[:, None]
            yield make_batch(rows, batch_rows, sharding)


def ordered_rows(source: RowSource, limit_tokens: int) -> int:
    """Return the number of rows that `ordered_batches` yields, at least 1. Padding rows do not count."""
    return min(len(source), max(1, limit_tokens // source.sequence_length))
