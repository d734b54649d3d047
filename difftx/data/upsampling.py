"""Length up-sampling: long documents are used more often within each source (Fu et al. 2024, arXiv 2402.10171).

The per-source recipe of the paper keeps the share of each domain, here the weights of `data.sources`, and raises the
share of long documents within it. Documents are repeated or left out in the store's index; tokens are not copied.
"""

import hashlib
import json

import numpy as np

from difftx.data.store import TokenStore


class UpsampledStore(TokenStore):
    """A store of nearly the same size in which documents longer than a threshold have a given share of the tokens.

    Long documents have one rate and short documents another. Systematic sampling, which is not random, uses each
    document ⌊rate⌋ or ⌈rate⌉ times and spreads both numbers evenly over the store. Each copy of a document belongs to
    another pass over the store, although best-fit packing may bring the copies of a small store together.
    """

    def __init__(self, store: TokenStore, *, longer_than_tokens: int, share: float):
        """Choose the documents. A store without long documents, or with at least the given share, stays unchanged."""
        offsets = store.offsets.view(np.int64)
        lengths = np.diff(offsets)
        is_long = lengths > longer_than_tokens
        total, long_total = len(store), int(lengths[is_long].sum())
        rates = {True: 1.0, False: 1.0}
        if 0 < long_total < share * total:
            rates = {True: share * total / long_total, False: (1 - share) * total / (total - long_total)}
        uses = np.empty(len(lengths), np.int64)
        for kind, rate in rates.items():
            chosen = is_long == kind
            uses[chosen] = np.diff(np.floor(rate * np.arange(chosen.sum() + 1) + 0.5))
        documents = np.concatenate([np.flatnonzero(uses > times) for times in range(int(uses.max(initial=1)))])
        self.name, self.dtype, self._store, self._sources = store.name, store.dtype, store, offsets[documents]
        self.prompts = None if store.prompts is None else store.prompts[documents]
        self._ends = np.concatenate([[0], np.cumsum(lengths[documents])])
        self.offsets = self._ends.view(np.uint64)
        content = json.dumps([store.fingerprint, longer_than_tokens, share])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        after = int((lengths * uses)[is_long].sum())
        self.report = (
            f"documents of more than {longer_than_tokens:,} tokens: {is_long.sum():,} of {len(lengths):,}, "
            f"{long_total / total:.1%} → {after / len(self):.1%} of the tokens; "
            f"used {rates[True]:.2f} times an epoch, the others {rates[False]:.2f} times"
        )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def slice(self, start: int, stop: int) -> np.ndarray:
        first = min(int(self._ends.searchsorted(start, side="right")), len(self._sources)) - 1
        if stop <= self._ends[first + 1]:
            at = int(self._sources[first] + start - self._ends[first])
            return self._store.slice(at, at + stop - start)
        last = int(self._ends.searchsorted(stop)) - 1
        edges = np.clip(self._ends[first : last + 2], start, stop)
        begin = self._sources[first : last + 1] + edges[:-1] - self._ends[first : last + 1]
        parts = [self._store.slice(a, a + n) for a, n in zip(begin.tolist(), np.diff(edges).tolist(), strict=True)]
        return np.concatenate(parts)
