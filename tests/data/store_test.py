"""The token store: slices, fingerprints, and the detection of corrupt files."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.command_server import commands
from helpers.data_prepare import PREPARE
from helpers.data_prepare import prepared as prepared_store
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.commands.data import main as data_command
from difftx.data.sources import load_corpus
from difftx.data.store import TokenStore, open_store, read_meta, shard_file, write_meta
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UnreadableError, UserError
from difftx.json_files import write_record

TEXTS = [f"document {i} says [red]{'äöü€' * (i % 5)}[/red] and \x1b[2J ends" for i in range(60)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    lines = (json.dumps({"text": text, "name": f"n{i}"}) + "\n" for i, text in enumerate(TEXTS))
    (folder / "in.jsonl").write_text("".join(lines))
    flags = ["--shard_tokens=500", "--valid_fraction=0.3", "--workers=1", "--id_field=name"]
    made = commands().run([*PREPARE, f"--input={folder}/in.jsonl", f"--out={folder}/store", *flags])
    assert made.returncode == 0, made.stderr
    return folder / "store"


@pytest.fixture
def store(prepared, tmp_path):
    """Return a copy of the store that the test may corrupt."""
    return shutil.copytree(prepared, tmp_path / "store")


def whole(folder, split):
    """Return all tokens and offsets of a split, read without the code under test."""
    tokens, offsets = [], [np.zeros(1, np.uint64)]
    for file in sorted((folder / split).glob("*.tokens")):
        starts = np.fromfile(file.with_suffix(".offsets"), np.uint64)
        offsets.append(starts[1:] + offsets[-1][-1])
        tokens.append(np.fromfile(file, np.uint16))
    assert len(tokens) > 1
    return np.concatenate(tokens), np.concatenate(offsets)


@settings(deadline=None)  # Other jobs may slow the machine down.
@given(data=st.data())
def test_slices_span_shards(prepared, data):
    tokens, offsets = whole(prepared, "train")
    opened = open_store(prepared, "train")
    assert (len(opened), opened.dtype) == (len(tokens), np.uint16)
    np.testing.assert_array_equal(opened.offsets, offsets)
    assert opened.offsets.dtype == np.uint64
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(tokens))] * 2)))
    for one in (opened, TokenStore(tokens, offsets)):
        np.testing.assert_array_equal(one.slice(start, stop), tokens[start:stop])
        assert one.slice(start, stop).dtype == np.uint16


def test_slice_out_of_bounds_is_an_error(prepared):
    opened = open_store(prepared, "train")
    for start, stop in [(-1, 3), (0, len(opened) + 1), (5, 4)]:
        with pytest.raises(IndexError):
            opened.slice(start, stop)


def test_fingerprints_tell_stores_apart(prepared, store):
    train, valid = open_store(store, "train"), open_store(store, "valid")
    assert train.fingerprint == open_store(prepared, "train").fingerprint != valid.fingerprint
    tokens, offsets = whole(prepared, "train")
    other = tokens.copy()
    other[7] += 1
    assert TokenStore(tokens, offsets).fingerprint != TokenStore(other, offsets).fingerprint


def test_tokens_of_a_replaced_store_are_read_from_the_new_files(store):
    before = open_store(store, "train").slice(0, 10).copy()
    shutil.rmtree(store)
    text = store.parent / "in.txt"
    text.write_text("another text")
    prepared_store(store, f"--input={text}", "--valid_fraction=0")
    after = open_store(store, "train")
    assert bytes(after.slice(0, len(after) - 1).astype(np.uint8)) == b"another text"
    assert (after.slice(0, 10) != before).any()


def test_a_failed_read_of_offsets_is_no_corrupt_store(store, monkeypatch):
    """numpy's `fromfile` returns the part before the error, which looks like a shorter file."""

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    opened = open_store(store, "train")
    monkeypatch.setattr("difftx.files.RETRY_SECONDS", (0.0,))
    monkeypatch.setattr("difftx.files.open_file", fail)
    with pytest.raises(UnreadableError, match=r"00000\.offsets cannot be read: Input/output error"):
        _ = opened.offsets
    monkeypatch.undo()
    shard_file(store, "train", 0, "offsets").unlink()
    with pytest.raises(UserError, match=r"00000\.offsets: missing; restore it"):
        _ = opened.offsets


@pytest.mark.parametrize("kind", ["tokens", "offsets", "ids"])
def test_a_flipped_bit_is_found(store, config, kind, capsys):
    assert data_command(["verify", str(store)]) == 0
    corrupt_file = store / "train" / f"00001.{kind}"
    data = bytearray(corrupt_file.read_bytes())
    data[len(data) // 2] ^= 16
    corrupt_file.write_bytes(data)
    with pytest.raises(UserError, match=rf"1 problems, the first: {corrupt_file}: corrupt"):
        data_command(["verify", str(store)])
    assert "00000" not in capsys.readouterr().out
    settings = config().data
    assert load_corpus(str(store), settings, load_tokenizer("bytes"))  # By default, checksums are not verified.
    with pytest.raises(UserError, match=rf"00001\.{kind}: corrupt"):
        load_corpus(str(store), dataclasses.replace(settings, verify=True), load_tokenizer("bytes"))


def as_uint32(meta):
    meta.write_text(meta.read_text().replace("uint16", "uint32"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train/00001.tokens", Path.unlink, r"00001\.tokens: missing"),
        ("train/00001.tokens", lambda f: f.write_bytes(b"abcd"), r"00001\.tokens: 4 bytes, meta\.json says"),
        ("meta.json", Path.unlink, r"no meta\.json, so it is not a finished token store"),
        ("meta.json", lambda f: f.write_text("{"), r"meta\.json: corrupt"),
        ("meta.json", lambda f: write_record(f, {"format": 0}), r"meta\.json: not a store of format 1"),
        ("meta.json", as_uint32, r"meta\.json: corrupt"),
    ],
)
def test_incomplete_store_is_rejected(store, config, name, change, message):
    change(store / name)
    with pytest.raises(UserError, match=message):
        load_corpus(str(store), config().data, load_tokenizer("bytes"))
    with pytest.raises(UserError, match=message):
        data_command(["verify", str(store)])


def test_tokenizer_must_match_the_store(store, config):
    meta = read_meta(store)
    assert meta["tokenizer"]["vocabulary_sha256"] == load_tokenizer("bytes").fingerprint
    meta["tokenizer"] |= {"name": "other", "vocabulary_sha256": "f" * 64}
    write_meta(store, meta)
    with pytest.raises(UserError, match=r"data\.tokenizer='bytes' \(vocabulary 399f.*'other' \(vocabulary ffff"):
        load_corpus(str(store), config().data, load_tokenizer("bytes"))


def test_show_prints_a_row_with_its_boundaries(prepared, capsys):
    tokens, offsets = whole(prepared, "valid")
    start, stop = 100, 200
    assert data_command(["show", str(prepared), "--row=1", "--split=valid", "--sequence_length=100"]) == 0
    shown = capsys.readouterr().out
    first = int(np.searchsorted(offsets, start, side="right")) - 1
    documents = [(a, b) for a, b in itertools.pairwise(offsets.tolist()) if a < stop and b > start]
    assert shown.count("── document") == len(documents) > 1
    assert "\x1b" not in shown  # The output is not a terminal, and escape characters of the text are shown as \x1b.
    body = "\n".join(line for line in shown.splitlines() if not line.startswith("──"))
    expected = bytes(t for t in tokens[start:stop].astype(np.uint16).tolist() if t < 256).decode(errors="replace")
    assert body.replace("<|endoftext|>", "").replace("\n", "") == expected.replace("\x1b", "\\x1b")
    assert f"(n{TEXTS.index(decode(tokens, offsets, first))})" in shown
    with pytest.raises(UserError, match="--row=99999: valid has rows 0"):
        data_command(["show", str(prepared), "--row=99999", "--split=valid"])


def decode(tokens, offsets, document):
    return bytes(tokens[int(offsets[document]) : int(offsets[document + 1]) - 1].astype(np.uint8)).decode()
