"""Stores and sources with invalid content, which are rejected with one line before the model reads the content."""

import json
import os
import shutil

import grain
import numpy as np
import pytest
from conftest import TINY
from helpers import data_prepare
from helpers.command_server import commands
from helpers.data_loaders import loader_of, sharding_on

from difftx.data.loader import ordered_batches
from difftx.data.sources import load_sources
from difftx.data.store import open_store
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    lines = (json.dumps({"text": f"document {i} says {i * i} and ends", "prompt": "p"}) + "\n" for i in range(400))
    (folder / "in.jsonl").write_text("".join(lines))
    data_prepare.prepared(
        folder / "store", f"--input={folder}/in.jsonl", "--valid_fraction=0.3", "--prompt_field=prompt"
    )
    return folder / "store"


@pytest.fixture
def store(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "store")


def set_value(file, dtype, index, value):
    """Overwrite elements of the array in a file, whose size does not change."""
    array = np.fromfile(file, dtype)
    array[index] = value
    array.tofile(file)


@pytest.mark.long
def test_a_flipped_bit_that_makes_an_unknown_id_ends_training_and_evaluation(store, tmp_path, config, mesh_of):
    ids = np.fromfile(store / "train" / "00000.tokens", "<u2")
    set_value(store / "train" / "00000.tokens", "<u2", slice(None), ids ^ (np.arange(len(ids)) == 70) * 2**15)
    flags = [f"--config.{name}={value}" for name, value in TINY.items()]
    flags += [f"--config.data.path={store}", f"--workdir={tmp_path / 'run'}", "--config.train.steps=100"]
    result = commands().run(["train.py", "--config=configs/quickstart.py", *flags])
    assert result.returncode == 2, result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith(
        f"error: {store}/train: row 2: tokens[6] is id {ids[70] + 2**15}, which model.vocab_size=264"
    )
    assert "Traceback" not in result.stderr
    set_value(store / "valid" / "00000.tokens", "<u2", 40, 264)
    sources = load_sources(config(data__path=store).data, load_tokenizer("bytes"))
    with pytest.raises(UserError, match=r"store/valid: row 1: tokens\[8\] is id 264"):
        list(
            ordered_batches(
                sources.valid["valid"], batch_rows=2, limit_tokens=640, sharding=sharding_on(mesh_of()), vocab_size=264
            )
        )


class OwnRows:
    """A user-defined source whose row 11 has an invalid target."""

    name, sequence_length, tokens, fingerprint = "own rows", 8, 160, "own"

    def __init__(self, value, dtype):
        self.value, self.dtype = value, dtype

    def __len__(self):
        return 20

    def __getitem__(self, index):
        tokens, targets = np.full((2, 8), 5, self.dtype)
        targets[3] = self.value if index == 11 else 263
        return {"tokens": tokens, "targets": targets, "loss_mask": np.ones(8, np.float32)}


@pytest.mark.parametrize(("value", "dtype"), [(264, np.int32), (-1, np.int32), (2**33, np.int64)])
def test_ids_of_a_user_defined_source_are_checked(mesh_of, value, dtype):
    examples = grain.MapDataset.source(OwnRows(value, dtype)).repeat()
    loader = loader_of(examples, mesh_of(), where=lambda example: f"example {example}")
    next(loader)
    next(loader)
    with pytest.raises(UserError, match=rf"example 11: targets\[3\] is id {value}"):
        next(loader)


@pytest.mark.parametrize(
    ("kind", "index", "value", "message"),
    [
        ("offsets", 3, 2, r"00000\.offsets: the offsets do not rise from 0 to \d+; restore it"),
        ("offsets", -1, 10**6, r"00000\.offsets: the offsets do not rise"),
        ("counted", 5, 10**6, r"store/train: the ranges that count in the loss do not rise; restore it"),
    ],
)
def test_invalid_offsets_and_ranges_are_rejected_when_a_store_is_loaded(store, config, kind, index, value, message):
    set_value(store / "train" / f"00000.{kind}", "<u8", index, value)
    with pytest.raises(UserError, match=message):
        load_sources(config(data__path=store).data, load_tokenizer("bytes"))


def test_store_that_is_truncated_while_it_is_read_is_named(store):
    opened, file = open_store(store, "train"), store / "train" / "00000.tokens"
    opened.slice(0, 10)
    os.truncate(file, 1000)
    assert len(opened.slice(400, 500)) == 100
    with pytest.raises(UserError, match=f"{file}: truncated while it was in use, before token 5000 of it; restore it"):
        opened.slice(4096, 5000)
