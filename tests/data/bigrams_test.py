"""Bigram counts of a store, against a dictionary, and their file."""

import hashlib
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from helpers import data_prepare
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.commands.data import main as data_command
from difftx.data import bigrams
from difftx.data.bigrams import as_bigrams, count_bigrams, read_bigrams, write_bigrams
from difftx.data.store import TokenStore, open_store, read_meta
from difftx.errors import UserError
from difftx.progress import Work

TOKENIZER = {"name": "bytes", "vocabulary_sha256": "f" * 64}


def store_of(documents):
    tokens = np.array(list(itertools.chain(*documents)), np.uint32)
    return TokenStore(tokens, np.cumsum([0, *map(len, documents)], dtype=np.uint64))


def brute_force(documents):
    return Counter(pair for document in documents for pair in itertools.pairwise(document))


def write(stores, path, *, min_count=1):
    description = {"tokenizer": TOKENIZER, "stores": []}
    return write_bigrams(stores, path, min_count=min_count, description=description, work=Work(enabled=False))


def as_dictionary(counts):
    pairs = [(int(b) >> 32, int(b) & 0xFFFFFFFF) for b in counts.bigrams]
    assert pairs == sorted(set(pairs))
    return dict(zip(pairs, counts.counts.tolist(), strict=True))


TOKEN = st.integers(0, 5) | st.sampled_from([100_287, 2**32 - 1])
DOCUMENTS = st.lists(st.lists(TOKEN, min_size=1, max_size=12), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(stores=st.lists(DOCUMENTS, min_size=1, max_size=2), chunk=st.integers(1, 20), min_count=st.integers(1, 3))
def test_counts_in_the_file_and_in_memory_equal_those_of_a_dictionary(tmp_path_factory, stores, chunk, min_count):
    """Count chunks of 1 to 20 tokens, so that chunks end anywhere in documents."""
    expected = sum(map(brute_force, stores), Counter())
    path = tmp_path_factory.mktemp("bigrams") / "counts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigrams, "CHUNK_TOKENS", chunk)
        header = write([store_of(documents) for documents in stores], path, min_count=min_count)
    assert header["occurrences"] == sum(expected.values())
    counts = read_bigrams(path, TOKENIZER["vocabulary_sha256"], field="f")
    assert as_dictionary(counts) == {pair: n for pair, n in expected.items() if n >= min_count}
    assert as_dictionary(count_bigrams([store_of(documents) for documents in stores])) == expected
    asked = list(itertools.product([0, 1, 5, 7, 2**32 - 1], repeat=2))
    looked_up = counts.of(as_bigrams(*np.array(asked, np.uint32).T))
    assert looked_up.tolist() == [expected[p] if expected[p] >= min_count else 0 for p in asked]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    lines = ({"text": f"Document {i} counts {i * i} and {i % 7}."} for i in range(300))
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data_prepare.prepared(folder / "store", f"--input={folder / 'in.jsonl'}", "--valid_fraction=0.1")
    return folder / "store"


def test_the_command_counts_training_documents(prepared, tmp_path, capsys):
    store = open_store(prepared, "train")
    ends = store.offsets.tolist()
    documents = [store.slice(a, b).tolist() for a, b in itertools.pairwise(ends)]
    assert data_command(["bigrams", str(prepared), f"--out={tmp_path / 'counts'}"]) == 0
    assert f"in {len(store):,} tokens" in capsys.readouterr().out
    counts = read_bigrams(tmp_path / "counts", read_meta(prepared)["tokenizer"]["vocabulary_sha256"], field="f")
    assert as_dictionary(counts) == brute_force(documents)
    assert counts.description["stores"][0]["sha256"] == store.fingerprint
    assert data_command(["bigrams", str(prepared), str(prepared), f"--out={tmp_path / 'counts'}"]) == 0
    twice = read_bigrams(tmp_path / "counts", read_meta(prepared)["tokenizer"]["vocabulary_sha256"], field="f")
    assert as_dictionary(twice) == {pair: 2 * n for pair, n in brute_force(documents).items()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min_count=0"], "--min_count=0 must be positive"),
        (["--out=no/such/folder/file"], "--out=no/such/folder/file: name a file"),
    ],
)
def test_mistakes_of_the_command(prepared, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        data_command(["bigrams", str(prepared), f"--out={tmp_path / 'counts'}", *flags])
    assert not (tmp_path / "counts").exists()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda raw: raw[:-1], "the counts are corrupt; count"),
        (lambda raw: b"", "not an intact file of bigrams"),
        (lambda raw: b'{"format": 1}\n', "not an intact file of bigrams"),
        (lambda raw: raw.replace(b'"min_count": 1', b'"min_count": 3'), "not an intact file of bigrams"),
        (lambda raw: raw[:-8] + bytes([raw[-8] ^ 4]) + raw[-7:], "the counts are corrupt; count"),
    ],
)
def test_invalid_file_is_rejected(tmp_path, corrupt, message):
    path = tmp_path / "counts"
    write([store_of([[1, 2, 3, 1, 2]])], path)
    raw = path.read_bytes()
    line, arrays = raw.split(b"\n", 1)
    halves = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    assert json.loads(line)["arrays_sha256"] == [hashlib.sha256(half).hexdigest() for half in halves]
    path.write_bytes(corrupt(raw))
    with pytest.raises(UserError, match=f"eval.bigrams_path='{path}': .*{message}"):
        read_bigrams(path, "f" * 64, field="eval.bigrams_path")


def test_other_tokenizer_or_missing_file_is_rejected(tmp_path):
    path = tmp_path / "counts"
    write([store_of([[1, 2, 3]])], path)
    with pytest.raises(UserError, match=r"counted with tokenizer 'bytes' \(vocabulary ffffffffffff\), not this run's"):
        read_bigrams(path, "0" * 64, field="f")
    with pytest.raises(UserError, match=r"f='.*none': cannot be read"):
        read_bigrams(tmp_path / "none", "0" * 64, field="f")
