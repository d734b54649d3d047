"""Tokenizers: tiktoken encodings, by name, by file or bytes."""

import base64
import functools
import hashlib
from pathlib import Path

import tiktoken

from difftx.errors import UserError, did_you_mean

BYTES = "bytes"
LARGEST_ID = 2**24 - 1  # Of a .tiktoken file: an embedding has a row for each id up to the largest.
END_OF_TEXT = "<|endoftext|>"

# How cl100k_base cuts text before it merges bytes (tiktoken's openai_public.py).
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


def load_tokenizer(name: str, *, field: str = "data.tokenizer") -> tiktoken.Encoding:
    """Return the encoding `name`: "bytes" (no download), one of tiktoken's, such as "cl100k_base", or a .tiktoken file.

    tiktoken downloads a vocabulary once and keeps it in `TIKTOKEN_CACHE_DIR`. A file holds a token in base64 and its id
    a line, and nothing else: text is cut by cl100k_base's pattern, and <|endoftext|> gets the id after the last.

    Args:
        name: the encoding.
        field: what the user set, for messages.

    Raises:
        UserError: no such encoding, or its vocabulary can be had neither from the cache nor from the network.
    """
    if name == BYTES:
        return _byte_encoding()
    if name.endswith(".tiktoken"):
        return _encoding_from_file(Path(name), field)
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UserError(
            f"{field}={name!r}: no such encoding, and no .tiktoken file.{did_you_mean(name, [BYTES, *known])}"
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # Of the cache, or of requests, whose errors are OSErrors.
        raise UserError(
            f"{field}={name!r}: its vocabulary is not in the cache and cannot be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder that has it, or use {field}='bytes'"
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


def _encoding_from_file(path: Path, field: str) -> tiktoken.Encoding:
    # The files of tiktoken's other encodings belong to other patterns; only the name brings the right one.
    if path.stem in tiktoken.list_encoding_names() and path.stem != "cl100k_base":
        raise UserError(f"{field}={str(path)!r}: this vocabulary has a pattern of its own; use {field}={path.stem!r}")
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{field}={str(path)!r}: cannot be read ({error.strerror})") from error
    ranks: dict[bytes, int] = {}
    # Not tiktoken's loader: it keeps a copy under the path's name, and would miss that the file has changed.
    for number, line in enumerate(lines, start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(
                f"{field}={str(path)!r}: line {number} is not a token in base64 and its id ({error})"
            ) from error
    if (largest := max(ranks.values(), default=0)) > LARGEST_ID:
        raise UserError(f"{field}={str(path)!r}: id {largest} is more than {LARGEST_ID}, the largest that is read")
    if len(set(ranks.values())) != len(ranks) or min(ranks.values(), default=0) < 0:
        raise UserError(f"{field}={str(path)!r}: two tokens have one id, or an id is negative")
    if missing := [value for value in range(256) if bytes([value]) not in ranks]:
        raise UserError(f"{field}={str(path)!r}: no token for byte {missing[0]}, so not every text can be encoded")
    special_tokens = {END_OF_TEXT: max(ranks.values()) + 1}
    return tiktoken.Encoding(path.stem, pat_str=CL100K_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens)


@functools.cache
def _byte_encoding() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        BYTES,
        # Pieces of up to 64 characters are merged by nothing, so they come out as bytes; single ones are 2.6× slower.
        pat_str=r"[\s\S]{1,64}",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={END_OF_TEXT: 256},
    )
