"""Read token files in buckets by byte ranges, through a local disk cache that all processes of a host share.

A token file consists of blocks of `BLOCK_BYTES` (the last one may be shorter). In a store, `NNNNN.blocks` has the
XXH3-64 of each block of `NNNNN.tokens`, so each block can be verified by itself.

The cache is one sparse file with S slots. If an object begins at slot s, its block b is stored in slot (s + b) mod S,
and overwrites the previous content. A slot may therefore contain anything: a reader compares it with the hash of the
expected block, and if they differ, reads the block from the bucket. So concurrent writers, killed processes and faulty
disks do no harm, no lock is needed, and the file cannot exceed its limit.
"""

import functools
import itertools
import os
import sys
import time
from collections.abc import Buffer, Iterator
from pathlib import Path

import numpy as np
import xxhash

from difftx.errors import UserError
from difftx.storage import objects
from difftx.storage.paths import BucketPath

BLOCK_BYTES = 2**14
REQUEST_BLOCKS = 512  # Maximum number of blocks per request.
CACHE_FILE = "blocks"


class BlockHasher:
    """Compute the hash of each block of a file. Pass the content to `update`, in parts of any size."""

    def __init__(self):
        self._rest = b""
        self._hashes: list[int] = []

    def update(self, content: Buffer) -> None:
        blocks = _split(self._rest + bytes(content))
        self._rest = blocks.pop() if blocks else b""
        self._hashes += map(xxhash.xxh3_64_intdigest, blocks)

    def hashes(self) -> np.ndarray:
        return np.array([*self._hashes, *map(xxhash.xxh3_64_intdigest, _split(self._rest))], "<u8")


def block_count(size: int) -> int:
    """Return the number of blocks in a file of `size` bytes."""
    return -(-size // BLOCK_BYTES)


class BlockCache:
    """The cache file in a folder. Any number of threads and processes may use it."""

    def __init__(self, folder: Path, limit_bytes: int):
        """Create the cache file, or shrink it to the limit. Raise `UserError` if this fails."""
        self._file, self._slots = folder.expanduser() / CACHE_FILE, limit_bytes // BLOCK_BYTES
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self._descriptor).st_size > self._slots * BLOCK_BYTES:
                os.ftruncate(self._descriptor, self._slots * BLOCK_BYTES)
        except OSError as error:
            raise UserError(
                f"data.cache_path: {self._file} cannot be written or read ({error.strerror}); name another folder"
            ) from error

    def read(self, slot: int) -> bytes:
        """Return the content of slot `slot` mod S. It may be anything, and shorter than a block."""
        try:
            return os.pread(self._descriptor, BLOCK_BYTES, slot % self._slots * BLOCK_BYTES)
        except OSError:  # The disk is faulty.
            return b""

    def write(self, slot: int, block: bytes) -> None:
        """Write a block to slot `slot` mod S. If the write fails (disk full), print one line."""
        try:
            os.pwrite(self._descriptor, block, slot % self._slots * BLOCK_BYTES)
        except OSError as error:
            _print_once(f"{self._file} cannot be written ({error.strerror}); blocks are read from the bucket each time")


class CachedObject:
    """An object in a bucket, read through a cache. Its size and the hashes of its blocks are known."""

    def __init__(self, path: BucketPath, size: int, hashes: np.ndarray, *, cache: BlockCache, slot: int):
        """`hashes` has the hash of each block, uint64. `slot` is the slot of the first block."""
        self._path, self._size, self._hashes, self._cache, self._slot = path, size, hashes, cache, slot

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes `start` to `stop - 1`. Raise `UserError` if a block does not have its hash."""
        first = start // BLOCK_BYTES
        blocks = {block: self._cached(block) for block in range(first, block_count(stop))}
        pauses = iter((0.0, *objects.REREAD_SECONDS))
        while wrong := [b for b, found in blocks.items() if xxhash.xxh3_64_intdigest(found) != self._hashes[b]]:
            if (pause := next(pauses, None)) is None:
                raise UserError(
                    f"{self._path}: changed since the store was opened, or corrupt: bytes from "
                    f"{wrong[0] * BLOCK_BYTES} on do not have the hash in the store; restore it, or prepare the store "
                    "again"
                )
            time.sleep(pause)
            blocks |= self._fetched(wrong)
        return memoryview(b"".join(blocks.values()))[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def _cached(self, block: int) -> bytes:
        return self._cache.read(self._slot + block)[: self._size - block * BLOCK_BYTES]  # The last block is shorter.

    def _fetched(self, blocks: list[int]) -> Iterator[tuple[int, bytes]]:
        """Read blocks from the bucket into the cache. Yield the number and content of each, without verifying it."""
        runs = list(_runs(blocks))
        ranges = [(run[0] * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, self._size)) for run in runs]
        for run, found in zip(runs, objects.read_ranges(self._path, ranges), strict=True):
            # The object may be shorter than expected.
            for block, content in zip(run, _split(found.content if found else b""), strict=False):
                self._cache.write(self._slot + block, content)
                yield block, content


def _split(content: bytes) -> list[bytes]:
    """Split `content` into blocks."""
    return [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]


def _runs(blocks: list[int]) -> Iterator[list[int]]:
    """Split ascending numbers into runs of consecutive ones, each at most `REQUEST_BLOCKS` long."""
    for _, run in itertools.groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        for part in itertools.batched((block for _, block in run), REQUEST_BLOCKS):
            yield list(part)


@functools.cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
