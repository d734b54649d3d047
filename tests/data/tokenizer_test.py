"""Tokenizers by name and by file: vocabularies of tiktoken, and their errors."""

import base64
from pathlib import Path

import pytest
from conftest import child_environment
from helpers.command_server import commands

from difftx.data.tokenizer import CL100K_PATTERN, TiktokenTokenizer
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import EXIT_FAILED, UserError


def test_bytes_are_tokens():
    encoding = load_tokenizer("bytes")
    assert isinstance(encoding, TiktokenTokenizer)
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    text = "naïve € 😀\n\t<|endoftext|> end" + "x" * 300
    tokens = encoding.encode_ordinary(text)
    assert bytes(tokens) == text.encode()
    assert encoding.decode(tokens) == text
    assert encoding.token_bytes == [bytes([i]) for i in range(256)] + [b""]


@pytest.mark.usefixtures("tiktoken_cache")
@pytest.mark.parametrize(("name", "size"), [("cl100k_base", 100_277), ("gpt2", 50_257)])
def test_a_vocabulary_is_loaded_by_its_name(name, size):
    encoding = load_tokenizer(name)
    assert encoding.n_vocab == size
    values = encoding.token_bytes
    text = "Differential attention amplifies attention to the relevant context."
    assert b"".join(values[t] or b"" for t in encoding.encode_ordinary(text)) == text.encode()
    assert encoding.fingerprint != load_tokenizer("bytes").fingerprint


@pytest.mark.usefixtures("tiktoken_cache")
def test_the_file_of_cl100k_base_gives_its_tokens(tmp_path):
    by_name = load_tokenizer("cl100k_base")
    lines = [b"%s %d" % (base64.b64encode(t), i) for i, t in enumerate(by_name.token_bytes) if t]
    (tmp_path / "cl100k_base.tiktoken").write_bytes(b"\n".join(lines))
    by_file = load_tokenizer(str(tmp_path / "cl100k_base.tiktoken"))
    text = "It's 12345 naïve\r\n\n  tests,  isn't IT?  \t" + Path(__file__).read_text()
    assert by_file.encode_ordinary(text) == by_name.encode_ordinary(text)
    assert by_name.encoding._pat_str == CL100K_PATTERN


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("own", lambda lines: [*lines, b"YWI="], "line 257 is not a token in base64 and its id"),
        ("own", lambda lines: lines[1:], "some bytes have no token"),
        ("o200k_base", lambda lines: lines, "a pattern of its own; use data.tokenizer='o200k_base'"),
    ],
)
def test_a_bad_vocabulary_file_is_named(tmp_path, name, change, message):
    path = tmp_path / f"{name}.tiktoken"
    path.write_bytes(b"\n".join(change([b"%s %d" % (base64.b64encode(bytes([i])), i) for i in range(256)])))
    with pytest.raises(UserError) as error:
        load_tokenizer(str(path))
    assert message in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("unit", [" ", "\u4e2d"])
def test_a_text_that_the_regex_engine_of_tiktoken_refuses_is_encoded_in_parts(tmp_path, unit):
    path = tmp_path / "own.tiktoken"
    path.write_bytes(b"\n".join(b"%s %d" % (base64.b64encode(bytes([i])), i) for i in range(256)))
    encoding = load_tokenizer(str(path))
    text = "one" + unit * 1_100_000 + "two"
    assert bytes(encoding.encode_to_numpy(text).astype("u1")) == text.encode()
    assert bytes(encoding.encode_ordinary(text)) == text.encode()


def test_a_failed_download_of_a_vocabulary_has_the_exit_code_of_a_restart(tmp_path):
    """A job starts again after exit code 1, and never after exit code 2."""
    environment = child_environment(1) | {"TIKTOKEN_CACHE_DIR": str(tmp_path)}
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        environment[variable] = "http://127.0.0.1:9"  # Nothing listens there.
    command = ["difftx", "train", "--config=quickstart:diff", f"--workdir={tmp_path / 'run'}"]
    result = commands().run([*command, "--config.data.tokenizer=p50k_base"], environment=environment)
    assert result.returncode == EXIT_FAILED, result.stderr
    message = result.stderr.splitlines()[-1]
    assert message.startswith("error: data.tokenizer='p50k_base': its vocabulary is not in the cache and cannot be")
    assert "TIKTOKEN_CACHE_DIR" in message
    assert "Traceback" not in result.stderr
