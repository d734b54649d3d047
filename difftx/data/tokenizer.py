"""Tokenizers: tiktoken encodings by name or from a file, and plain bytes."""

import base64
import functools
import hashlib
from pathlib import Path

import tiktoken

from difftx.errors import UserError, did_you_mean

BYTES = "bytes"
LARGEST_ID = 2**24 - 1  # Largest id in a .tiktoken file, because an embedding has a row for every id up to the largest.
END_OF_TEXT = "<|endoftext|>"

# The pattern by which cl100k_base splits text before it merges bytes (tiktoken's openai_public.py).
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


def load_tokenizer(name: str, *, field: str = "data.tokenizer") -> tiktoken.Encoding:
    """Return a tokenizer, or raise `UserError`. `field` is the flag or config field that names it, for messages.

    `name` is "bytes", an encoding of tiktoken such as "cl100k_base", or the path of a .tiktoken file. tiktoken
    downloads a vocabulary once and caches it in `TIKTOKEN_CACHE_DIR`. Each line of a .tiktoken file has a token in
    base64 and its id. The file defines neither a pattern nor special tokens, so text is split by the pattern of
    cl100k_base, and <|endoftext|> gets the id after the largest.
    """
    if name == BYTES:
        return _byte_encoding()
    if name.endswith(".tiktoken"):
        return _encoding_from_file(Path(name), field)
    known = tiktoken.list_encoding_names()
    if name not in known:
        hint = did_you_mean(name, [BYTES, *known])
        raise UserError(f"{field}={name!r}: no such encoding, and no .tiktoken file.{hint}")
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # Raised by the cache or by requests, whose exceptions are OSErrors.
        raise UserError(
            f"{field}={name!r}: its vocabulary is not in the cache and cannot be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder that has it, or use {field}='bytes'"
        ) from error


def token_bytes(encoding: tiktoken.Encoding) -> list[bytes | None]:
    """Return the bytes of each token id: b"" for special tokens, None for unused ids."""
    values: list[bytes | None] = [None] * encoding.n_vocab
    for value in encoding.token_byte_values():
        values[encoding.encode_single_token(value)] = value
    for special in encoding.special_tokens_set:
        values[encoding.encode_single_token(special)] = b""
    return values


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Return a SHA-256 of the vocabulary, equal if and only if every token id stands for the same text."""
    digest = hashlib.sha256()
    for value in token_bytes(encoding):
        digest.update(b"-" if value is None else len(value).to_bytes(4, "little") + value)
    return digest.hexdigest()


def _encoding_from_file(path: Path, field: str) -> tiktoken.Encoding:
    # A file of another encoding of tiktoken would need that encoding's pattern, which only loading by name provides.
    if path.stem in tiktoken.list_encoding_names() and path.stem != "cl100k_base":
        raise UserError(f"{field}={str(path)!r}: this vocabulary has a pattern of its own; use {field}={path.stem!r}")
    where = f"{field}={str(path)!r}"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror})") from error
    ranks: dict[bytes, int] = {}
    # tiktoken's own loader caches files by path, so it would not notice that a file has changed.
    for number, line in enumerate(lines, start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(f"{where}: line {number} is not a token in base64 and its id ({error})") from error
    if (largest := max(ranks.values(), default=0)) > LARGEST_ID:
        raise UserError(f"{where}: id {largest} is more than {LARGEST_ID}, the largest that is read")
    if len(set(ranks.values())) != len(ranks) or min(ranks.values(), default=0) < 0:
        raise UserError(f"{where}: two tokens have one id, or an id is negative")
    if missing := [value for value in range(256) if bytes([value]) not in ranks]:
        raise UserError(f"{where}: no token for byte {missing[0]}, so not every text can be encoded")
    special_tokens = {END_OF_TEXT: max(ranks.values()) + 1}
    return tiktoken.Encoding(path.stem, pat_str=CL100K_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens)


@functools.cache
def _byte_encoding() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        BYTES,
        # Any split yields single bytes, because there are no merges. Splits of one character are 2.6× slower.
        pat_str=r"[\s\S]{1,64}",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={END_OF_TEXT: 256},
    )
