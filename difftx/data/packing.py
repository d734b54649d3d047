"""Make rows of T tokens from a store: split it every T tokens, or pack whole documents into rows."""
# T = tokens per row

import dataclasses
from typing import Protocol

import numpy as np

from difftx.data.store import TokenStore

BEST_FIT_VERSION = 1  # Increase it when `best_fit` changes its result, so that no run resumes with different rows.
GROUP_DOCUMENTS = 2**17  # Documents packed together. Larger groups use more memory and mix distant documents.

# A row is a dictionary of arrays with T elements. "tokens" and "targets" are int32, and a target is the next token.
# "loss_mask" is float32: 1 if a target counts in the loss, else 0. With data.document_mask, a row also has the int32
# arrays "segment_ids" (1, 2, … for segments, 0 for padding) and "positions" (position of a token in its segment). A
# segment is the part of one document in this row.
Row = dict[str, np.ndarray]
Rows = dict[str, np.ndarray]  # Stacked rows: arrays [rows, T].


class RowSource(Protocol):
    """Training or validation rows with random access."""

    name: str  # Origin of the rows, for messages.
    sequence_length: int  # Number of tokens per row (T).
    tokens: int  # Number of tokens per epoch, without padding.
    threads: int  # Recommended number of threads for reading rows.
    fingerprint: str  # Changes when the data changes, but not when packing settings change.

    def __len__(self) -> int: ...  # Number of rows per epoch.

    def __getitem__(self, index: int) -> Row: ...

    def row_tokens(self, index: int) -> int: ...  # Number of tokens before the padding.


@dataclasses.dataclass(frozen=True)
class PackIndex:
    """The segments in each row. Row i has the segments `first[i]` to `first[i + 1] - 1`."""

    first: np.ndarray  # Index of each row's first segment; then the number of segments. int64 `[rows + 1]`.
    starts: np.ndarray  # Position of each segment's first token in the store, int64 `[segments]`.
    lengths: np.ndarray  # Number of tokens in each segment, int64 `[segments]`.

    def __len__(self) -> int:
        return len(self.first) - 1


class PackedRows:
    """Rows of a token store, with random access.

    With packing "concat", the concatenated documents are split every T tokens. If `document_mask` is set, the last row
    is padded, and if not, an incomplete last row is dropped. With packing "best_fit", documents of at most T tokens
    stay whole.

    A target counts in the loss if it is in the same document as the token before it. With "concat" and without
    `document_mask`, the first token of a document counts too. Prompt tokens never count.
    """

    def __init__(self, store: TokenStore, *, sequence_length: int, packing: str, document_mask: bool):
        """Assign the tokens to rows. With packing "best_fit", this takes half a second per billion tokens."""
        self.store, self.name, self.fingerprint = store, store.name, store.fingerprint
        self.sequence_length, self.tokens, self._document_mask = sequence_length, len(store), document_mask
        self.threads = store.threads
        self._offsets = store.offsets.view(np.int64)  # As int64, because uint64 + int64 is float64 in numpy.
        # Positions in the store where tokens start to count in the loss, alternating with positions where they stop.
        self._edges = None if store.counted is None else store.counted.ravel().view(np.int64)
        self._index = None if packing == "concat" else best_fit(self._offsets, sequence_length)

    def __len__(self) -> int:
        if self._index is not None:
            return len(self._index)
        if self._document_mask:
            return -(-len(self.store) // self.sequence_length)
        return (len(self.store) - 1) // self.sequence_length  # The last row needs one more token as its last target.

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if self._index is None:
            return self._concat_row(index * self.sequence_length)
        segments = slice(self._index.first[index], self._index.first[index + 1])
        starts, lengths = self._index.starts[segments], self._index.lengths[segments]
        stops = starts + lengths
        continues = self._offsets[self._offsets.searchsorted(stops)] != stops
        row = empty_row(self.sequence_length, lengths if self._document_mask else None)
        filled = 0
        for start, stop, document_continues in zip(starts.tolist(), stops.tolist(), continues.tolist(), strict=True):
            self._fill(row, filled, start, stop, document_continues)
            filled += stop - start
        return row

    def row_tokens(self, index: int) -> int:
        if self._index is None:
            return min(self.sequence_length, len(self.store) - index * self.sequence_length)
        return int(self._index.lengths[self._index.first[index] : self._index.first[index + 1]].sum())

    def _concat_row(self, start: int) -> Row:
        stop = min(start + self.sequence_length, len(self.store))
        if not self._document_mask:
            tokens = self.store.slice(start, stop + 1).astype(np.int32)
            return {"tokens": tokens[:-1], "targets": tokens[1:], "loss_mask": self._counted(start + 1, stop + 1)}
        first, last = np.searchsorted(self._offsets, [start + 1, stop])
        lengths = np.diff(np.concatenate([[start], self._offsets[first:last], [stop]]))
        row = empty_row(self.sequence_length, lengths)
        self._fill(row, 0, start, stop, self._offsets[last] != stop)
        row["loss_mask"][self._offsets[first:last] - start - 1] = 0  # These targets belong to the next document.
        return row

    def _fill(self, row: Row, at: int, start: int, stop: int, document_continues: bool) -> None:
        """Copy tokens `start` to `stop - 1` of the store, with targets and loss mask, into a row from index `at`."""
        # If the document ends here, the last token has no target.
        tokens = self.store.slice(start, stop + document_continues)
        row["tokens"][at : at + stop - start] = tokens[: stop - start]
        row["targets"][at : at + len(tokens) - 1] = tokens[1:]
        row["loss_mask"][at : at + len(tokens) - 1] = self._counted(start + 1, start + len(tokens))

    def _counted(self, start: int, stop: int) -> np.ndarray:
        """Return the loss mask of tokens `start` to `stop - 1` of the store: 0 for prompt tokens, else 1."""
        if self._edges is None:
            return np.ones(stop - start, np.float32)
        return (self._edges.searchsorted(np.arange(start, stop), side="right") % 2).astype(np.float32)


def empty_row(row_tokens: int, segment_lengths: np.ndarray | None) -> Row:
    """Return a row of zeros. If `segment_lengths` is given, set segment ids and positions."""
    row = {
        "tokens": np.zeros(row_tokens, np.int32),
        "targets": np.zeros(row_tokens, np.int32),
        "loss_mask": np.zeros(row_tokens, np.float32),
    }
    if segment_lengths is not None:
        ids, positions = np.zeros((2, row_tokens), np.int32)
        filled, starts = int(segment_lengths.sum()), np.cumsum(segment_lengths) - segment_lengths
        ids[:filled] = np.repeat(np.arange(1, len(segment_lengths) + 1), segment_lengths)
        positions[:filled] = np.arange(filled) - np.repeat(starts, segment_lengths)
        row |= {"segment_ids": ids, "positions": positions}
    return row


def best_fit(offsets: np.ndarray, row_tokens: int) -> PackIndex:
    """Pack documents into rows by best-fit decreasing, in groups of `GROUP_DOCUMENTS` (arXiv 2404.10830).

    `offsets` has the start of each document and the end of the last one, int64 `[documents + 1]`. First split each
    document longer than a row into full rows and a remainder. Rows, and the segments in each row, keep the order of the
    documents, so the first rows are not biased towards long documents.
    """
    counts, starts, lengths = [np.zeros(1, np.int64)], [], []
    for group in range(0, len(offsets) - 1, GROUP_DOCUMENTS):
        bounds = offsets[group : group + GROUP_DOCUMENTS + 1]
        segments = -(-np.diff(bounds) // row_tokens)  # Number of segments of each document.
        nth = np.arange(segments.sum()) - np.repeat(np.cumsum(segments) - segments, segments)
        group_starts = np.repeat(bounds[:-1], segments) + nth * row_tokens
        group_lengths = np.minimum(np.repeat(bounds[1:], segments) - group_starts, row_tokens)
        bins = _best_fit_decreasing(group_lengths, row_tokens)
        _, first_of_bin, bins = np.unique(bins, return_index=True, return_inverse=True)
        rows = np.argsort(np.argsort(first_of_bin))[bins]  # Number the rows by their first segment.
        order = np.argsort(rows, kind="stable")
        counts.append(np.bincount(rows))
        starts.append(group_starts[order])
        lengths.append(group_lengths[order])
    return PackIndex(np.cumsum(np.concatenate(counts)), np.concatenate(starts), np.concatenate(lengths))


def _best_fit_decreasing(lengths: np.ndarray, room: int) -> np.ndarray:
    """Assign items to bins of capacity `room` by best-fit decreasing. Return each item's bin.

    Take the items from longest to shortest, and put each into the fullest bin with enough space. Items of equal length
    are assigned together to bins with equal space, so the number of steps depends on the number of distinct lengths.
    """
    bins, count = np.empty(len(lengths), np.int64), 0
    open_bins: dict[int, list[np.ndarray]] = {}  # Bins with space left, by remaining capacity.
    rooms = 0  # Bit r is set if some bin has remaining capacity r. The lowest set bit ≥ `length` is the best fit.
    by_length = np.argsort(-lengths, kind="stable")
    edges = np.flatnonzero(np.diff(lengths[by_length])) + 1
    for items in np.split(by_length, edges) if len(lengths) else []:
        length = int(lengths[items[0]])
        while len(items):
            fitting = rooms >> length
            left = length + (fitting & -fitting).bit_length() - 1 if fitting else room
            each = left // length
            if fitting:
                candidates = np.concatenate(open_bins.pop(left))
                rooms ^= 1 << left
            else:
                candidates = np.arange(count, count - (-len(items) // each))
                count += len(candidates)
            packed, items = items[: each * len(candidates)], items[each * len(candidates) :]
            bins[packed] = np.repeat(candidates, each)[: len(packed)]
            full, some = divmod(len(packed), each)
            for taken, those in ((each, slice(full)), (some, slice(full, full + 1)), (0, slice(full + 1, None))):
                rest = left - taken * length
                if rest and len(candidates[those]):
                    open_bins.setdefault(rest, []).append(candidates[those])
                    rooms |= 1 << rest
    return bins
