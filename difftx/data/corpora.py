"""Text on disk as token corpora, split into training and validation documents."""

import dataclasses
import functools
import glob
import hashlib
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiktoken

from difftx.config import DataConfig
from difftx.errors import UserError

STDLIB = "stdlib"
# Not prose nor programs: tests, installed packages, character tables and generated text.
STDLIB_WITHOUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}

# Longer texts are cut at line ends, so that one large file can be split into training and validation too.
DOCUMENT_BYTES = 65_536


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """Tokenised documents end to end, each followed by the end-of-text token."""

    tokens: np.ndarray  # uint16 where the vocabulary allows, else uint32.
    offsets: np.ndarray  # uint64: where each document starts, and the end.

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens."""
        return hashlib.sha256(self.tokens).hexdigest()

    def __len__(self) -> int:
        return len(self.tokens)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start … stop - 1."""
        return self.tokens[start:stop]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A training set and validation sets by name."""

    train: TokenStore
    valid: dict[str, TokenStore]
    sha256: str  # Of all tokens, training first.


def load_corpus(config: DataConfig, encoding: tiktoken.Encoding) -> Corpus:
    """Read, split and tokenise `config.path`. The same text gives the same corpus in any order of files.

    Raises:
        UserError: no path, no file, text that is not UTF-8, or too little text to split.
    """
    documents = {}  # By hash: exact duplicates count once, and the order is that of the hashes.
    for text in _documents(config.path):
        documents[hashlib.sha256(text.encode()).digest()] = text
    held_out = math.ceil(config.valid_fraction * len(documents))
    if len(documents) < 2:
        raise UserError(
            f"data.path={config.path!r}: {len(documents)} document of at most {DOCUMENT_BYTES} bytes; "
            "at least 2 are needed, one to train and one to validate on"
        )
    texts = [documents[digest] for digest in sorted(documents)]
    valid, train = _tokenise(texts[:held_out], encoding), _tokenise(texts[held_out:], encoding)
    for name, store in {"training": train, "validation": valid}.items():
        if len(store) <= config.sequence_length:
            raise UserError(
                f"data.path={config.path!r}: only {len(store)} {name} tokens, less than a row of "
                f"data.sequence_length={config.sequence_length} and its last target; give more text or shorter rows"
            )
    digest = hashlib.sha256(train.tokens)
    digest.update(valid.tokens)
    return Corpus(train=train, valid={"valid": valid}, sha256=digest.hexdigest())


def text_files(path: str | None) -> list[Path]:
    """Return the files that `data.path` names: the running Python's library, a file, or a glob."""
    if path is None:
        raise UserError("data.path is not set; give a text file or a glob, --config.data.path='corpus/*.txt'")
    if path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in root.rglob("*.py") if not STDLIB_WITHOUT & set(f.relative_to(root).parts)]
        # Build settings of one machine.
        return sorted(f for f in files if not f.name.startswith("_sysconfigdata"))
    files = [Path(name) for name in sorted(glob.glob(path, recursive=True))]
    files = [f for f in files if f.is_file()]
    if not files:
        raise UserError(f"data.path={path!r}: no such file, and no file matches it as a glob")
    return files


def _documents(path: str | None) -> Iterator[str]:
    for file in text_files(path):
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: byte {error.start} is not UTF-8; convert the file, or leave it out") from error
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from error
        yield from _cut(text)


def _cut(text: str) -> Iterator[str]:
    """Cut at line ends into pieces of about `DOCUMENT_BYTES`; a longer line stays whole."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        length = len(line.encode())
        if piece and size + length > DOCUMENT_BYTES:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += length
    if piece:
        yield "".join(piece)


def _tokenise(texts: list[str], encoding: tiktoken.Encoding) -> TokenStore:
    dtype = np.uint16 if encoding.n_vocab <= 2**16 else np.uint32
    end = np.array([encoding.eot_token], dtype)
    parts = []
    for text in texts:
        # Text that spells a special token is text.
        parts += [encoding.encode_to_numpy(text, disallowed_special=()).astype(dtype), end]
    lengths = [len(tokens) + 1 for tokens in parts[::2]]
    return TokenStore(np.concatenate(parts), np.cumsum([0, *lengths], dtype=np.uint64))
