"""Global batches from an endless sequence of examples. The state for resuming is one integer.

Batch n of B rows consists of the examples n·B to n·B + B - 1, for any mesh and any number of processes. Each process
only reads the rows on its own devices.
"""

import concurrent.futures
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
import jax
import numpy as np

from difftx.data.mixture import begun
from difftx.data.packing import Row, Rows, RowSource
from difftx.data.sources import Sources
from difftx.errors import UserError, shown


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows to train on or to evaluate. All fields are numpy arrays or sharded jax arrays of shape `[B, T]`."""

    tokens_BT: Any  # int32
    targets_BT: Any  # int32. The next token, or the answer of a synthetic task.
    loss_mask_BT: Any  # float32. 1 if the target counts in the loss, else 0.
    segment_ids_BT: Any = None  # int32. 1, 2, … for the documents in a row, 0 for padding. None: one document per row.
    positions_BT: Any = None  # int32. Position in the document. None: position in the row.
    is_real_BT: Any = None  # bool. False for padding tokens and filler rows. None in training.


class HostBatches:
    """A data source for grain: the rows of each global batch that this process loads."""

    def __init__(self, examples: Any, batch_rows: int, rows_here: np.ndarray, threads: int = 1):
        """`examples` are endless, with random access. `rows_here` is the result of `rows_of_process`."""
        self._examples, self._batch_rows, self._rows_here = examples, batch_rows, rows_here
        self._read_rows = row_reader(threads)

    def __len__(self) -> int:
        # Endless examples have the length sys.maxsize. Half of it leaves room for what grain adds.
        return min(len(self._examples) // self._batch_rows, sys.maxsize // 2)

    def __getitem__(self, index: int) -> Rows:
        return self._read_rows(self._examples, (index * self._batch_rows + self._rows_here).tolist())

    def iterator(self, prefetch: int) -> grain.DatasetIterator[Rows]:
        """Return an iterator over batches. A thread reads `prefetch` batches ahead."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        return iter(grain.MapDataset.source(self).to_iter_dataset(options))


def row_reader(threads: int) -> Callable[[Any, Iterable[int]], Rows]:
    """Return a function that reads the rows with the given indices, on `threads` threads, and stacks them."""
    # A store on a local disk is read twice as fast without threads.
    map_ = concurrent.futures.ThreadPoolExecutor(threads, "difftx rows").map if threads > 1 else map

    def read(source: Any, indices: Iterable[int]) -> Rows:
        rows: list[Row] = list(map_(source.__getitem__, indices))
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    return read


class Loader(Iterator[Batch]):
    """An endless iterator over sharded batches. Its state is the number of consumed examples and their tokens."""

    def __init__(
        self,
        sources: Sources,
        *,
        batch_rows: int,
        prefetch_batches: int,
        sharding: jax.sharding.NamedSharding,
        vocab_size: int,
    ):
        """`sharding` is that of the `[B, T]` arrays. All token ids must be below `vocab_size`."""
        self._rows_here = rows_of_process(sharding, batch_rows)
        threads = max(rows.threads for rows in sources.train.values())
        batches = HostBatches(sources.examples, batch_rows, self._rows_here, threads)
        self._iterator = batches.iterator(prefetch_batches)
        self._sources, self._batch_rows, self._sharding, self._vocab_size = sources, batch_rows, sharding, vocab_size
        self._consumed = 0  # Number of examples so far, including those that a rewind skipped.
        self.tokens = 0  # Number of tokens in all batches of the run so far, including padding.

    def __next__(self) -> Batch:
        rows = next(self._iterator)
        check_ids(rows, self._vocab_size, lambda row: self._sources.where(self._consumed + int(self._rows_here[row])))
        batch = make_batch(rows, self._batch_rows, self._sharding)
        self._consumed += self._batch_rows
        self.tokens += batch.tokens_BT.size
        return batch

    def abstract_batch(self) -> Batch:
        def abstract(x_T: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self._batch_rows, *x_T.shape), x_T.dtype, sharding=self._sharding)

        return Batch(**{f"{name}_BT": abstract(x_T) for name, x_T in self._sources.examples[0].items()})

    def state(self) -> dict[str, Any]:
        return {"examples": self._consumed, "tokens": self.tokens, "signature": self._sources.signature}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the examples consumed in `state`. Raise `UserError` if the data has changed."""
        signatures = state["signature"], self._sources.signature
        if changes := signature_changes(*(begun(each, state["examples"]) for each in signatures)):
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
    """Return "name old → new" for each entry that differs between two data signatures."""
    pairs = {name: (old.get(name), new.get(name)) for name in old | new}
    return [f"{name} {shown(before)} → {shown(after)}" for name, (before, after) in pairs.items() if before != after]


@functools.cache
def rows_of_process(sharding: jax.sharding.NamedSharding, batch_rows: int) -> np.ndarray:
    """Return the indices of the rows of a global batch on this process's devices, in ascending order."""
    # The mesh follows the interconnect of a pod, not its host boundaries. So there may be gaps between the rows of a
    # process, and several processes may hold the same row.
    indices = sharding.addressable_devices_indices_map((batch_rows, sharding.mesh.shape["context"])).values()
    return np.unique(np.concatenate([np.arange(batch_rows)[index[0]] for index in indices if index is not None]))


def check_ids(rows: Rows, vocab_size: int, where: Callable[[int], str]) -> None:
    """Raise `UserError` if a token or target is outside the vocabulary. `where(row)` describes the origin of a row."""
    # The model itself would not fail: lookups on a device clamp an invalid index or return zeros.
    for name in ("tokens", "targets"):
        ids = rows[name]
        if len(invalid := np.argwhere((ids < 0) | (ids >= vocab_size))):
            row, position = invalid[0].tolist()
            value = int(ids[row, position])
            raise UserError(
                f"{where(row)}: {name}[{position}] is id {value}, which model.vocab_size={vocab_size} does "
                "not have; restore the data, or prepare it again with the tokenizer of data.tokenizer"
            )


def make_batch(rows: Rows, batch_rows: int, sharding: jax.sharding.NamedSharding) -> Batch:
    """Make a global batch of `batch_rows` rows from `rows`, the rows of this process (`rows_of_process`)."""
    here = rows_of_process(sharding, batch_rows)

    def global_array(x_here: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:  # `index` has two slices: rows and tokens.
            return x_here[np.searchsorted(here, np.arange(batch_rows)[index[0]]), index[1]]

        return jax.make_array_from_callback((batch_rows, x_here.shape[1]), sharding, shard)

    return Batch(**{f"{name}_BT": global_array(x_here) for name, x_here in rows.items()})


def ordered_batches(
    source: RowSource, *, batch_rows: int, limit_tokens: int, sharding: jax.sharding.NamedSharding, vocab_size: int
) -> Iterator[Batch]:
    """Yield the first `limit_tokens` tokens of a source as batches. Pad the last batch with rows of loss mask 0."""
    total = ordered_rows(source, limit_tokens)
    here, read_rows = rows_of_process(sharding, batch_rows), row_reader(source.threads)
    for start in range(0, total, batch_rows):
        indices = np.minimum(start + here, total - 1).tolist()  # Pad with copies of the last row.
        rows = read_rows(source, indices)
        check_ids(rows, vocab_size, lambda row, indices=indices: f"{source.name}: row {indices[row]}")
        is_filler = start + here >= total
        rows["loss_mask"][is_filler] = 0
        row_tokens = np.where(is_filler, 0, [source.row_tokens(index) for index in indices])
        rows["is_real"] = np.arange(source.sequence_length) < row_tokens[:, None]
        yield make_batch(rows, batch_rows, sharding)


def ordered_rows(source: RowSource, limit_tokens: int) -> int:
    """Return the number of rows in `ordered_batches`, at least 1, without padding rows."""
    return min(len(source), max(1, limit_tokens // source.sequence_length))
