"""Corpora of text files: their documents and their split into training and validation."""

import builtins
import dataclasses
import errno
import gzip
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from difftx.data.bigrams import read_bigrams
from difftx.data.records import read_records
from difftx.data.sources import DOCUMENT_BYTES, load_corpus, text_files
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UnreadableError, UserError

ENCODING = load_tokenizer("bytes")


def corpus_of(config, path, **changes):
    data = dataclasses.replace(config().data, **changes)
    return load_corpus(None if path is None else str(path), data, ENCODING)


def documents_of(store):
    return [bytes(store.slice(int(a), int(b) - 1).astype(np.uint8)) for a, b in itertools.pairwise(store.offsets)]


def all_tokens(store):
    return store.slice(0, len(store))


def test_every_byte_is_in_exactly_one_split(config, text_file):
    train_store, valid_store = corpus_of(config, text_file, valid_fraction=0.3)
    train, valid = documents_of(train_store), documents_of(valid_store)
    text = text_file.read_bytes()
    assert len(train) + len(valid) == -(-len(text) // DOCUMENT_BYTES)
    assert sum(map(len, train + valid)) == len(text)
    assert all(part in text for part in train + valid)
    assert not set(train) & set(valid)
    ends = all_tokens(train_store)[train_store.offsets[1:].astype(int) - 1]
    assert (ends == ENCODING.eot_token).all()


def test_duplicates_count_once_and_file_order_does_not_matter(config, text_file, tmp_path):
    alone = corpus_of(config, text_file)
    (tmp_path / "a_copy.txt").write_bytes(text_file.read_bytes())
    twice = corpus_of(config, tmp_path / "*.txt")
    for one, other in zip(alone, twice, strict=True):
        assert one.fingerprint == other.fingerprint
    np.testing.assert_array_equal(all_tokens(alone[0]), all_tokens(twice[0]))


def test_validation_split_leaves_a_training_document(config, tmp_path):
    """The share of 60 % of two documents would be both."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(500 * name)
    train, valid = corpus_of(config, tmp_path / "*.txt", valid_fraction=0.6)
    assert sorted(documents_of(train) + documents_of(valid)) == [b"a" * 500, b"b" * 500]
    assert len(documents_of(train)) == len(documents_of(valid)) == 1


def test_a_file_whose_name_is_a_glob_is_read(config, tmp_path):
    path = tmp_path / "book [OCR].txt"
    path.write_text("".join(f"line {i}\n" for i in range(20_000)))
    (tmp_path / "book O.txt").write_text("The glob matches this file, and not the file of its name.")
    assert text_files(str(path)) == [path]
    train, valid = corpus_of(config, path)
    assert len(documents_of(train) + documents_of(valid)) == -(-path.stat().st_size // DOCUMENT_BYTES)


def test_a_long_line_stays_whole(config, tmp_path):
    lines = ["a" * (DOCUMENT_BYTES + 5) + "\n", "b" * 900 + "\n", "c" * DOCUMENT_BYTES + "\n"]
    path = tmp_path / "lines.txt"
    path.write_text("".join(lines))
    train, valid = corpus_of(config, path)
    found = documents_of(train) + documents_of(valid)
    assert sorted(found) == sorted(line.encode() for line in lines)


def test_stdlib_corpus_has_main_modules_without_tests():
    files = text_files("stdlib")
    names = {f.name for f in files}
    assert {"argparse.py", "dataclasses.py", "typing.py"} <= names
    assert not any("site-packages" in f.parts or "test" in f.parts for f in files)
    assert sum(f.stat().st_size for f in files) > 4e6


def test_a_read_that_may_succeed_later_is_not_a_mistake(config, tmp_path, monkeypatch):
    """Schedulers start a training again after exit code 1, the one of an `UnreadableError`, and not after 2."""
    (tmp_path / "a.txt").write_text("text")
    readers = [
        lambda path: corpus_of(config, path),
        lambda path: list(read_records(path, field="eval.icl.tasks[0].test", what="questions")),
        lambda path: read_bigrams(path, "", field="eval.bigrams_path"),
        lambda path: load_tokenizer(str(path.with_suffix(".tiktoken"))),
    ]
    for read in readers:
        with monkeypatch.context() as patch:
            for owner in (Path, builtins):
                patch.setattr(owner, "open", lambda *_, **__: fail(errno.EIO))
            with pytest.raises(UnreadableError, match=r"/a\.\w+'?: cannot be read \(.*; when that has passed"):
                read(tmp_path / "a.txt")
            for owner in (Path, builtins):
                patch.setattr(owner, "open", lambda *_, **__: fail(errno.EACCES))
            with pytest.raises(UserError, match=r"/a\.\w+'?: cannot be read \(Permission denied\)$"):
                read(tmp_path / "a.txt")


def fail(number):
    raise OSError(number, os.strerror(number))


STORE = r"is not plain text; make a store of it, `difftx prepare --input=\S+ --tokenizer="


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("packed.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0), rf"packed\.jsonl\.gz {STORE}"),
        ("lines.jsonl", b'{"text": "a"}', rf"lines\.jsonl {STORE}"),
        ("LINES.JSONL", b'{"text": "a"}', rf"LINES\.JSONL {STORE}"),
        ("array.json", b'[{"text": "a"}]', rf"array\.json {STORE}"),
        (".", None, r"not a finished token store; .*, or name the text files in it, such as '\S+/\*\.txt'"),
        (None, None, "data.path is not set"),
        ("none.txt", None, "no such file"),
        ("broken.txt", b"fine so far\n\xff\xfe", r"broken\.txt: byte 12 is not UTF-8"),
        ("empty.txt", b"", "0 document"),
        ("short.txt", b"too short", "1 document"),
        ("small.txt", b"0123456\n" * 9000, "less than a row of data.sequence_length=100000"),
    ],
)
def test_bad_input_is_named(config, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        corpus_of(config, name and tmp_path / name, sequence_length=100_000 if name == "small.txt" else 32)
