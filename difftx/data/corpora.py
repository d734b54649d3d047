"""Corpora of training and validation documents: prepared token stores, or text tokenised in memory."""

import glob
import hashlib
import math
import shlex
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiktoken

from difftx.config.data import DataConfig
from difftx.data.store import SPLITS, TokenStore, open_store, store_tokenizer
from difftx.data.streams import OPENERS
from difftx.data.tokenizer import fingerprint
from difftx.errors import UserError

STDLIB = "stdlib"
# Folders of the standard library that the corpus excludes: tests, installed packages, character tables, generated text.
STDLIB_WITHOUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
# Suffixes that only `difftx prepare` reads. `.json` is not among them, because such a file may be plain text.
NOT_PLAIN_TEXT = (*OPENERS, ".jsonl", ".ndjson", ".parquet")
# Longer texts are split at line ends, so that even a single file yields both training and validation documents.
DOCUMENT_BYTES = 65_536


def load_corpus(config: DataConfig, encoding: tiktoken.Encoding) -> tuple[TokenStore, TokenStore]:
    """Return training and validation documents: those of the store at `config.path`, or of the text there, tokenised.

    Raises:
        UserError: If the path is missing, if the text is too short or not UTF-8, or if the store is unfinished, corrupt
            or made with another tokenizer. Without `config.verify`, only file sizes are checked for corruption.
    """
    if config.path is not None and Path(config.path).is_dir():
        train, valid = (open_split(config, config.path, split, encoding) for split in SPLITS)
    else:
        train, valid = _tokenise_text(config, encoding)
    for name, store in {"training": train, "validation": valid}.items():
        if len(store) <= config.sequence_length:
            raise UserError(
                f"data.path={config.path!r}: only {len(store)} {name} tokens, less than a row of "
                f"data.sequence_length={config.sequence_length} and its last target; give more text or shorter rows"
            )
    return train, valid


def open_split(
    config: DataConfig, path: str, split: str, encoding: tiktoken.Encoding, field: str = "data.path"
) -> TokenStore:
    """Open a split of the store at `path`, the value of the config field `field`.

    Raises:
        UserError: If `path` is not a store, or if the store is corrupt or made with another tokenizer. Without
            `config.verify`, only file sizes are checked for corruption.
    """
    name, vocabulary = store_tokenizer(path)
    if vocabulary != fingerprint(encoding):
        raise UserError(
            f"data.tokenizer={config.tokenizer!r} (vocabulary {fingerprint(encoding)[:12]}) is not that of the store "
            f"{field}={path!r}: {name!r} (vocabulary {vocabulary[:12]}); set data.tokenizer, or prepare again"
        )
    return open_store(path, split, verify=config.verify)


def _tokenise_text(config: DataConfig, encoding: tiktoken.Encoding) -> tuple[TokenStore, TokenStore]:
    # Keyed by hash, which removes exact duplicates and makes the split independent of the order of the files.
    documents = {hashlib.sha256(text.encode()).digest(): text for text in read_texts(config.path)}
    held_out = math.ceil(config.valid_fraction * len(documents))
    if len(documents) < 2:
        raise UserError(
            f"data.path={config.path!r}: {len(documents)} document of at most {DOCUMENT_BYTES} bytes; "
            "at least 2 are needed, one to train and one to validate on"
        )
    texts = [documents[digest] for digest in sorted(documents)]
    name = f"data.path={config.path!r}"
    return _tokenise(texts[held_out:], encoding, name), _tokenise(texts[:held_out], encoding, name)


def text_files(path: str | None, field: str = "data.path") -> list[Path]:
    """Return the files of a path: the running Python's library for "stdlib", else a file or the matches of a glob."""
    if path is None:
        raise UserError(f"{field} is not set; give a store, a text file or a glob, --config.{field}='corpus/*.txt'")
    if path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in root.rglob("*.py") if not STDLIB_WITHOUT & set(f.relative_to(root).parts)]
        # `_sysconfigdata` files hold the build settings of one machine.
        return sorted(f for f in files if not f.name.startswith("_sysconfigdata"))
    files = [Path(name) for name in sorted(glob.glob(path, recursive=True))]
    files = [f for f in files if f.is_file()]
    if not files:
        raise UserError(f"{field}={path!r}: no such file, and no file matches it as a glob")
    return files


def read_texts(path: str | None, field: str = "data.path") -> Iterator[str]:
    """Yield the texts of the files of a path, split into documents of about `DOCUMENT_BYTES`.

    Raises:
        UserError: If there is no such file, or if a file cannot be read or is not plain text in UTF-8.
    """
    for file in text_files(path, field):
        if file.suffix in NOT_PLAIN_TEXT:
            raise UserError(
                f"{field}={path!r}: {file.name} is not plain text; make a store of it, `python -m difftx prepare "
                f"--input={shlex.quote(str(path))} --tokenizer=TOKENIZER --out=FOLDER`, and set {field}=FOLDER"
            )
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: byte {error.start} is not UTF-8; convert the file, or leave it out") from error
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from error
        yield from _split_at_line_ends(text)


def _split_at_line_ends(text: str) -> Iterator[str]:
    """Split a text into documents of at most `DOCUMENT_BYTES`. A longer line stays whole."""
    document: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        length = len(line.encode())
        if document and size + length > DOCUMENT_BYTES:
            yield "".join(document)
            document, size = [], 0
        document.append(line)
        size += length
    if document:
        yield "".join(document)


def _tokenise(texts: list[str], encoding: tiktoken.Encoding, name: str) -> TokenStore:
    dtype = np.uint16 if encoding.n_vocab <= 2**16 else np.uint32
    end = np.array([encoding.eot_token], dtype)
    parts = []
    for text in texts:
        # Encode text that looks like a special token as ordinary text.
        parts += [encoding.encode_to_numpy(text, disallowed_special=()).astype(dtype), end]
    lengths = [len(tokens) + 1 for tokens in parts[::2]]
    return TokenStore(np.concatenate(parts), np.cumsum([0, *lengths], dtype=np.uint64), name=name)
