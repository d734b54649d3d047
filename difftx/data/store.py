"""Token stores: concatenated tokenised documents, in memory or in shards that `difftx prepare` writes.

A shard consists of `NNNNN.tokens` (little-endian uint16 or uint32) and `NNNNN.offsets` (uint64, the start of each
document in the shard and the end of the last one). If the input has ids, `NNNNN.ids` has one JSON string per line. If
it has prompts, `NNNNN.counted` (uint64) has start and stop of each range of tokens that counts in the loss.
`NNNNN.blocks` has hashes, with which a reader verifies blocks of `NNNNN.tokens` in a bucket (blocks.py). `meta.json` is
written last, so a folder without it is not a finished store.
"""

import bisect
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from difftx.config.data import DataConfig
from difftx.data.blocks import BlockCache, CachedObject, block_count
from difftx.errors import RunError, UserError
from difftx.files import read_file, sha256_of, size_of, write_atomically
from difftx.json_files import parse_record, with_sha256
from difftx.storage import objects
from difftx.storage.paths import AnyPath, BucketPath, is_bucket, path_of

META = "meta.json"
FORMAT = 1
RESTORE = "restore it, or prepare the store again"
SPLITS = ("train", "valid")


class TokenStore:
    """Concatenated tokenised documents, uint16 or uint32. An end-of-text token follows each document."""

    offsets: np.ndarray  # Start of each document among all tokens, and end of the last one. uint64 `[documents + 1]`.
    counted: np.ndarray | None  # Ascending ranges of tokens that count in the loss, uint64 `[ranges, 2]`. None: all.
    threads: int = 1  # Recommended number of threads for reading.

    def __init__(
        self, tokens: np.ndarray, offsets: np.ndarray, counted: np.ndarray | None = None, *, name: str = "memory"
    ):
        self.name, self.dtype = name, tokens.dtype
        self.fingerprint = hashlib.sha256(tokens).hexdigest()
        self._tokens, self.offsets, self.counted = tokens, offsets, counted

    @property
    def unsampled(self) -> "TokenStore":
        """The store without resampling: the store itself, unless it is an `UpsampledStore`."""
        return self

    def __len__(self) -> int:
        return len(self._tokens)

    def slice(self, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} … {stop} of {len(self)}")
        return self._tokens[start:stop]


class ShardedStore(TokenStore):
    """One split of a store on disk.

    Tokens are not memory-mapped: if the disk fails, a read raises an error that names the file, but access to mapped
    memory would kill the process (SIGBUS). Offsets and ranges are read and checked at the first access.
    """

    def __init__(self, folder: AnyPath, meta: dict[str, Any], split: str):
        """Take the list of shards from `meta`, the content of `meta.json`. Do not read other files yet."""
        shards = meta["splits"][split]["shards"]
        self.name, self.dtype = str(folder / split), np.dtype(meta["dtype"])
        kinds = [kind for kind in ("tokens", "offsets", "counted") if kind in shards[0]["sha256"]]
        content = [self.dtype.name, [[shard["sha256"][kind] for kind in kinds] for shard in shards]]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        self._starts = list(itertools.accumulate((shard["tokens"] for shard in shards), initial=0))
        self._files = [shard_file(folder, split, i, "tokens") for i in range(len(shards))]
        self._hashes = [shard["sha256"]["tokens"] for shard in shards]
        self._has_counted = "counted" in kinds

    def __len__(self) -> int:
        return self._starts[-1]

    @functools.cached_property
    def offsets(self) -> np.ndarray:  # pyrefly: ignore[bad-override]
        parts = []
        found = zip(self._files, self._arrays("offsets"), itertools.pairwise(self._starts), strict=True)
        for file, part, (start, stop) in found:
            if not (len(part) > 1 and (part[0], part[-1]) == (0, stop - start) and (part[1:] > part[:-1]).all()):
                what = f"the offsets do not rise from 0 to {stop - start}"
                raise UserError(f"{file.with_suffix('.offsets')}: {what}; {RESTORE}")
            parts.append(part[:-1] + np.uint64(start))
        return np.concatenate([*parts, np.array([len(self)], np.uint64)])

    @functools.cached_property
    def counted(self) -> np.ndarray | None:  # pyrefly: ignore[bad-override]
        if not self._has_counted:
            return None
        shards = zip(self._arrays("counted"), self._starts[:-1], strict=True)
        counted = np.concatenate([part + np.uint64(start) for part, start in shards])
        if len(counted) % 2 or (counted[1:] < counted[:-1]).any() or counted.max(initial=0) > len(self):
            raise UserError(f"{self.name}: the ranges that count in the loss do not rise; {RESTORE}")
        return counted.reshape(-1, 2)

    def _arrays(self, kind: str) -> Iterator[np.ndarray]:
        """Yield the content of each shard's `kind` file, as uint64."""
        for file in self._files:
            path = file.with_suffix(f".{kind}")
            content = read_file(path)  # `np.fromfile` would return fewer items after a failed read.
            if content is None:
                raise UserError(f"{path}: missing; {RESTORE}")
            yield np.frombuffer(content, "<u8", len(content) // 8)

    def slice(self, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} … {stop} of {len(self)}")
        first = min(bisect.bisect_right(self._starts, start), len(self._files)) - 1
        parts = []
        for shard in range(first, max(first + 1, bisect.bisect_left(self._starts, stop))):
            begin, end = self._starts[shard], self._starts[shard + 1]
            parts.append(self._read(shard, max(start, begin) - begin, min(stop, end) - begin))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, shard: int, start: int, stop: int) -> np.ndarray:
        file, size = self._files[shard], (stop - start) * self.dtype.itemsize
        try:
            content = os.pread(_open(file, self._hashes[shard]).fileno(), size, start * self.dtype.itemsize)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from error
        if len(content) < size:
            raise UserError(f"{file}: truncated while it was in use, before token {stop} of it; {RESTORE}")
        return np.frombuffer(content, self.dtype)


class BucketStore(ShardedStore):
    """One split of a store in a bucket. Tokens are read by byte ranges, through a cache on the local disk."""

    threads = objects.CONCURRENT

    def __init__(self, folder: BucketPath, meta: dict[str, Any], split: str, cache: BlockCache):
        super().__init__(folder, meta, split)
        self._sha256 = [shard["sha256"] for shard in meta["splits"][split]["shards"]]
        slot, self._objects = int(self.fingerprint[:8], 16), []
        sizes = [(stop - start) * self.dtype.itemsize for start, stop in itertools.pairwise(self._starts)]
        for file, size, hashes in zip(self._files, sizes, self._arrays("blocks"), strict=True):
            self._objects.append(CachedObject(cast(BucketPath, file), size, hashes, cache=cache, slot=slot))
            slot += block_count(size)

    def _arrays(self, kind: str) -> Iterator[np.ndarray]:
        paths = cast(list[BucketPath], [file.with_suffix(f".{kind}") for file in self._files])
        contents = objects.read_all((path, {}) for path in paths)
        for path, sha256, found in zip(paths, self._sha256, contents, strict=True):
            yield np.frombuffer(_verified(path, sha256[kind], found), "<u8")

    def _read(self, shard: int, start: int, stop: int) -> np.ndarray:
        content = self._objects[shard].read(start * self.dtype.itemsize, stop * self.dtype.itemsize)
        return np.frombuffer(content, self.dtype)


def _verified(path: BucketPath, sha256: str, found: objects.Stored | None) -> bytes:
    """Return the content of an object that was read as `found`. If its SHA-256 is wrong, read it again a few times."""
    for pause in (*objects.REREAD_SECONDS, None):
        if found is not None and hashlib.sha256(found.content).hexdigest() == sha256:
            return found.content
        if pause is not None:
            time.sleep(pause)
            found = objects.read(path)
    raise UserError(f"{path}: corrupt or replaced, its SHA-256 is not that in {META}; {RESTORE}")


class UpsampledStore(TokenStore):
    """Resample a store so that long documents have a given share of the tokens. Its size stays nearly the same.

    This is length up-sampling (Fu et al. 2024, arXiv 2402.10171): long documents become more frequent within a source,
    and the weights of the sources stay the same. Long documents have one repetition rate, short documents another. Each
    document is used ⌊rate⌋ or ⌈rate⌉ times per epoch, its repetitions in later passes over the store.
    """

    def __init__(self, store: TokenStore, *, longer_than_tokens: int, share: float):
        """Choose the documents. Change nothing if there are no long documents, or if they already have the share."""
        offsets = store.offsets.view(np.int64)
        lengths = np.diff(offsets)
        is_long = lengths > longer_than_tokens
        total, long_total = len(store), int(lengths[is_long].sum())
        rates = {True: 1.0, False: 1.0}
        if 0 < long_total < share * total:
            rates = {True: share * total / long_total, False: (1 - share) * total / (total - long_total)}
        uses = np.empty(len(lengths), np.int64)
        for kind, rate in rates.items():
            chosen = is_long == kind
            uses[chosen] = np.diff(np.floor(rate * np.arange(chosen.sum() + 1) + 0.5))
        documents = np.concatenate([np.flatnonzero(uses > times) for times in range(int(uses.max(initial=1)))])
        self.name, self.dtype, self._store, self._sources = store.name, store.dtype, store, offsets[documents]
        self.threads = store.threads
        self._ends = np.concatenate([[0], np.cumsum(lengths[documents])])
        self.offsets = self._ends.view(np.uint64)
        self.counted = None if store.counted is None else self._moved(store.counted, store.offsets, documents)
        self.fingerprint = self.fingerprint_of(store, longer_than_tokens, share)
        after = int((lengths * uses)[is_long].sum())
        self.report = (
            f"documents of more than {longer_than_tokens:,} tokens: {is_long.sum():,} of {len(lengths):,}, "
            f"{long_total / total:.1%} → {after / len(self):.1%} of the tokens; "
            f"used {rates[True]:.2f} times per epoch, the others {rates[False]:.2f} times"
        )

    def _moved(self, counted: np.ndarray, offsets: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return the ranges `counted` of the chosen documents, moved to the documents' new positions."""
        firsts = counted[:, 0].searchsorted(offsets)  # Index of each document's first range.
        ranges = np.diff(firsts)[documents]
        before = np.cumsum(ranges) - ranges
        chosen = np.arange(ranges.sum()) + np.repeat(firsts[documents] - before, ranges)
        moves = self.offsets[:-1] - offsets[documents]  # Unsigned, so negative moves wrap around.
        return counted[chosen] + np.repeat(moves, ranges)[:, None]

    @staticmethod
    def fingerprint_of(store: TokenStore, longer_than_tokens: int, share: float) -> str:
        """Return the fingerprint of the up-sampled `store`, without reading its tokens."""
        return hashlib.sha256(json.dumps([store.fingerprint, longer_than_tokens, share]).encode()).hexdigest()

    @property
    def unsampled(self) -> TokenStore:
        return self._store

    def __len__(self) -> int:
        return int(self._ends[-1])

    def slice(self, start: int, stop: int) -> np.ndarray:
        first = min(int(self._ends.searchsorted(start, side="right")), len(self._sources)) - 1
        if stop <= self._ends[first + 1]:
            at = int(self._sources[first] + start - self._ends[first])
            return self._store.slice(at, at + stop - start)
        last = int(self._ends.searchsorted(stop)) - 1
        edges = np.clip(self._ends[first : last + 2], start, stop)
        begin = self._sources[first : last + 1] + edges[:-1] - self._ends[first : last + 1]
        parts = [self._store.slice(a, a + n) for a, n in zip(begin.tolist(), np.diff(edges).tolist(), strict=True)]
        return np.concatenate(parts)


def open_store(
    folder: str | AnyPath,
    split: str,
    *,
    verify: bool = False,
    cache_path: str = DataConfig.cache_path,
    cache_mib: int = DataConfig.cache_mib,
) -> TokenStore:
    """Open a split of a store. Raise `UserError` if a file is missing or has the wrong size.

    With `verify`, also check the SHA-256 of each file. `cache_path` and `cache_mib` are the fields of the group `data`,
    and only apply to buckets.
    """
    folder = path_of("data.path", str(folder))
    meta = read_meta(folder)
    shards = meta["splits"][split]["shards"]
    if not shards:
        raise UserError(f"{folder}: the store has no {split} documents; prepare it with more text or --valid_input")
    for problem in file_problems(folder, meta, split, content=verify):
        raise UserError(f"{problem}; {RESTORE}")
    if is_bucket(folder):
        return BucketStore(folder, meta, split, BlockCache(Path(cache_path), cache_mib * 2**20))
    return ShardedStore(folder, meta, split)


def is_store(path: str | AnyPath) -> bool:
    """Return whether a folder is a finished store."""
    file = path_of("data.path", str(path)) / META
    return size_of(file) is not None if is_bucket(file) else file.is_file()


def read_meta(folder: str | AnyPath) -> dict[str, Any]:
    """Read a store's `meta.json`. Raise `UserError` if it is missing, corrupt or has another format."""
    path = path_of("data.path", str(folder)) / META
    content = read_file(path)
    if content is None:
        raise UserError(
            f"{folder}: no {META}, so it is not a finished token store; make it with `difftx prepare`, or "
            f"name the text files in it, such as {str(path.with_name('*.txt'))!r}"
        )
    meta = parse_record(content)
    if meta is None:
        raise UserError(f"{path}: corrupt, its SHA-256 is not that of its text; {RESTORE}")
    if meta.get("format") != FORMAT:
        raise UserError(f"{path}: not a store of format {FORMAT}; prepare it again with this version")
    return meta


def write_meta(folder: AnyPath, meta: dict[str, Any]) -> None:
    """Write `meta.json`, which makes the folder a store."""
    text = json.dumps(with_sha256(meta), indent=1, ensure_ascii=False) + "\n"
    if not is_bucket(folder):
        write_atomically(folder / META, text)
    elif objects.write_if(folder / META, text.encode(), None) is None:
        raise RunError(f"{folder}: another process has finished another store there; choose another folder")


def shard_file(folder: AnyPath, split: str, index: int, kind: str) -> AnyPath:
    """Return the path of one of a shard's files. `kind` is its suffix, such as "tokens"."""
    return folder / split / f"{index:05d}.{kind}"


def file_problems(folder: AnyPath, meta: dict[str, Any], split: str, *, content: bool) -> Iterator[str]:
    """Yield a message for each file of a split with a wrong size, or with a wrong SHA-256 if `content` is true."""
    itemsize = np.dtype(meta["dtype"]).itemsize
    listed = objects.describe_below(folder / split) if is_bucket(folder) else {}
    for index, shard in enumerate(meta["splits"][split]["shards"]):
        documents, tokens = shard["documents"], shard["tokens"] * itemsize
        sizes = {"tokens": tokens, "offsets": (documents + 1) * 8}
        sizes["blocks"] = block_count(tokens) * 8
        for kind, expected in shard["sha256"].items():
            file = shard_file(folder, split, index, kind)
            if not (file.name in listed if is_bucket(file) else file.is_file()):
                yield f"{file}: missing"
                continue
            size = listed[file.name].size if is_bucket(file) else file.stat().st_size
            if kind in sizes and size != sizes[kind]:
                yield f"{file}: {size} bytes, {META} says {sizes[kind]}"
            elif content and sha256_of(file) != expected:
                yield f"{file}: corrupt, its SHA-256 is not that in {META}"


# Only keep the most recently used shards open, because processes are often limited to 1,024 file descriptors.
@functools.lru_cache(maxsize=256)
def _open(file: Path, sha256: str) -> BinaryIO:
    """Open a token file. `sha256` is part of the cache key, so a rewritten file is opened again."""
    return file.open("rb", buffering=0)
