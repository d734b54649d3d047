"""Tokenizers: tiktoken encodings, by name or bytes."""

import functools
import hashlib

import tiktoken

from difftx.errors import UserError, did_you_mean

BYTES = "bytes"


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the encoding `name`: "bytes" (no download), or one of tiktoken's, such as "cl100k_base".

    tiktoken downloads a vocabulary once and keeps it in `TIKTOKEN_CACHE_DIR`.

    Raises:
        UserError: no such encoding, or its vocabulary can be had neither from the cache nor from the network.
    """
    if name == BYTES:
        return _byte_encoding()
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UserError(f"data.tokenizer={name!r}: no such encoding.{did_you_mean(name, [BYTES, *known])}")
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # Of the cache, or of requests, whose errors are OSErrors.
        raise UserError(
            f"data.tokenizer={name!r}: its vocabulary is not in the cache and cannot be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder that has it, or use data.tokenizer='bytes'"
        ) from error


def token_bytes(encoding: tiktoken.Encoding) -> list[bytes | None]:
    """Return each token's bytes: b"" for special tokens, None for ids that do not exist."""
    values: list[bytes | None] = [None] * encoding.n_vocab
    for value in encoding.token_byte_values():
        values[encoding.encode_single_token(value)] = value
    for special in encoding.special_tokens_set:
        values[encoding.encode_single_token(special)] = b""
    return values


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Return a SHA-256 of the vocabulary: ids mean the same text if and only if it is equal."""
    digest = hashlib.sha256()
    for value in token_bytes(encoding):
        digest.update(b"-" if value is None else len(value).to_bytes(4, "little") + value)
    return digest.hexdigest()


@functools.cache
def _byte_encoding() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        BYTES,
        # Pieces of up to 64 characters are merged by nothing, so they come out as bytes; single ones are 2.6× slower.
        pat_str=r"[\s\S]{1,64}",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )
