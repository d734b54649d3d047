"""Global batches from a token store, in an order that one integer continues.

Row i is tokens[iT : iT + T] with the tokens one later as targets. Rows are shuffled anew each epoch; update n reads
examples nB … nB + B - 1 of that sequence and each process its contiguous slice of them, so the order does not depend
on the number of processes. grain does the shuffling and the prefetching.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np

from difftx.data.store import TokenStore
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
        return self.store.slice(start, start + self.sequence_length + 1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class HostSlice:
    """Examples of process `process` of `processes`, out of batches of `rows`."""

    examples: grain.MapDataset[np.ndarray]
    rows: int
    process: int
    processes: int

    def __len__(self) -> int:
        return len(self.examples) // self.processes

    def __getitem__(self, index: int) -> np.ndarray:
        rows_here = self.rows // self.processes
        batch, row = divmod(index, rows_here)
        example = self.examples[batch * self.rows + self.process * rows_here + row]
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
        processes: int = 1,
        process: int = 0,
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
            processes: number of processes that load.
            process: this one's index.
        """
        examples = grain.MapDataset.source(Rows(store, sequence_length)).shuffle(seed=seed).repeat()
        slice_ = HostSlice(examples, rows, process, processes)
        batches = grain.MapDataset.source(slice_).batch(rows // processes)
        self._iterator = iter(batches.to_iter_dataset(grain.ReadOptions(1, prefetch_batches)))
        self._rows, self._sharding = rows, sharding
        self._signature = {**signature, "sequence_length": sequence_length, "seed": seed}
        self._examples = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = make_batch(next(self._iterator), self._sharding)
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


def make_batch(rows: np.ndarray, sharding: jax.sharding.NamedSharding, counted: np.ndarray | None = None) -> Batch:
    """Turn this process's `[rows, T + 1]` tokens into a global batch; `counted[i]` = False masks a filler row."""
    mask = np.ones(rows[:, 1:].shape, np.float32)
    if counted is not None:
        mask *= counted[:, None]
    arrays = [np.ascontiguousarray(a) for a in (rows[:, :-1], rows[:, 1:], mask)]
    tokens_BT, targets_BT, mask_BT = (jax.make_array_from_process_local_data(sharding, a) for a in arrays)
    return Batch(tokens_BT=tokens_BT, targets_BT=targets_BT, loss_mask_BT=mask_BT)


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
    wanted = min(len(source), max(1, limit_tokens // sequence_length))
    for start in range(0, wanted, rows):
        indices = np.arange(start, start + rows)
        yield make_batch(np.stack([source[min(int(i), wanted - 1)] for i in indices]), sharding, indices < wanted)
