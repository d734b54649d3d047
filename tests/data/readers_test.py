"""Readers of `difftx prepare`: units of JSON Lines, text, Parquet and datasets."""

import gzip
import json
import lzma
import random
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.data.prepare import readers
from difftx.data.prepare.readers import Document, Fields, sources_of
from difftx.data.records import read_records, zstd
from difftx.data.sources import read_texts
from difftx.errors import UserError

FIELDS = Fields("text", "id")
WRITERS = {"": open, ".gz": gzip.open, ".zst": zstd.open, ".xz": lzma.open}


def read(path, fields=FIELDS):
    sources = sources_of(str(path), valid=False, first_index=0)
    return [d for source in sources for unit in source.units(fields) for d in unit.content.documents(fields)]


def write_lines(path, records, suffix=""):
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    with WRITERS[suffix](path, "wb") as file:
        file.write(data)


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=30),
    unit_bytes=st.integers(1, 400),
    suffix=st.sampled_from(list(WRITERS)),
    final_newline=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_units_of_any_size_hold_every_line_once_and_resume_anywhere(
    tmp_path_factory, texts, unit_bytes, suffix, final_newline
):
    path = tmp_path_factory.mktemp("lines") / f"a.jsonl{suffix}"
    data = "\n".join(json.dumps({"text": t, "id": i}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts))
    with WRITERS[suffix](path, "wb") as file:
        file.write((data + "\n" * final_newline).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "UNIT_BYTES", unit_bytes)
        [source] = sources_of(str(path), valid=False, first_index=0)
        units = list(source.units(FIELDS))
        documents = [d for unit in units for d in unit.content.documents(FIELDS)]
        assert [(d.text, d.utf8, d.id) for d in documents] == [(t, t.encode(), str(i)) for i, t in enumerate(texts)]
        assert [unit.last for unit in units] == [False] * (len(units) - 1) + [True]
        assert sum(unit.input_bytes for unit in units) == source.size == path.stat().st_size
        for i, unit in enumerate(units[:-1], start=1):
            rest = list(source.units(FIELDS, unit.end, i))
            assert [(u.index, u.content) for u in rest] == [(u.index, u.content) for u in units[i:]]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "UNIT_BYTES", 10)
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("left out")
    (tmp_path / "a.py").write_text("print('naïve')\n")
    (tmp_path / "b" / "one.txt").write_text("one")
    (tmp_path / "b" / "two.md").write_text("two")
    with gzip.open(tmp_path / "c.txt.gz", "wb") as file:
        file.write(b"three")
    write_lines(tmp_path / "d.JSONL", [{"text": "four", "id": 4}, {"text": "five", "id": 5}])
    documents = read(tmp_path)
    assert [d.text for d in documents] == ["print('naïve')\n", "one", "two", "three", "four", "five"]
    assert [d.id for d in documents[:2]] == [str(tmp_path / "a.py"), str(tmp_path / "b" / "one.txt")]
    assert [d.text for d in read(tmp_path / "**" / "*.txt")] == ["one"]


def test_descriptions_of_data_sets_are_left_out_of_folders(tmp_path, capsys):
    """A file and a glob are read as they are."""
    folder = tmp_path / "set"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [{"text": "data", "id": 1}])
    for name in readers.DESCRIPTIONS:
        (folder / name).write_text("# Card\n")
    assert [d.text for d in read(tmp_path)] == ["data"]
    assert f"--input={tmp_path}: left out of the folder, because they describe" in (out := capsys.readouterr().out)
    assert f"{folder}/README.md" in out
    for explicit in (folder / "README.md", folder / "*.md"):
        assert [d.text for d in read(explicit)] == ["# Card\n"]


def test_small_files_with_much_text_are_several_units(tmp_path, monkeypatch):
    """A unit has at most `UNIT_BYTES` of text and one file more, and reading may resume at each."""
    monkeypatch.setattr(readers, "UNIT_BYTES", 2500)
    for i in range(10):
        with gzip.open(tmp_path / f"{i}.txt.gz", "wb") as file:
            file.write(b"%d" % i * 1000)
    (tmp_path / "5.txt.gz").write_bytes(b"corrupt")
    [source] = sources_of(str(tmp_path), valid=False, first_index=0)
    units = list(source.units(FIELDS))
    documents = [d for unit in units for d in unit.content.documents(FIELDS)]
    assert [d.text[0] if isinstance(d, Document) else "corrupt" for d in documents] == [*"01234", "corrupt", *"6789"]
    assert [len(unit.content.files) for unit in units] == [3, 4, 3]
    assert [(unit.end, unit.last) for unit in units] == [(3, False), (7, False), (10, True)]
    assert sum(unit.input_bytes for unit in units) <= source.size
    for i, unit in enumerate(units[:-1], start=1):
        assert [str(u.content) for u in source.units(FIELDS, unit.end, i)] == [str(u.content) for u in units[i:]]


@pytest.mark.parametrize("suffix", list(WRITERS))
def test_byte_order_marks_are_not_part_of_the_text(tmp_path, suffix):
    for name, text in {"a.jsonl": '{"text": "x", "id": 1}\r\n\r\n{"text": "y", "id": 2}', "b.txt": "z\ufeff"}.items():
        with WRITERS[suffix](tmp_path / f"{name}{suffix}", "wb") as file:
            file.write(text.encode("utf-8-sig"))
    found = read(tmp_path)
    assert [d.text for d in found] == ["x", "y", "z\ufeff"]
    assert [d.utf8 for d in found] == [d.text.encode() for d in found]
    if not suffix:
        assert list(read_texts(str(tmp_path / "b.txt"))) == ["z\ufeff"]
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfab\xff")
    assert str(read(tmp_path / "c.txt")[0]).endswith("byte 5 is not UTF-8")


def test_the_largest_zstd_window_is_read(tmp_path):
    """The frame is made by hand from RFC 8878, as `zstd --long=31` writes it."""
    line = b'{"text": "x", "id": 1}'
    header = b"\x28\xb5\x2f\xfd\0" + bytes([(31 - 10) << 3])  # A raw block follows.
    for name in ("a.jsonl.zst", "a.txt.zst"):
        (tmp_path / name).write_bytes(header + (len(line) << 3 | 1).to_bytes(3, "little") + line)
    assert [d.text for d in read(tmp_path)] == ["x", line.decode()]
    assert [record.values["text"] for record in read_records(tmp_path / "a.jsonl.zst", field="f", what="w")] == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut off', "line 3: broken JSON"),
        (b'"only a string"', "line 3: not a JSON object"),
        (b'{"content": "x"}', "line 3: no field 'text'; its fields: 'content'; choose with --text_field"),
        (b'{"text": "x"}', "line 3: no field 'id'; choose with --id_field"),
        (b'{"text": null, "id": 1}', "line 3: field 'text' is not text but NoneType"),
        (b'{"text": "a\\ud800", "id": 1}', "line 3: character 1 is half of a surrogate pair"),
        (b'{"text": "a\xff", "id": 1}', "line 3: byte 61 of the file is not UTF-8"),
        (b"[" * 100_000, "line 3: broken JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, monkeypatch, line, message):
    monkeypatch.setattr(readers, "UNIT_BYTES", 1)
    good = [json.dumps({"text": text, "id": text}).encode() for text in ("a", "b", "c")]
    assert len(good[0] + good[1]) + 2 == 50
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b"\n".join([good[0], good[1], line, good[2]]))
    found = read(tmp_path / "a.jsonl.gz")
    assert [d.text for d in found if isinstance(d, Document)] == ["a", "b", "c"]
    [problem] = [d for d in found if isinstance(d, UserError)]
    assert str(problem).startswith(f"{tmp_path}/a.jsonl.gz: ")
    assert message in str(problem)
    assert "\n" not in str(problem)


@pytest.mark.parametrize(("kind", "suffix"), [("jsonl", ".zst"), ("txt", ".xz")])
def test_truncated_file_yields_its_complete_units_and_then_an_error(tmp_path, monkeypatch, suffix, kind):
    monkeypatch.setattr(readers, "UNIT_BYTES", 2000)
    path = tmp_path / f"a.{kind}{suffix}"
    # The text compresses badly, so that much of it can be read before the truncation.
    noise = random.Random(1)
    write_lines(path, [{"text": noise.randbytes(200).hex(), "id": i} for i in range(800)], suffix)
    path.write_bytes(path.read_bytes()[:-100])
    *good, problem = read(path)
    assert isinstance(problem, UserError)
    assert "the compressed file is truncated" in str(problem)
    assert all(isinstance(d, Document) for d in good)
    assert (len(good) > 0) == (kind == "jsonl")


def test_corrupt_and_empty_files_are_named(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b'{"text": "x", "id": 1}\n' * 5000)
    data = bytearray((tmp_path / "a.jsonl.gz").read_bytes())
    data[-6] ^= 1  # A byte of the CRC.
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "c.txt").touch()
    (tmp_path / "d.txt").write_bytes(b"ab\xffc")
    problems = [str(d) for d in read(tmp_path) if isinstance(d, UserError)]
    expected = [
        "a.jsonl.gz: the compressed file is corrupt",
        "b.jsonl: the file is empty",
        "c.txt: the file is empty",
        "d.txt: byte 2 is not UTF-8",
    ]
    assert len(problems) == 4
    assert all(message in problem for message, problem in zip(expected, problems, strict=True))


def test_parquet_is_read_in_units_that_contain_every_row_once(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(readers, "UNIT_BYTES", 100)
    texts = [f"text {i} " * (i % 7) for i in range(300)]
    table = pyarrow.table({"text": texts, "id": list(range(300)), "other": [0.5] * 300})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=40)
    [source] = sources_of(str(tmp_path), valid=False, first_index=0)
    units = list(source.units(FIELDS))
    assert len(units) > 50
    assert [(d.text, d.id) for u in units for d in u.content.documents(FIELDS)] == [
        (t, str(i)) for i, t in enumerate(texts)
    ]
    for i in (1, 10, len(units) - 1):
        rest = list(source.units(FIELDS, units[i - 1].end, i))
        assert rest == units[i:]
    [problem] = {str(d) for d in read(tmp_path, Fields("content", None))[:1]}
    assert "row 0: no field 'content'; its fields: 'text', 'id', 'other'; choose with --text_field" in problem
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    [problem] = read(tmp_path)
    assert "not readable as Parquet" in str(problem)


def test_a_reader_of_an_extension_may_find_text_that_is_not_utf8(tmp_path, monkeypatch):
    """A reader as in docs/extend.md."""

    def read_table(source, fields, position):
        rows = [{"text": line, "id": line} for line in source.files[0].read_text("utf-8").splitlines()]
        yield from readers.read_rows(source, iter(rows[position:]), position, len(rows), fields)

    monkeypatch.setitem(readers.READERS._entries, "tab", read_table)
    (tmp_path / "a.tab").write_bytes(b"caf\xc3\xa9")
    (tmp_path / "b.tab").write_bytes(b"caf\xe9\n")
    document, problem = read(tmp_path)
    assert document.text == "café"
    assert str(problem) == f"{tmp_path}/b.tab: the file has text that is not UTF-8 (invalid continuation byte)"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b", ("a/b", None, "train")),
        ("a/b:test", ("a/b", None, "test")),
        ("a/b:train:small", ("a/b", "small", "train")),
        ("a/b:train[:10%]+test[5:]:small", ("a/b", "small", "train[:10%]+test[5:]")),
    ],
)
def test_the_parts_of_the_name_of_a_hugging_face_dataset(monkeypatch, name, expected):
    library = types.SimpleNamespace(load_dataset=lambda name, config, split: (name, config, split))
    monkeypatch.setattr(readers, "import_extra", lambda *_: library)
    assert readers.load_hugging_face.__wrapped__(name) == expected


@pytest.mark.long  # The import of the library takes seconds.
def test_a_hugging_face_dataset(tmp_path):
    data_files = pytest.importorskip("datasets.data_files", reason="make test installs the extra datasets")
    assert set(data_files.FILES_TO_IGNORE) - {"dummy_data.zip"} == readers.DESCRIPTIONS
    write_lines(tmp_path / "a.jsonl", [{"text": f"text {i}", "id": i} for i in range(20)])
    documents = read(f"hf:{tmp_path}:train")
    assert [(d.text, d.id) for d in documents] == [(f"text {i}", str(i)) for i in range(20)]
    with pytest.raises(UserError, match="--input=hf:no/such"):
        read("hf:no/such")
