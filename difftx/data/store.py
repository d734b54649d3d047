"""Token stores: tokenised documents end to end, in memory or in the memory-mapped shards of `difftx prepare`.

A shard is `NNNNN.tokens` (little-endian uint16 or uint32), `NNNNN.offsets` (uint64: where each document starts in the
shard, and the end) and, where the input has them, `NNNNN.ids` (a JSON string a line) and `NNNNN.prompts` (uint64: how
many tokens of each document are its prompt). `meta.json` is written last: a folder without it is not a store.
"""

import bisect
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from difftx.errors import UserError
from difftx.files import json_sha256, misfit, read_json, write_atomically

META = "meta.json"
FORMAT = 1
SPLITS = ("train", "valid")
SHARD = {"documents": int, "tokens": int, "bytes": int, "sha256": {"tokens": str, "offsets": str}}
SPLIT = {"documents": int, "tokens": int, "bytes": int, "duplicates": int, "shards": [SHARD]}
SHAPE = {
    "dtype": str,
    "tokenizer": {"name": str, "vocabulary_sha256": str, "vocab_size": int, "end_of_text": int},
    "empty": int,
    "skipped": int,
    "splits": dict.fromkeys(SPLITS, SPLIT),
}


class TokenStore:
    """Documents end to end, each followed by the end-of-text token."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, prompts: np.ndarray | None = None):
        """Hold a store in memory.

        Args:
            tokens: uint16 or uint32.
            offsets: uint64 `[documents + 1]`, where each document starts, and the end.
            prompts: uint64 `[documents]`, how many tokens of each are its prompt, which no loss counts; None: none.
        """
        self.dtype = tokens.dtype
        self.fingerprint = hashlib.sha256(tokens).hexdigest()  # Of what the tokens are.
        self._starts = [0, len(tokens)]  # Where each piece starts among all tokens, and the end.
        self._tokens, self._offsets, self._prompts = tokens, offsets, prompts

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def offsets(self) -> np.ndarray:
        """Where each document starts among all tokens, and the end: uint64 `[documents + 1]`."""
        return self._offsets

    @property
    def prompts(self) -> np.ndarray | None:
        """How many tokens of each document are its prompt, which no loss counts: uint64 `[documents]`; None: none."""
        return self._prompts

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start … stop - 1."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} … {stop} of {len(self)}")
        first = min(bisect.bisect_right(self._starts, start), len(self._starts) - 1) - 1
        last = max(first + 1, bisect.bisect_left(self._starts, stop))
        parts = [self._piece(i)[max(0, start - self._starts[i]) : stop - self._starts[i]] for i in range(first, last)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _piece(self, index: int) -> np.ndarray:
        return self._tokens


class ShardedStore(TokenStore):
    """One split of a store on disk. Holds names, not memory maps, so that it can be pickled."""

    def __init__(self, folder: Path, meta: dict[str, Any], split: str):
        """Hold the shards that `meta` lists; nothing is read yet."""
        shards = meta["splits"][split]["shards"]
        self.dtype = np.dtype(meta["dtype"])
        kinds = [kind for kind in ("tokens", "offsets", "prompts") if kind in shards[0]["sha256"]]
        content = [self.dtype.name, [[shard["sha256"][kind] for kind in kinds] for shard in shards]]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        self._starts = list(itertools.accumulate((shard["tokens"] for shard in shards), initial=0))
        self._files = [shard_file(folder, split, i, "tokens") for i in range(len(shards))]
        self._hashes = [shard["sha256"]["tokens"] for shard in shards]
        self._has_prompts = "prompts" in kinds

    @property
    def offsets(self) -> np.ndarray:
        """Where each document starts among all tokens, and the end; read when first asked for."""
        if "_offsets" not in self.__dict__:
            parts = [np.fromfile(file.with_suffix(".offsets"), "<u8")[:-1] for file in self._files]
            moved = [part + np.uint64(start) for part, start in zip(parts, self._starts, strict=False)]
            self._offsets = np.concatenate([*moved, np.array([len(self)], np.uint64)])
        return self._offsets

    @property
    def prompts(self) -> np.ndarray | None:
        """How many tokens of each document are its prompt; read when first asked for."""
        if self._has_prompts and "_prompts" not in self.__dict__:
            self._prompts = np.concatenate([np.fromfile(file.with_suffix(".prompts"), "<u8") for file in self._files])
        return self._prompts if self._has_prompts else None

    def _piece(self, index: int) -> np.ndarray:
        return _map(self._files[index], self.dtype, self._hashes[index])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_offsets", "_prompts")}


def open_store(folder: Path, split: str, *, verify: bool = False) -> TokenStore:
    """Open a split of a prepared store.

    Args:
        folder: what `difftx prepare --out` named.
        split: "train" or "valid".
        verify: read everything and compare the SHA-256 of each file.

    Raises:
        UserError: not a finished store, no such split in it, or a shard that is missing or damaged.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    shards = meta["splits"][split]["shards"]
    if not shards:
        raise UserError(f"{folder}: the store has no {split} documents; prepare it with more text or --valid_input")
    for problem in damage(folder, meta, split, content=verify):
        raise UserError(f"{problem}; restore it, or prepare the store again")
    return ShardedStore(folder, meta, split)


def store_tokenizer(folder: Path) -> tuple[str, str]:
    """Return the name of a store's tokenizer and the SHA-256 of its vocabulary."""
    tokenizer = read_meta(folder)["tokenizer"]
    return tokenizer["name"], tokenizer["vocabulary_sha256"]


def is_store(path: str | Path) -> bool:
    """Return whether a folder is a finished store."""
    return (Path(path) / META).is_file()


def read_meta(folder: Path) -> dict[str, Any]:
    """Return `meta.json`.

    Raises:
        UserError: there is none, or it is not of this version.
    """
    path = Path(folder) / META
    if not path.exists():
        raise UserError(
            f"{folder}: no {META}, so it is not a finished token store; make it with `python -m difftx prepare`"
        )
    meta = read_json(path)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"{path}: not a store of format {FORMAT}; prepare it again with this version")
    if meta.pop("sha256", None) != json_sha256(meta):
        raise UserError(f"{path}: damaged, its SHA-256 is not that of its text; restore it, or prepare the store again")
    if why := misfit(meta, SHAPE) or _strange_value(meta):
        raise UserError(f"{path}: not as `difftx prepare` writes it: {why}; prepare the store again")
    return meta


def _strange_value(meta: dict[str, Any]) -> str | None:
    if meta["dtype"] not in ("uint16", "uint32"):
        return f"dtype: {meta['dtype']!r}"
    for split in SPLITS:
        for shard in meta["splits"][split]["shards"]:
            # A kind becomes part of a file's name.
            if not shard["documents"] or not shard["sha256"].keys() <= {"tokens", "offsets", "ids", "prompts"}:
                return f"splits.{split}: a shard without documents, or with other files than a shard has"
            if ("prompts" in shard["sha256"]) != ("prompts" in meta["splits"][split]["shards"][0]["sha256"]):
                return f"splits.{split}: some shards have prompts, and some have none"
    return None


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write `meta.json`, which makes the folder a store; its last field is the SHA-256 of the others."""
    text = json.dumps(meta | {"sha256": json_sha256(meta)}, indent=1, ensure_ascii=False)
    write_atomically(folder / META, text + "\n")


def shard_file(folder: Path, split: str, index: int, kind: str) -> Path:
    """Return the path of a shard's "tokens", "offsets", "ids" or "prompts"."""
    return Path(folder) / split / f"{index:05d}.{kind}"


def damage(folder: Path, meta: dict[str, Any], split: str, *, content: bool) -> Iterator[str]:
    """Yield what is wrong with a split's files: their sizes, and with `content` their SHA-256."""
    itemsize = np.dtype(meta["dtype"]).itemsize
    for index, shard in enumerate(meta["splits"][split]["shards"]):
        documents = shard["documents"]
        sizes = {"tokens": shard["tokens"] * itemsize, "offsets": (documents + 1) * 8, "prompts": documents * 8}
        for kind, expected in shard["sha256"].items():
            file = shard_file(folder, split, index, kind)
            if not file.is_file():
                yield f"{file}: missing"
            elif kind in sizes and file.stat().st_size != sizes[kind]:
                yield f"{file}: {file.stat().st_size} bytes, {META} says {sizes[kind]}"
            elif content and sha256_of(file) != expected:
                yield f"{file}: damaged, its SHA-256 is not that of {META}"


def sha256_of(file: Path) -> str:
    """Return a file's SHA-256."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# A map holds a file descriptor, of which a process often may have 1,024: the oldest are closed and opened again.
@functools.lru_cache(maxsize=256)
def _map(file: Path, dtype: np.dtype, sha256: str) -> np.ndarray:
    """Map a shard; its hash is part of the key, so that a store prepared anew is not mistaken for the old one."""
    return np.memmap(file, dtype, mode="r").view(np.ndarray)
