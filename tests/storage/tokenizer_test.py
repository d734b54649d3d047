"""Tokenizers in buckets: the same ids as on a local disk, exported with the model, and named in errors."""

import base64

import pytest
from helpers.tokenizer_files import byte_level_folder

from difftx.commands import tokenizer
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.files import list_folder, read_file, upload
from difftx.interop.tokenizers import export_tokenizer

TEXT = "def main():\n    return 'é漢字🙂'"


def test_a_tiktoken_file_in_a_bucket_equals_its_local_copy(bucket, tmp_path):
    path, lines = tmp_path / "own.tiktoken", [b"%s %d" % (base64.b64encode(bytes([i])), i) for i in range(256)]
    path.write_bytes(b"\n".join([*lines, b"cmV0 256"]))
    folder = bucket.folder()
    upload(folder / path.name, path)
    here, there = load_tokenizer(str(path)), load_tokenizer(f"{folder}/{path.name}")
    assert there.fingerprint == here.fingerprint
    assert list(there.encode_to_numpy(TEXT)) == list(here.encode_to_numpy(TEXT))
    path.write_bytes(b"\n".join(lines[1:]))
    upload(folder / "bad.tiktoken", path)
    with pytest.raises(UserError, match=rf"data\.tokenizer='{folder}/bad\.tiktoken': some bytes have no token"):
        load_tokenizer(f"{folder}/bad.tiktoken")
    with pytest.raises(UserError, match=rf"data\.tokenizer='{folder}/absent\.tiktoken': cannot be read"):
        load_tokenizer(f"{folder}/absent.tiktoken")


def test_a_folder_of_hugging_face(bucket, tmp_path, config):
    pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    local, folder = byte_level_folder(tmp_path / "tokenizer"), bucket.folder()
    for path in local.iterdir():
        upload(folder / path.name, path)
    here = load_tokenizer(str(local))
    for name in (str(folder), f"{folder}/tokenizer.json"):
        there = load_tokenizer(name)
        assert there.fingerprint == here.fingerprint
        assert list(there.encode_to_numpy(TEXT)) == list(here.encode_to_numpy(TEXT))
        assert there.chat_template is not None
    (tmp_path / "export").mkdir()
    export_tokenizer(config(data__tokenizer=str(folder)), load_tokenizer(str(folder)), tmp_path / "export", "llama")
    assert {path.name for path in (tmp_path / "export").iterdir()} == {path.name for path in local.iterdir()}
    assert load_tokenizer(str(tmp_path / "export")).fingerprint == here.fingerprint


def test_a_tokenizer_trained_in_a_bucket_equals_a_local_one(bucket, tmp_path, monkeypatch):
    """Training on text in a bucket writes the same files as training on the same text on a local disk."""
    pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    folder = bucket.folder()
    upload(folder / "text.txt", tmp_path / "text.txt")
    for place in (tmp_path, folder):
        tokenizer.main(["train", f"--input={place}/text.txt", "--vocab_size=270", f"--out={place}/tokenizer"])
    names = {"tokenizer.json", "tokenizer_config.json"}
    assert set(list_folder(folder / "tokenizer")) == names
    for name in names:
        assert read_file(folder / "tokenizer" / name) == (tmp_path / "tokenizer" / name).read_bytes()
    with pytest.raises(UserError, match=r"--out=.*/tokenizer exists already"):
        tokenizer.main(["train", f"--input={folder}/text.txt", "--vocab_size=270", f"--out={folder}/tokenizer"])
