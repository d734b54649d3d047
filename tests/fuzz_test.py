"""Hundreds of corrupt files. Each is read, or raises a `UserError` of one line."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY
from helpers.data_prepare import prepared
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from difftx.commands.data import verify
from difftx.config.recipes import load_config
from difftx.data.store import SPLITS, open_store, read_meta
from difftx.errors import UserError
from difftx.training.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    OtherFormatError,
    describe_files,
    manifest_text,
    why_invalid,
)
from difftx.training.run import read_config, write_run_files

FUZZ = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FRAGMENTS = [*(b"{", b"}", b"]", b'"', b",", b":", b"\\u", b"\xff\xfe", b"\x00", b"\n", b"1e999")]
FRAGMENTS += [b"9" * 5000]


@st.composite
def mutations(draw):
    """Return a function from valid to corrupt bytes. A seed makes each failure printable and repeatable."""
    seed, count = draw(st.integers(0, 2**32)), draw(st.integers(1, 4))

    def mutate(content):
        rng = random.Random(seed)
        for _ in range(count):
            content = mutate_bytes(content, rng)
        return content

    return mutate


def mutate_bytes(content, rng):
    content, start = bytearray(content), rng.randrange(len(content) + 1)
    stop = min(len(content), start + rng.choice([0, 1, 2, 8, 100, 10**6]))
    match rng.randrange(5):
        case 0:
            del content[start:stop]
        case 1:
            content[start:start] = rng.choice(FRAGMENTS)
        case 2:
            content[start:stop] = content[start:stop] * 2
        case 3 if content:
            content[start - 1] ^= 1 << rng.randrange(8)
        case _:
            content[start:stop] = rng.randbytes(stop - start)
    return bytes(content)


def read(reader):
    """Call a reader, which may raise nothing but a `UserError` of one line."""
    message = ""
    try:
        reader()
    except UserError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1
    assert len(message) < 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def tiny():
    return load_config(f"{ROOT / 'configs' / 'quickstart.py'}:diff", TINY)


def check(path: Path, valid: bytes, mutate, reader):
    path.write_bytes(mutate(valid))
    read(reader)


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
@FUZZ
@given(mutate=mutations())
def test_a_corrupt_file_of_a_run_is_read_or_refused_in_one_line(tmp_path, tiny, name, mutate):
    write_run_files(tmp_path, tiny)
    check(tmp_path / name, (tmp_path / name).read_bytes(), mutate, lambda: read_config(tmp_path))


@pytest.fixture(scope="module")
def checkpoint(folder, tiny):
    path = folder / "checkpoint"
    (path / "save").mkdir(parents=True)
    (path / "save" / "array").write_bytes(b"some numbers")
    text = manifest_text(
        step=7,
        weights="attempt/7",
        run_id=None,
        arrays={"params/embedding": ((4, 2), "float32")},
        config=tiny,
        loader={"signature": {"tokenizer": "bytes", "train": {"path": "abc"}}},
        contents="save",
        files=describe_files(path / "save"),
    )
    (path / MANIFEST).write_text(text)
    assert why_invalid(path, step=7, content=True) is None
    return path, (path / MANIFEST).read_bytes()


@FUZZ
@given(mutate=mutations())
def test_only_equal_content_of_a_manifest_verifies(checkpoint, mutate):
    path, valid = checkpoint
    content = mutate(valid)
    (path / MANIFEST).write_bytes(content)
    try:
        why = why_invalid(path, step=7, content=True)
    except OtherFormatError as error:
        why = str(error)
        assert json.loads(content)["format"] != FORMAT
    assert why is None or why.splitlines() == [why]
    if why is None:
        assert json.loads(content) == json.loads(valid), "a manifest that says something else has verified"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    for name in ("train", "valid"):
        (folder / f"{name}.txt").write_text(f"To be, or not to be: {name}.\n" * 40)
    prepared(folder / "store", f"--input={folder / 'train.txt'}", f"--valid_input={folder / 'valid.txt'}")
    return folder / "store", (folder / "store" / "meta.json").read_bytes()


@FUZZ
@given(mutate=mutations())
def test_metadata_of_a_store(store, mutate, capsys):
    folder, valid = store

    def use():
        for split in SPLITS:
            rows = open_store(folder, split)
            assert rows.slice(0, min(5, len(rows))).dtype in (np.uint16, np.uint32)
            assert len(rows.offsets) > 0
        assert isinstance(read_meta(folder)["tokenizer"]["vocabulary_sha256"], str)

    check(folder / "meta.json", valid, mutate, use)
    read(lambda: verify(folder))
    capsys.readouterr()
