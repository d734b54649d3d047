import os
import shutil
from pathlib import Path

import pytest
import tiktoken
from conftest import ROOT

from difftx.data.tokenizer import fingerprint, load_tokenizer, token_bytes
from difftx.errors import UserError

VOCABULARIES = ROOT.parent / "shared" / "tiktoken"


def test_bytes_are_tokens():
    encoding = load_tokenizer("bytes")
    assert isinstance(encoding, tiktoken.Encoding)
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    text = "naïve € 😀\n\t<|endoftext|> end" + "x" * 300
    tokens = encoding.encode(text, disallowed_special=())
    assert bytes(tokens) == text.encode()
    assert encoding.decode(tokens) == text
    assert token_bytes(encoding) == [bytes([i]) for i in range(256)] + [b""]


@pytest.mark.skipif(not VOCABULARIES.is_dir(), reason="needs the vocabularies of ../shared/tiktoken")
@pytest.mark.parametrize(("name", "size"), [("cl100k_base", 100_277), ("gpt2", 50_257)])
def test_vocabularies_by_name(tmp_path: Path, monkeypatch, name, size):
    shutil.copytree(VOCABULARIES, tmp_path / "cache", copy_function=shutil.copyfile)
    os.chmod(tmp_path / "cache", 0o755)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    encoding = load_tokenizer(name)
    assert encoding.n_vocab == size
    values = token_bytes(encoding)
    text = "Differential attention amplifies attention to the relevant context."
    assert b"".join(values[t] or b"" for t in encoding.encode(text)) == text.encode()
    assert fingerprint(encoding) != fingerprint(load_tokenizer("bytes"))


def test_an_unknown_name_suggests_one():
    with pytest.raises(UserError, match="Did you mean 'cl100k_base'"):
        load_tokenizer("cl100k")


def test_a_vocabulary_that_cannot_be_had_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # Nothing listens there.
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR") as error:
        load_tokenizer("p50k_base")
    assert "\n" not in str(error.value)
