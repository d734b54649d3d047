"""Packing of documents into rows, against an oracle and by properties."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.data import packing
from difftx.data.packing import PackedRows, best_fit
from difftx.data.store import TokenStore

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
ROW_TOKENS = st.integers(1, 17)


def store_of(lengths):
    """Return documents of the tokens 1, 2, 3, …, so that a token shows its position in the store and 0 is padding."""
    offsets = np.cumsum([0, *lengths]).astype(np.uint64)
    return TokenStore(np.arange(1, offsets[-1] + 1, dtype=np.uint32), offsets)


def rows_of(store, row_tokens, policy, document_mask=True):
    return PackedRows(store, sequence_length=row_tokens, packing=policy, document_mask=document_mask)


@pytest.mark.parametrize("policy", ["concat", "best_fit"])
@settings(max_examples=30, deadline=None, database=None)
@given(lengths=LENGTHS, row_tokens=ROW_TOKENS)
def test_rows_have_every_token_once_and_the_segments_of_an_oracle(policy, lengths, row_tokens):
    rows = rows_of(store_of(lengths), row_tokens, policy)
    first_tokens = {1 + sum(lengths[:i]) for i in range(len(lengths))}
    last_tokens = {sum(lengths[: i + 1]) for i in range(len(lengths))}
    seen, learnt = [], []
    for index in range(len(rows)):
        row = rows[index]
        assert {name: (array.dtype, array.shape) for name, array in row.items()} == {
            "tokens": (np.int32, (row_tokens,)),
            "targets": (np.int32, (row_tokens,)),
            "loss_mask": (np.float32, (row_tokens,)),
            "segment_ids": (np.int32, (row_tokens,)),
            "positions": (np.int32, (row_tokens,)),
        }
        segment, position, before = 0, 0, None
        for t, token in enumerate(row["tokens"].tolist()):
            if token == 0:
                expected = (0, 0, 0)
            else:
                starts = token in first_tokens or token - 1 != before
                segment, position = (segment + 1, 0) if starts else (segment, position + 1)
                expected = (segment, position, token not in last_tokens)
                seen.append(token)
            assert (row["segment_ids"][t], row["positions"][t], row["loss_mask"][t]) == expected
            if row["loss_mask"][t]:
                assert row["targets"][t] == token + 1
                learnt.append(token + 1)
            before = token
        filled = np.count_nonzero(row["tokens"])
        assert row["tokens"][:filled].all()  # Padding is at the end.
        assert rows.row_tokens(index) == filled
    everything = range(1, sum(lengths) + 1)
    assert sorted(seen) == list(everything)
    assert sorted(learnt) == [token for token in everything if token not in first_tokens]


@settings(max_examples=30, deadline=None, database=None)
@given(lengths=LENGTHS, row_tokens=ROW_TOKENS)
def test_concat_without_a_mask_gives_windows_of_the_store(lengths, row_tokens):
    store = store_of(lengths)
    rows = rows_of(store, row_tokens, "concat", document_mask=False)
    assert len(rows) == (sum(lengths) - 1) // row_tokens
    for index in range(len(rows)):
        row = rows[index]
        expected = 1 + index * row_tokens + np.arange(row_tokens + 1)
        assert set(row) == {"tokens", "targets", "loss_mask"}
        np.testing.assert_array_equal(row["tokens"], expected[:-1])
        np.testing.assert_array_equal(row["targets"], expected[1:])
        assert row["loss_mask"].all()
        assert rows.row_tokens(index) == row_tokens
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("policy", ["concat", "best_fit"])
@pytest.mark.parametrize("document_mask", [True, False])
@settings(max_examples=30, deadline=None, database=None)
@given(
    documents=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=9), row_tokens=ROW_TOKENS
)
def test_prompts_change_only_the_loss_mask(policy, document_mask, documents, row_tokens):
    plain = store_of([prompt + response for prompt, response in documents])
    prompts = np.array([prompt for prompt, _ in documents], np.uint64)
    counted = np.stack([plain.offsets[:-1] + prompts, plain.offsets[1:]], axis=1)
    store = TokenStore(plain.slice(0, len(plain)), plain.offsets, counted)
    in_prompt = {int(start) + 1 + i for start, n in zip(plain.offsets, prompts, strict=False) for i in range(int(n))}
    with_prompts, without = (rows_of(each, row_tokens, policy, document_mask) for each in (store, plain))
    assert len(with_prompts) == len(without)
    for index in range(len(without)):
        row, expected = with_prompts[index], dict(without[index])
        expected["loss_mask"] = expected["loss_mask"] * [target not in in_prompt for target in expected["targets"]]
        for name, array in expected.items():
            np.testing.assert_array_equal(row[name], array)


@settings(max_examples=30, deadline=None, database=None)
@given(lengths=LENGTHS, row_tokens=ROW_TOKENS)
def test_best_fit_without_a_mask_gives_the_same_tokens(lengths, row_tokens):
    masked, plain = (rows_of(store_of(lengths), row_tokens, "best_fit", document_mask=m) for m in (True, False))
    for index in range(len(plain)):
        assert set(plain[index]) == {"tokens", "targets", "loss_mask"}
        for name, array in plain[index].items():
            np.testing.assert_array_equal(array, masked[index][name])


@settings(max_examples=30, deadline=None, database=None)
@given(lengths=LENGTHS, row_tokens=ROW_TOKENS)
def test_best_fit_keeps_documents_whole_and_fills_rows_like_the_textbook_algorithm(lengths, row_tokens):
    offsets = np.cumsum([0, *lengths])
    index = best_fit(offsets, row_tokens)
    pieces = set(zip(index.starts.tolist(), index.lengths.tolist(), strict=True))
    for start, length in zip(offsets.tolist(), lengths, strict=False):
        if length <= row_tokens:
            assert (start, length) in pieces
    filled = [int(index.lengths[a:b].sum()) for a, b in itertools.pairwise(index.first)]
    assert sorted(filled) == sorted(textbook_best_fit_decreasing(index.lengths.tolist(), row_tokens))
    first_pieces = index.starts[index.first[:-1]]
    assert (np.diff(first_pieces) > 0).all()  # Rows are sorted by their first segments.


def textbook_best_fit_decreasing(lengths, capacity):
    bins = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, filled in enumerate(bins) if filled + length <= capacity]
        if fitting:
            bins[max(fitting, key=lambda i: bins[i])] += length
        else:
            bins.append(length)
    return bins


def test_groups_of_documents_are_packed_one_after_another(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 9, 100)
    offsets = np.cumsum([0, *lengths])
    monkeypatch.setattr(packing, "GROUP_DOCUMENTS", 40)
    whole = best_fit(offsets, 8)
    parts = [best_fit(offsets[a : a + 41], 8) for a in (0, 40, 80)]
    np.testing.assert_array_equal(whole.starts, np.concatenate([p.starts for p in parts]))
    assert len(whole) == sum(map(len, parts))
