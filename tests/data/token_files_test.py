"""Stores made from token files: they equal the stores made from the texts."""

import io
import json
import random
import struct

import numpy as np
import pytest
from helpers.data_prepare import prepared, refused, tree
from helpers.tokenizer_files import prefixed_bytes_folder, random_strings

from difftx.data.prepare import readers, token_files
from difftx.data.prepare.readers import Fields, sources_of
from difftx.data.store import read_meta
from difftx.data.tokenizers import load_tokenizer

FLAGS = ["--valid_fraction=0.2", "--shard_tokens=3000"]


def write_npy(folder, documents, dtype):
    np.save(folder / "a.npy", np.concatenate(documents).astype(dtype))


def write_bin(folder, documents, dtype):
    (folder / "a.bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())


def index_of(documents, code=8, itemsize=2):
    """Return the .idx file of documents, each of which is a sequence or, if it is long, two (Megatron's format)."""
    lengths, bounds = [], [0]
    for document in documents:
        lengths += [len(document)] if len(document) < 50 else [50, len(document) - 50]
        bounds.append(len(lengths))
    pointers = np.cumsum([0, *lengths[:-1]], dtype="<i8") * itemsize
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    return header + np.array(lengths, "<i4").tobytes() + pointers.tobytes() + np.array(bounds, "<i8").tobytes()


def write_megatron(folder, documents, dtype):
    write_bin(folder, documents, dtype)
    code, itemsize = {"uint16": (8, 2), "int32": (4, 4)}[dtype]
    (folder / "a.idx").write_bytes(index_of(documents, code, itemsize))


FORMATS = [
    (write_npy, "int64", []),
    (write_bin, "uint16", ["--bin_dtype=uint16"]),
    (write_bin, "uint32", ["--bin_dtype=uint32"]),
    (write_megatron, "uint16", []),
    (write_megatron, "int32", []),
]


@pytest.fixture(scope="module")
def texts():
    """Return texts, one of them long, one repeated, and some empty."""
    found = list(random_strings(300))
    return [*found, "long " * 3000, found[5], "", "the end"]


@pytest.fixture(scope="module", params=["bytes", "cl100k_base", "with a prefix"])
def from_text(request, texts, tmp_path_factory):
    """Return the name of a tokenizer, the ids of each document, and the store that `prepare` makes of the texts."""
    folder, name = tmp_path_factory.mktemp("text"), request.param
    if name == "cl100k_base":
        request.getfixturevalue("tiktoken_cache")
    if name == "with a prefix":
        prefixed_bytes_folder(folder / "tokenizer")
        name = str(folder / "tokenizer")
    tokenizer = load_tokenizer(name)
    ids = [[*tokenizer.encode_prompt(text), tokenizer.eot_token] for text in texts if text]
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared(folder / "store", f"--input={folder}/in.jsonl", f"--tokenizer={name}", *FLAGS)
    return name, [np.array(each) for each in ids], folder / "store"


def without_source(store):
    content = tree(store)
    meta = json.loads(content.pop("meta.json"))
    return {name: value for name, value in meta.items() if name not in ("source", "empty", "sha256")}, content


@pytest.mark.parametrize(("write", "dtype", "flags"), FORMATS)
def test_the_store_equals_that_of_the_text(from_text, tmp_path, monkeypatch, write, dtype, flags):
    name, ids, store = from_text
    if dtype.endswith("16") and max(map(max, ids)) >= 2**16:
        pytest.skip("the ids of this tokenizer do not fit")
    monkeypatch.setattr(readers, "UNIT_BYTES", 4000)
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", ids, dtype)
    flags = [f"--tokenizer={name}", *FLAGS, *flags]
    prepared(tmp_path / "store", f"--input={tmp_path}/in", *flags)
    assert without_source(tmp_path / "store") == without_source(store)
    [file] = [each for each in (tmp_path / "in").iterdir() if each.suffix != ".idx"]
    most = sum(map(len, ids[:100]))
    prepared(tmp_path / "part", f"--input={file}", *flags, f"--max_tokens={most}")
    assert sum(each["tokens"] for each in read_meta(tmp_path / "part")["splits"].values()) <= most


def test_end_of_text_and_prefix_may_be_absent_or_come_first(tmp_path):
    """Megatron writes no end-of-text token by default, and nanochat writes one in front of each document."""
    documents = [[104, 105], [97], [98] * 70]
    with_ends = [[*each, 256] for each in documents]
    write_npy(tmp_path, with_ends, "uint16")
    flags = ["--valid_fraction=0"]
    prepared(tmp_path / "expected", f"--input={tmp_path}/a.npy", *flags)
    for name, written in {"absent": documents, "both": [documents[0], *with_ends[1:]]}.items():
        (tmp_path / name).mkdir()
        write_megatron(tmp_path / name, [np.array(each) for each in written], "uint16")
        prepared(tmp_path / name / "store", f"--input={tmp_path}/{name}/a.bin", *flags)
        assert without_source(tmp_path / name / "store") == without_source(tmp_path / "expected")
    np.save(tmp_path / "first.npy", np.concatenate([[256, *each] for each in documents]).astype(np.uint16))
    prepared(tmp_path / "first", f"--input={tmp_path}/first.npy", *flags)
    assert without_source(tmp_path / "first") == without_source(tmp_path / "expected")
    assert read_meta(tmp_path / "first")["empty"] == 1


def test_units_are_resumed_at_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "UNIT_BYTES", 200)
    draw = random.Random(0)
    documents = [[*(draw.randrange(256) for _ in range(draw.randrange(300))), 256] for _ in range(60)]
    write_npy(tmp_path, documents, "int32")
    [source] = sources_of(f"{tmp_path}/a.npy", valid=False, first_index=0)
    source = readers.dataclasses.replace(source, end_of_text=256)
    units = list(source.units(Fields("text", None)))
    assert len(units) > 20
    assert np.concatenate([unit.content.ids for unit in units]).tolist() == [id_ for each in documents for id_ in each]
    for index in (1, 7, len(units) - 1):
        rest = list(source.units(Fields("text", None), units[index - 1].end, index))
        assert [unit.content.ids.tolist() for unit in rest] == [unit.content.ids.tolist() for unit in units[index:]]


def test_a_document_longer_than_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "MAX_DOCUMENT_IDS", 250)
    monkeypatch.setattr(readers, "UNIT_BYTES", 100)
    write_npy(tmp_path, [[97] * 200 + [256], [97] * 900], "uint16")
    [source] = sources_of(f"{tmp_path}/a.npy", valid=False, first_index=0)
    source = readers.dataclasses.replace(source, end_of_text=256)
    first, last = source.units(Fields("text", None))
    assert len(first.content.ids) == 201
    assert "the document at id 201 has no end-of-text token, 256, in 250 ids" in str(last.content.files[0][1])


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


IDS = [np.array([104, 105, 256]), np.array([97, 256])]
INDEX = index_of(IDS)
RAW = np.concatenate(IDS).astype("<u2").tobytes()
FLOATS = np.zeros(3)
# Files by name, flags, and the part of the line that names file, value and fix.
BROKEN = [
    ({"a.bin": RAW}, [], "a.bin: raw ids without an .idx file; set --bin_dtype=uint16 or"),
    ({"a.bin": RAW + b"x"}, ["--bin_dtype=uint16"], "a.bin: 11 bytes, not 10 bytes for 5 ids of uint16"),
    ({"a.npy": npy(np.array([97, -1]))}, [], "a.npy: id 1 is -1, which --tokenizer=bytes does not have"),
    ({"a.npy": npy(FLOATS)}, [], "a.npy: an array of shape (3,) and dtype float64; write one row"),
    ({"a.npy": RAW}, [], "a.npy: not a file of numpy (the magic string is not correct"),
    ({"a.npy": npy(np.zeros(0, int))}, [], "a.npy: the file has no ids"),
    ({"a.npy.gz": RAW}, [], "a.npy.gz: token files are read by parts; decompress it"),
    ({"a.bin": RAW, "a.idx": INDEX[:-8]}, [], "a.idx: not a complete index of Megatron (buffer is smaller"),
    ({"a.bin": RAW, "a.idx": INDEX[:42] + b"\x02" + INDEX[43:]}, [], "(its sequences do not follow each other)"),
    ({"a.bin": RAW, "a.idx": INDEX[:-8] + INDEX[-16:-8]}, [], "(its documents do not cover the sequences)"),
    ({"a.bin": RAW, "a.idx": b"TNTIDX\0\0\0" + INDEX[9:]}, [], "a.idx: not a complete index of Megatron (magic"),
    ({"a.npy": npy(IDS[0])}, ["--prompt_field=q"], "a.npy: a token file has no field 'q'; remove the flag"),
    ({"a.npy": npy(IDS[0])}, ["--max_tokens=2"], "--max_tokens=2: the first document has 3 tokens; give more"),
    ({"a.npy": npy(IDS[0])}, ["--max_tokens=1.5"], "--max_tokens=1.5: must be a whole number"),
]


@pytest.mark.parametrize(("files", "flags", "message"), BROKEN)
def test_broken_files_end_in_one_line(tmp_path, files, flags, message):
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_bytes(content)
    line = refused(tmp_path / "store", f"--input={tmp_path}/in", *flags)
    assert message in line.replace(f"{tmp_path}/in/", "")
