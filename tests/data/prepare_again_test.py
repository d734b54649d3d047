"""Repeated runs of `difftx prepare`: after its own advice, and with corrupt files of an unfinished run."""

import json

import pytest
from helpers.data_prepare import prepare, prepared, refused, texts_of, tree

from difftx.data.prepare.readers import Fields, validation_start
from difftx.data.store import open_store

FIELDS = Fields("text", None)


def test_a_single_text_gives_training_and_validation_text(tmp_path):
    text = "".join(f"line {i} costs €{i * i}\n" for i in range(3000))
    (tmp_path / "one.txt").write_text(text)
    out = tmp_path / "store"
    result = prepared(out, f"--input={tmp_path}/one.txt", "--valid_fraction=0.1")
    assert "a single text: its last 10.00% is held out for validation" in result.stdout
    [train], [valid] = (texts_of(open_store(out, split)) for split in ("train", "valid"))
    assert train + valid == text
    assert train.endswith("\n")
    assert 0.1 <= len(valid.encode()) / len(text.encode()) < 0.101
    whole = prepared(tmp_path / "whole", f"--input={tmp_path}/one.txt", "--valid_fraction=0")
    assert "held out" not in whole.stdout
    assert texts_of(open_store(tmp_path / "whole", "train")) == [text]


@pytest.mark.parametrize("text", ["ab", "€", "€€€", "a\nb", "\n\n", "title\n" + "€" * 999, "x" * 50 + "\n" + "y" * 50])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.999])
def test_the_held_out_end_begins_at_a_character_and_is_long_enough(text, share):
    data = text.encode()
    start = validation_start(data, share)
    assert data[:start].decode() + data[start:].decode() == text
    assert len(data) - start >= min(1, round(share * len(data)))
    assert start < len(data)
    assert start > 0 or share > 0.3 or len(text) == 1


def test_advice_for_too_few_documents_works_in_the_same_folder(tmp_path):
    source, valid = tmp_path / "in.jsonl", tmp_path / "valid.txt"
    source.write_text('{"text": "only one"}\n')
    valid.write_text("held out")
    for name, flag in {"a": "--valid_fraction=0", "b": f"--valid_input={valid}"}.items():
        out = tmp_path / name
        message = refused(out, f"--input={source}")
        assert "none is left to train on" in message
        assert flag.partition("=")[0] in message
        prepared(out, f"--input={source}", flag)
        assert texts_of(open_store(out, "train")) == ["only one"]
    assert texts_of(open_store(tmp_path / "b", "valid")) == ["held out"]
    out = tmp_path / "c"
    refused(out, f"--input={source}")
    source.write_text('{"text": "one"}\n{"text": "two"}\n')
    result = prepared(out, f"--input={source}")
    assert f"{source}: changed since the unfinished run; tokenising changed files again" in result.stderr
    prepared(tmp_path / "d", f"--input={source}")
    assert tree(out) == tree(tmp_path / "d")


def test_unfinished_run_resumes_with_another_fraction_and_shard_size(tmp_path):
    for name in "abc":
        lines = (json.dumps({"text": f"document {name} {i}"}) + "\n" for i in range(300))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    whole = (tmp_path / "c.jsonl").read_text()
    (tmp_path / "c.jsonl").write_text(whole + "{")
    flags = [f"--input={tmp_path}/*.jsonl"]
    out = tmp_path / "store"
    assert "c.jsonl: line 301" in refused(out, *flags)
    kept = {f: f.stat().st_mtime_ns for f in (out / ".prepare" / "units").glob("0000[01]-*.npz")}
    assert len(kept) == 2
    (out / "meta.json").mkdir()  # The run fails at its end, when all shards exist.
    (tmp_path / "c.jsonl").write_text(whole)
    changed = [*flags, "--valid_fraction=0.3", "--shard_tokens=1000"]
    assert "meta.json" in prepare(f"--out={out}", *changed).stderr
    (out / "meta.json").rmdir()
    assert {f: f.stat().st_mtime_ns for f in kept} == kept
    prepared(out, *changed)
    prepared(tmp_path / "again", *changed)
    assert tree(out) == tree(tmp_path / "again")


def test_a_corrupt_journal_of_an_unfinished_run_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("{")
    refused(tmp_path / "out", f"--input={tmp_path}/a.jsonl")
    (tmp_path / "out/.prepare/job.json").write_bytes(b"")
    line = refused(tmp_path / "out", f"--input={tmp_path}/a.jsonl")
    assert f"{tmp_path}/out/.prepare/job.json: corrupt; choose another --out, or delete" in line
