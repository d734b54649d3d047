"""The base class of tokenizers, and the tiktoken tokenizers: encodings from a file, and plain bytes."""

import abc
import base64
import functools
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tiktoken

from difftx.errors import UserError, read_error

if TYPE_CHECKING:
    from difftx.data.chat_template import ChatTemplate, Message

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
PART_CHARACTERS = 2**18  # Length of the parts into which a text is split if tiktoken cannot encode it whole.

# Pattern with which cl100k_base splits text before it merges bytes (tiktoken's openai_public.py).
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


class Tokenizer(abc.ABC):
    """Convert text to token ids and back. Each family of tokenizers is a subclass."""

    name: str
    library: str  # Name of the package that encodes.
    n_vocab: int  # Largest id plus one.
    eot_token: int  # Id of the end-of-text token, which follows each document.
    prefix: tuple[int, ...] = ()  # Ids before each document and each prompt, such as Llama's <s>.
    chat_template: "ChatTemplate | None" = None

    @abc.abstractmethod
    def encode_ordinary(self, text: str, *, continues: bool = False) -> list[int]:
        """Return the ids of a text. Names of special tokens are encoded as ordinary text.

        If the text `continues` another one, do not add the leading space that some tokenizers put before a text.
        """

    @abc.abstractmethod
    def encode_chat(self, text: str, *, continues: bool = False) -> list[int]:
        """Return the ids of text written by a chat template. Names of special tokens become these tokens."""

    @abc.abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Decode ids to text. Special tokens become their names, and bytes that are not UTF-8 become U+FFFD."""

    @functools.cached_property
    @abc.abstractmethod
    def token_bytes(self) -> list[bytes | None]:
        """Bytes of each id within a text. b"" for special tokens, None for unused ids."""

    @functools.cached_property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A SHA-256 that changes if any id stands for different text, or any text has different ids."""

    def encode_to_numpy(self, text: str, *, continues: bool = False) -> np.ndarray:
        """Return the result of `encode_ordinary` as a uint32 array."""
        return np.array(self.encode_ordinary(text, continues=continues), np.uint32)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, preceded by `prefix`."""
        return [*self.prefix, *self.encode_ordinary(text)]

    def encode_messages(self, messages: "Sequence[Message]", field: str) -> list[int]:
        """Return the ids of a conversation and the start of the next message. Errors call the conversation `field`."""
        return self.encode_chat(self.require_chat_template(field).render(messages, add_generation_prompt=True))

    def require_chat_template(self, field: str) -> "ChatTemplate":
        """Return the chat template. If there is none, raise a `UserError` that says that `field` requires it."""
        if self.chat_template is None:
            raise UserError(
                f"{field} needs a chat template, and the tokenizer {self.name!r} has none; use the folder of a "
                "tokenizer with chat_template.jinja, or with chat_template in tokenizer_config.json"
            )
        return self.chat_template


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding."""

    library = "tiktoken"

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding, self.name = encoding, encoding.name
        self.n_vocab, self.eot_token = encoding.n_vocab, encoding.eot_token

    def encode_to_numpy(self, text: str, *, continues: bool = False) -> np.ndarray:
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # The regex engine fails for half of a surrogate pair, or a million spaces in a row.
            parts = map("".join, itertools.batched(without_surrogates(text), PART_CHARACTERS))
            return np.concatenate([self.encoding.encode_to_numpy(part, disallowed_special=()) for part in parts])

    def encode_ordinary(self, text: str, *, continues: bool = False) -> list[int]:
        return self.encode_to_numpy(text).tolist()

    def encode_chat(self, text: str, *, continues: bool = False) -> list[int]:
        return self.encoding.encode(text, allowed_special="all")

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoding.decode(tokens)

    @functools.cached_property
    def token_bytes(self) -> list[bytes | None]:
        values: list[bytes | None] = [None] * self.n_vocab
        for value in self.encoding.token_byte_values():
            values[self.encoding.encode_single_token(value)] = value
        for special in self.encoding.special_tokens_set:
            values[self.encoding.encode_single_token(special)] = b""
        return values

    @functools.cached_property
    def fingerprint(self) -> str:
        # tiktoken's encodings all have different vocabularies, so the pattern need not be hashed.
        digest = hashlib.sha256()
        for value in self.token_bytes:
            digest.update(b"-" if value is None else len(value).to_bytes(4, "little") + value)
        return digest.hexdigest()


def without_surrogates(text: str) -> str:
    """Replace each half of a surrogate pair by U+FFFD, as tiktoken's `encode` does."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encoding_from_file(path: Path, field: str) -> tiktoken.Encoding:
    """Load the encoding in a .tiktoken file."""
    # The file of another tiktoken encoding needs that encoding's pattern, so it must be loaded by name.
    if path.stem in tiktoken.list_encoding_names() and path.stem != "cl100k_base":
        raise UserError(f"{field}={str(path)!r}: this vocabulary has a pattern of its own; use {field}={path.stem!r}")
    where = f"{field}={str(path)!r}"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise read_error(error, f"{where}: cannot be read ({error.strerror})") from error
    ranks: dict[bytes, int] = {}
    # tiktoken's own loader caches files by path, so it would miss a changed file.
    for number, line in enumerate(lines, start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(f"{where}: line {number} is not a token in base64 and its id ({error})") from error
    if len(set(ranks.values())) != len(ranks) or min(ranks.values(), default=0) < 0:
        raise UserError(f"{where}: two tokens have one id, or an id is negative")
    if missing := [value for value in range(256) if bytes([value]) not in ranks]:
        raise UserError(f"{where}: no token for byte {missing[0]}, so not every text can be encoded")
    special_tokens = {END_OF_TEXT: max(ranks.values()) + 1}
    return tiktoken.Encoding(path.stem, pat_str=CL100K_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens)


@functools.cache
def byte_encoding() -> tiktoken.Encoding:
    """Return the encoding whose tokens are single bytes."""
    return tiktoken.Encoding(
        BYTES,
        # There are no merges, so any pattern yields single bytes. Splitting into single characters is 2.6× slower.
        pat_str=r"[\s\S]{1,64}",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={END_OF_TEXT: 256},
    )
