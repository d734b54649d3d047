"""Upsampling of long documents."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.data.store import TokenStore, UpsampledStore


def store_of(lengths):
    offsets = np.cumsum([0, *lengths]).astype(np.uint64)
    return TokenStore(np.arange(offsets[-1], dtype=np.uint32), offsets)


def documents_of(store):
    return [store.slice(a, b).tolist() for a, b in itertools.pairwise(store.offsets.astype(int).tolist())]


@settings(max_examples=50, deadline=None, database=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), share=st.floats(0.05, 0.95), data=st.data())
def test_documents_stay_whole_and_are_used_evenly(lengths, share, data):
    store = store_of(lengths)
    originals = documents_of(store)
    sampled = UpsampledStore(store, longer_than_tokens=12, share=share)
    documents = documents_of(sampled)
    assert all(document in originals for document in documents)
    assert len(sampled) == sum(map(len, documents))
    for is_long in (True, False):
        uses = [documents.count(d) for d in originals if (len(d) > 12) == is_long]
        assert not uses or max(uses) - min(uses) <= 1
    everything = list(itertools.chain(*documents))
    # Every token that is a multiple of 3 counts, so that documents have several ranges, or none.
    thirds = np.arange(0, len(store), 3, dtype=np.uint64)
    counting = TokenStore(store.slice(0, len(store)), store.offsets, np.stack([thirds, thirds + np.uint64(1)], axis=1))
    counted = UpsampledStore(counting, longer_than_tokens=12, share=share).counted
    assert counted[:, 0].tolist() == [i for i, token in enumerate(everything) if token % 3 == 0]
    assert (counted[:, 1] - counted[:, 0] == 1).all()
    start = data.draw(st.integers(0, len(everything)))
    stop = data.draw(st.integers(start, len(everything)))
    assert sampled.slice(start, stop).tolist() == everything[start:stop]


def test_long_documents_get_their_share_and_the_store_keeps_its_size():
    lengths = np.random.default_rng(0).lognormal(5, 1.5, 5000).astype(int) + 1
    store = store_of(lengths)
    before = lengths[lengths > 2000].sum() / lengths.sum()
    sampled = UpsampledStore(store, longer_than_tokens=2000, share=0.7)
    after = np.diff(sampled.offsets.astype(int))
    assert before < 0.4
    assert after[after > 2000].sum() / after.sum() == pytest.approx(0.7, abs=0.01)
    assert len(sampled) == pytest.approx(len(store), rel=0.02)
    assert f"{before:.1%} → " in sampled.report
    rate = 0.7 / before
    uses = dict(zip(*np.unique(after[after > 2000], return_counts=True), strict=True))
    assert sum(uses.values()) == pytest.approx(rate * (lengths > 2000).sum(), abs=1)
    assert f"used {rate:.2f} times" in sampled.report


@pytest.mark.parametrize("lengths", [[5, 5, 5], [50, 60], [50, 50, 50, 3]])
def test_without_long_documents_or_with_enough_of_them_nothing_changes(lengths):
    store = store_of(lengths)
    sampled = UpsampledStore(store, longer_than_tokens=12, share=0.5)
    assert documents_of(sampled) == documents_of(store)


def test_copies_are_not_adjacent_and_settings_change_the_fingerprint():
    store = store_of([3, 20, 4, 30, 5, 3, 3, 3, 30, 3, 4, 3, 3, 3, 3, 3, 3] + [5] * 60)
    sampled = UpsampledStore(store, longer_than_tokens=12, share=0.8)
    starts = [document[0] for document in documents_of(sampled)]
    uses = {start: starts.count(start) for start in starts}
    assert max(uses.values()) >= 3
    for a, b in itertools.pairwise(starts):
        assert a != b
    other = UpsampledStore(store, longer_than_tokens=12, share=0.81)
    assert len({store.fingerprint, sampled.fingerprint, other.fingerprint}) == 3
