"""Load tokenizers by name: tiktoken encodings, plain bytes, tokenizer.json files and SentencePiece models."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import tiktoken

from difftx.config import Config
from difftx.data.tokenizer import BYTES, TiktokenTokenizer, Tokenizer, byte_encoding, encoding_from_file
from difftx.data.tokenizer_files import FILES, load_files
from difftx.errors import UnreadableError, UserError, did_you_mean, note_copy
from difftx.files import read_file
from difftx.storage.paths import BucketPath, is_bucket, path_of

VOCABULARY_MULTIPLE = 128  # Round a derived `model.vocab_size` up to a multiple of this, the lanes of a TPU.


def load_tokenizer(name: str, *, field: str = "data.tokenizer", end_of_text: str | None = None) -> Tokenizer:
    """Load a tokenizer. Raise `UserError` if that fails. `field` is the flag or config field with its name.

    `name` is "bytes", a tiktoken encoding such as "cl100k_base", or the path of a .tiktoken file, of a tokenizer.json
    file (ending in .json), of a SentencePiece model (ending in .model), or of a folder with one of the last two. The
    path may be in a bucket.

    tiktoken downloads a vocabulary once, and caches it in `TIKTOKEN_CACHE_DIR`. A failed download raises
    `UnreadableError`.

    Each line of a .tiktoken file has a token in base64 and its id. The file has no pattern and no special tokens, so
    text is split with the pattern of cl100k_base, and <|endoftext|> gets the id after the largest one.

    `end_of_text` is the end-of-text token, if the tokenizer's files do not name one.
    """
    if is_bucket(path := path_of(field, name)):
        return load_tokenizer(str(_local_copy(path)), field=field, end_of_text=end_of_text)
    known = tiktoken.list_encoding_names()
    if name not in known and (name.endswith((".json", ".model")) or Path(name).is_dir()):
        return load_files(Path(name), field=field, end_of_text=end_of_text)
    if end_of_text is not None:
        owner = field.removesuffix("tokenizer")
        raise UserError(f"{owner}end_of_text={end_of_text!r}: {field}={name!r} has its own end-of-text token; unset it")
    if name == BYTES:
        return TiktokenTokenizer(byte_encoding())
    if name.endswith(".tiktoken"):
        return TiktokenTokenizer(encoding_from_file(Path(name), field))
    if name not in known:
        hint = did_you_mean(name, [BYTES, *known])
        raise UserError(f"{field}={name!r}: no such encoding, and no .tiktoken, .json or .model file or folder.{hint}")
    try:
        return TiktokenTokenizer(tiktoken.get_encoding(name))
    except OSError as error:
        if error.errno is not None:
            raise  # From a cached file. Errors of `requests` have no errno.
        raise UnreadableError(
            f"{field}={name!r}: its vocabulary is not in the cache and cannot be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder that has it, or use {field}='bytes'"
        ) from error


@functools.cache
def _local_copy(path: BucketPath) -> Path:
    """Copy a tokenizer from a bucket to this machine. Return its local path, valid until the process ends.

    `path` is a folder, or a file with its settings next to it.
    """
    is_file = path.suffix in (".tiktoken", ".json", ".model")
    folder = path.parent if is_file else path
    local = Path(tempfile.mkdtemp(prefix="difftx-tokenizer-"))
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    note_copy(str(local), str(folder))
    for file in {*FILES, path.name} if is_file else FILES:
        content = read_file(folder / file)
        if content is not None:
            (local / file).write_bytes(content)
    return local / path.name if is_file else local


def with_vocabulary(config: Config) -> Config:
    """Return the config. If `model.vocab_size` is None, derive it from the tokenizer."""
    if config.model.vocab_size is not None:
        return config
    size = padded_size(load_tokenizer(config.data.tokenizer, end_of_text=config.data.end_of_text))
    return config.but(model={"vocab_size": size})


def padded_size(tokenizer: Tokenizer) -> int:
    """Return the number of tokens, rounded up to a multiple of `VOCABULARY_MULTIPLE`, as `model.vocab_size`."""
    return -(-tokenizer.n_vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
