"""Sources of a data config: mixture, upsampling, validation sets and signature."""

import dataclasses

import numpy as np
import pytest
from helpers.data_loaders import loader_of

from difftx.config.data import SourceConfig, StageConfig, UpsamplingConfig
from difftx.data.mixture import BLOCK_ROWS
from difftx.data.sources import load_sources
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError

ENCODING = load_tokenizer("bytes")
LENGTH = 16


@pytest.fixture
def data_of(config, tmp_path):
    """Return a function that makes a data config with a source of letters and one of digits, in short documents."""
    for name, alphabet in (("letters", "abcdefgh"), ("digits", "0123456789")):
        rng = np.random.default_rng(0)
        (tmp_path / name).mkdir()
        for i in range(60):
            text = "".join(rng.choice(list(alphabet), rng.integers(5, 90)))
            (tmp_path / name / f"{i}.txt").write_text(text)

    def make(weights=(3.0, 1.0), **changes):
        sources = tuple(
            SourceConfig(name=name, path=str(tmp_path / name / "*.txt"), weight=weight)
            for name, weight in zip(("letters", "digits"), weights, strict=True)
        )
        options = {"path": None, "sources": sources, "sequence_length": LENGTH, "valid_fraction": 0.2}
        options |= {"cache_path": str(tmp_path / "cache")} | changes
        return dataclasses.replace(config().data, **options)

    return make


def is_digits(row):
    padding_or_end = (row["tokens"] == 0) | (row["tokens"] == ENCODING.eot_token)
    return bytes(row["tokens"][~padding_or_end].astype(np.uint8)).isdigit()


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_mixture_follows_its_weights_and_has_a_validation_set_per_source(data_of, packing):
    stages = (StageConfig(from_tokens=2 * BLOCK_ROWS * LENGTH, weights=(0.0, 1.0)),)
    sources = load_sources(data_of(packing=packing, document_mask=False, stages=stages), ENCODING)
    rows = [sources.examples[i] for i in range(3 * BLOCK_ROWS)]
    digits = [is_digits(row) for row in rows]
    assert [sum(digits[b * BLOCK_ROWS :][:BLOCK_ROWS]) for b in range(3)] == [64, 64, 256]
    assert list(sources.valid) == ["letters", "digits"]
    assert is_digits(sources.valid["digits"][0])
    assert not is_digits(sources.valid["letters"][0])
    for i in range(0, 3 * BLOCK_ROWS, 7):
        name, number = sources.where(i).split(": row ")
        [train] = [train for train in sources.train.values() if train.name == name]
        np.testing.assert_array_equal(train[int(number)]["tokens"], rows[i]["tokens"])
    epochs = sources.epochs(3 * BLOCK_ROWS)
    assert epochs["letters"] == 384 / len(sources.train["letters"])
    assert epochs["digits"] == 384 / len(sources.train["digits"])


def test_a_source_of_weight_zero_is_for_validation_only(data_of):
    sources = load_sources(data_of(weights=(0.0, 1.0)), ENCODING)
    assert all(is_digits(sources.examples[i]) for i in range(BLOCK_ROWS))
    assert not is_digits(sources.valid["letters"][0])


def test_upsampling_and_packing_are_reported_and_leave_validation_alone(data_of):
    plain = load_sources(data_of(packing="best_fit"), ENCODING)
    upsampling = UpsamplingConfig(longer_than_tokens=60, share=0.8)
    sources = load_sources(data_of(packing="best_fit", upsampling=upsampling), ENCODING)
    assert sources.notes[0].startswith("letters: documents of more than 60 tokens: ")
    assert "→ 8" in sources.notes[0] or "→ 7" in sources.notes[0]
    assert sources.notes[3].startswith("digits: packed into ")
    assert sources.valid["digits"].fingerprint == plain.valid["digits"].fingerprint
    assert sources.train["digits"].fingerprint != plain.train["digits"].fingerprint


def test_upsampling_that_leaves_less_than_a_row_is_refused(config, tmp_path):
    """Of 1,700 tokens to train on, up-sampling leaves out a document of 600. The text of 7s has the lowest hash."""
    for character, size in (("7", 1499), ("!", 699), ("K", 599), *((f"{i}", 99) for i in range(4))):
        (tmp_path / f"{character}.txt").write_text(character * size)
    upsampling = UpsamplingConfig(longer_than_tokens=650, share=0.5)
    changes = {"path": f"{tmp_path}/*.txt", "sequence_length": 1250, "upsampling": upsampling}
    data = dataclasses.replace(config().data, **changes)
    message = "only 1100 training tokens after data.upsampling, less than a row of data.sequence_length=1250"
    with pytest.raises(UserError, match=message):
        load_sources(data, ENCODING)


def test_every_setting_that_changes_the_examples_changes_the_signature(data_of, mesh_of, tmp_path):
    def loader_on_one(sources):
        return loader_of(sources.examples, mesh_of(), signature=sources.signature)

    state = loader_on_one(load_sources(data_of(), ENCODING)).state() | {"examples": 1024}  # Later than the stage below.
    changes = {
        "seed 0 → 5": {"seed": 5},
        "packing 'concat' → 'best_fit 1'": {"packing": "best_fit"},
        "document_mask False → True": {"document_mask": True},
        "sequence_length 16 → 8": {"sequence_length": 8},
        "weights [3.0, 1.0] → [3.0, 2.0]": {"weights": (3.0, 2.0)},
        "stages [] → [[4096, 1.0, 0.0]]": {"stages": (StageConfig(from_tokens=4096, weights=(1.0, 0.0)),)},
        "upsampling None → {'longer_than_tokens': 60, 'share': 0.8}": {
            "upsampling": UpsamplingConfig(longer_than_tokens=60, share=0.8)
        },
        "source letters ": {"valid_fraction": 0.3},
    }
    for named, change in changes.items():
        with pytest.raises(UserError) as error:
            loader_on_one(load_sources(data_of(**change), ENCODING)).restore(state)
        assert named in str(error.value)
        assert "\n" not in str(error.value)
    equal = data_of(weights=(1.0, 1.0))
    state = loader_on_one(load_sources(equal, ENCODING)).state()
    swapped = load_sources(dataclasses.replace(equal, sources=equal.sources[::-1]), ENCODING)
    with pytest.raises(UserError, match=r"order of sources \['letters', 'digits'\] → \['digits', 'letters'\]; restore"):
        loader_on_one(swapped).restore(state)
    state = loader_on_one(load_sources(data_of(), ENCODING)).state()
    (tmp_path / "digits" / "new.txt").write_text("12345")
    with pytest.raises(UserError, match=r"other data: source digits [0-9a-f]{12}… → [0-9a-f]{12}…; restore"):
        loader_on_one(load_sources(data_of(), ENCODING)).restore(state)


def test_one_path_is_one_source(config, text_file):
    data = dataclasses.replace(config().data, path=str(text_file))
    sources = load_sources(data, ENCODING)
    assert list(sources.train) == ["train"]
    assert list(sources.valid) == ["valid"]
    assert sources.epochs(len(sources.train["train"])) == {"train": 1.0}
    assert sources.notes == ()
