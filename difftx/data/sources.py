"""Training and validation rows from the sources of a config: token stores, text to tokenise, or synthetic tasks."""

import dataclasses
import functools
import glob
import hashlib
import itertools
import math
import shlex
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from difftx.config.data import STDLIB, SYNTHETIC, DataConfig
from difftx.data.mixture import BLOCK_ROWS, Mixture, Shuffled, stages_of
from difftx.data.packing import BEST_FIT_VERSION, PackedRows, RowSource
from difftx.data.records import BYTE_ORDER_MARK, OPENERS, files_of
from difftx.data.store import SPLITS, ShardedStore, TokenStore, UpsampledStore, is_store, open_store, read_meta
from difftx.data.synthetic import SyntheticRows
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError, read_error
from difftx.files import open_file, size_of
from difftx.storage.paths import AnyPath, is_bucket, path_of

GOLDEN = 0x9E3779B9  # 2**32 / golden ratio. Spreads the seeds of the sources.
ONLY_SOURCE, ONLY_SET = "train", "valid"  # Names used if data.sources is empty.
# Folders left out of the corpus "stdlib": tests, installed packages, character tables, and generated text.
STDLIB_WITHOUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
# Suffixes of files that only `difftx prepare` can read. A .json file next to other files may be plain text.
NOT_PLAIN_TEXT = (*OPENERS, ".jsonl", ".ndjson", ".parquet", ".npy", ".bin")
# Split longer texts at line ends, so that even a single file yields both training and validation documents.
DOCUMENT_BYTES = 65_536


@dataclasses.dataclass(frozen=True)
class Sources:
    """Training rows and validation rows by source name."""

    config: DataConfig
    train: dict[str, RowSource]
    valid: dict[str, RowSource]
    signature: dict[str, Any]  # JSON object with everything that determines the content and order of the examples.
    notes: tuple[str, ...]  # Messages for the user about the validation split, up-sampling and packing.

    @functools.cached_property
    def examples(self) -> Any:
        """Endless random-access training rows: a mixture of the sources, each reshuffled in every epoch."""
        shuffled = [self._shuffled(i) for i in range(len(self.train))]
        return shuffled[0] if len(shuffled) == 1 else Mixture(shuffled, stages_of(self.signature), self.config.seed)

    @property
    def valid_fingerprints(self) -> dict[str, str]:
        return {name: rows.fingerprint for name, rows in self.valid.items()}

    def where(self, example: int) -> str:
        """Describe the origin of a training example, with source and row number, for messages."""
        source, number = self.examples.locate(example) if len(self.train) > 1 else (0, example)
        return f"{list(self.train.values())[source].name}: row {self._shuffled(source).locate(number)}"

    def _shuffled(self, source: int) -> Shuffled:
        return Shuffled(list(self.train.values())[source], (self.config.seed + source * GOLDEN) % 2**32)

    def epochs(self, examples: int) -> dict[str, float]:
        """Return the number of epochs of each source after `examples` examples.

        In a mixture, `examples` is rounded up to a whole block.
        """
        if len(self.train) == 1:
            return {name: examples / len(rows) for name, rows in self.train.items()}
        used = self.examples.used(-(-examples // BLOCK_ROWS))
        return {name: int(n) / len(rows) for n, (name, rows) in zip(used, self.train.items(), strict=True)}


def load_sources(config: DataConfig, tokenizer: Tokenizer) -> Sources:
    """Open or tokenise every source, then up-sample and pack it. Raise `UserError` if a source is invalid."""
    train, valid, notes = {}, {}, []
    if not config.sources:
        train[ONLY_SOURCE], valid[ONLY_SET], notes = _load(config.path, config, tokenizer)
    for source in config.sources:
        train[source.name], valid[source.name], lines = _load(source.path, config, tokenizer)
        notes += [f"{source.name}: {line}" for line in lines]
    signature = {
        **{f"source {name}": rows.fingerprint for name, rows in train.items()},
        # The index of a source determines its seed, and its positions in the mixture.
        **({"order of sources": list(train)} if len(train) > 1 else {}),
        "weights": [source.weight for source in config.sources],
        "stages": [[stage.from_tokens, *stage.weights] for stage in config.stages],
        "upsampling": dataclasses.asdict(config.upsampling) if config.upsampling.longer_than_tokens else None,
        "tokenizer": tokenizer.fingerprint,
        "sequence_length": config.sequence_length,
        "packing": config.packing if config.packing == "concat" else f"best_fit {BEST_FIT_VERSION}",
        "document_mask": config.document_mask,
        "seed": config.seed,
    }
    return Sources(config, train, valid, signature, tuple(notes))


def signature_of_stores(config: DataConfig) -> dict[str, str]:
    """Return the entries of `Sources.signature` that follow from `meta.json` of the config's token stores."""
    entries = {}
    for name, path in [(source.name, source.path) for source in config.sources] or [(ONLY_SOURCE, config.path)]:
        if path is None or path.startswith(SYNTHETIC) or not is_store(path):
            continue
        folder = path_of("data.path", path)
        meta = read_meta(folder)
        store = ShardedStore(folder, meta, "train")
        entries[f"source {name}"] = store.fingerprint
        if (longer_than := config.upsampling.longer_than_tokens) is not None:
            entries[f"source {name}"] = UpsampledStore.fingerprint_of(store, longer_than, config.upsampling.share)
        entries["tokenizer"] = meta["tokenizer"]["vocabulary_sha256"]
    return entries


def _load(path: str | None, config: DataConfig, tokenizer: Tokenizer) -> tuple[RowSource, RowSource, list[str]]:
    """Return the training rows and validation rows of a path, and notes for the user."""
    if path is not None and path.startswith(SYNTHETIC):
        return SyntheticRows(path, config, "train"), SyntheticRows(path, config, "valid"), []
    train_store, valid_store = load_corpus(path, config, tokenizer)
    notes = [] if isinstance(train_store, ShardedStore) else _uneven_split(path, train_store, valid_store, config)
    if (longer_than := config.upsampling.longer_than_tokens) is not None:
        train_store = UpsampledStore(train_store, longer_than_tokens=longer_than, share=config.upsampling.share)
        # Up-sampling drops whole documents, so a small store may become shorter than one row.
        require_row(train_store, config, f"data.path={path!r}", "training", " after data.upsampling")
        notes.append(train_store.report)
    train, valid = pack(train_store, config), pack(valid_store, config)
    if config.packing == "best_fit":
        padding = 1 - train.tokens / (len(train) * train.sequence_length)
        notes.append(f"packed into {len(train):,} rows, {padding:.2%} of them padding")
    return train, valid, notes


def _uneven_split(path: str | None, train: TokenStore, valid: TokenStore, config: DataConfig) -> list[str]:
    """Return a note if much more than `data.valid_fraction` is held out because documents are few or uneven."""
    share, fraction = len(valid) / (len(train) + len(valid)), config.valid_fraction
    if share <= 2 * fraction and not share > 0.5 > fraction:
        return []
    held_out, rest = (len(store.offsets) - 1 for store in (valid, train))
    return [
        f"data.path={path!r}: {held_out} of {held_out + rest} documents held out for validation, with {share:.0%} of "
        f"the tokens, although data.valid_fraction={fraction}; give more files of similar size, another "
        "data.valid_fraction, or a validation file of its own (difftx prepare --valid_input)"
    ]


def pack(store: TokenStore, config: DataConfig) -> PackedRows:
    """Pack the documents of a store into rows."""
    return PackedRows(
        store,
        sequence_length=config.sequence_length,
        packing=config.packing,
        document_mask=config.document_mask,
    )


def load_corpus(path: str | None, config: DataConfig, tokenizer: Tokenizer) -> tuple[TokenStore, TokenStore]:
    """Return the training and validation documents of a path: a token store, or text to tokenise."""
    if path is not None and may_be_store(path_of("data.path", path)):
        train, valid = (open_split(config, path, split, tokenizer) for split in SPLITS)
    else:
        train, valid = _tokenise_text(path, config, tokenizer)
    require_row(train, config, f"data.path={path!r}", "training")
    require_row(valid, config, f"data.path={path!r}", "validation")
    return train, valid


def require_row(store: TokenStore, config: DataConfig, field: str, what: str, when: str = "") -> None:
    """Raise `UserError` if the store has too few tokens for one row. `field`, `what` and `when` are for the message."""
    if len(store) <= config.sequence_length:
        raise UserError(
            f"{field}: only {len(store)} {what} tokens{when}, less than a row of data.sequence_length="
            f"{config.sequence_length} and its last target; give more text or shorter rows"
        )


def may_be_store(path: AnyPath) -> bool:
    """Return whether a path may be a store: a folder, but not a file or a glob."""
    if not is_bucket(path):
        return path.is_dir()
    return not glob.has_magic(str(path)) and size_of(path) is None


def open_split(config: DataConfig, path: str, split: str, tokenizer: Tokenizer, field: str = "data.path") -> TokenStore:
    """Open a split of the store at `path`. Check that its vocabulary and chat template match `tokenizer`.

    `field` names the path in messages.
    """
    meta = read_meta(path_of(field, path))
    recorded = meta["tokenizer"]
    if (vocabulary := recorded["vocabulary_sha256"]) != tokenizer.fingerprint:
        raise UserError(
            f"data.tokenizer={config.tokenizer!r} (vocabulary {tokenizer.fingerprint[:12]}) is not that of the store "
            f"{field}={path!r}: {recorded['name']!r} (vocabulary {vocabulary[:12]}); set data.tokenizer, or prepare "
            "again"
        )
    template, ours = meta.get("source", {}).get("chat_template_sha256"), tokenizer.chat_template
    if template is not None and (ours is None or ours.sha256 != template):
        found = "no chat template" if ours is None else f"the chat template {ours.sha256[:12]}"
        raise UserError(
            f"data.tokenizer={config.tokenizer!r} has {found}, and the store {field}={path!r} was written with "
            f"{template[:12]} (SHA-256); put that template into the tokenizer's chat_template.jinja, or prepare again"
        )
    return open_store(path, split, verify=config.verify, cache_path=config.cache_path, cache_mib=config.cache_mib)


def _tokenise_text(path: str | None, config: DataConfig, tokenizer: Tokenizer) -> tuple[TokenStore, TokenStore]:
    # Use hashes as keys to remove exact duplicates, and sort by hash to make the split independent of the file order.
    documents = {hashlib.sha256(text.encode()).digest(): text for text in read_texts(path)}
    held_out = min(math.ceil(config.valid_fraction * len(documents)), len(documents) - 1)
    name = f"data.path={path!r}"
    if len(documents) < 2:
        raise UserError(
            f"{name}: {len(documents)} document; at least 2 are needed, one to train and one to validate on: name "
            f"several files with different texts, or one of more than {DOCUMENT_BYTES} bytes with several lines"
        )
    texts = [documents[digest] for digest in sorted(documents)]
    return _tokenise(texts[held_out:], tokenizer, name), _tokenise(texts[:held_out], tokenizer, name)


def text_files(path: str | None, field: str = "data.path") -> Sequence[AnyPath]:
    """Return the files of a path: a file, a glob, or "stdlib" for the modules of Python's standard library."""
    if path is None:
        raise UserError(f"{field} is not set; give a store, a text file or a glob, --config.{field}='corpus/*.txt'")
    if path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in root.rglob("*.py") if not STDLIB_WITHOUT & set(f.relative_to(root).parts)]
        # `_sysconfigdata` files hold the build settings of this machine.
        return sorted(f for f in files if not f.name.startswith("_sysconfigdata"))
    return list(files_of(path, field))


def read_texts(path: str | None, field: str = "data.path") -> Iterator[str]:
    """Yield the text of all files of a path, split at line ends into documents of about `DOCUMENT_BYTES`."""
    files = text_files(path, field)
    refused = NOT_PLAIN_TEXT if len(files) > 1 else (*NOT_PLAIN_TEXT, ".json")
    for file in files:
        if file.suffix.lower() in refused:
            raise UserError(
                f"{field}={path!r}: {file.name} is not plain text; make a store of it, `difftx prepare "
                f"--input={shlex.quote(str(path))} --tokenizer=TOKENIZER --out=FOLDER`, and set {field}=FOLDER"
            )
        try:
            with open_file(file) as stream:
                text = stream.read().decode("utf-8").removeprefix(BYTE_ORDER_MARK)
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: byte {error.start} is not UTF-8; convert the file, or leave it out") from error
        except OSError as error:
            raise read_error(error, f"{file}: cannot be read ({error.strerror})") from error
        yield from _split_at_line_ends(text)


def _split_at_line_ends(text: str) -> Iterator[str]:
    document, size = [], 0
    for line in text.splitlines(keepends=True):
        length = len(line.encode())
        if document and size + length > DOCUMENT_BYTES:
            yield "".join(document)
            document, size = [], 0
        document.append(line)
        size += length
    if document:
        yield "".join(document)


def _tokenise(texts: list[str], tokenizer: Tokenizer, name: str) -> TokenStore:
    dtype = np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32
    end = np.array([tokenizer.eot_token], dtype)
    parts = []
    for text in texts:
        parts += [np.array(tokenizer.prefix, dtype), tokenizer.encode_to_numpy(text).astype(dtype), end]
    lengths = [sum(map(len, each)) for each in itertools.batched(parts, 3)]
    return TokenStore(np.concatenate(parts), np.cumsum([0, *lengths], dtype=np.uint64), name=name)
