"""Files of tokens in buckets, read by ranges through a cache on the local disk that all processes of a host share.

A file of tokens consists of blocks of `BLOCK_BYTES`; the last one may be shorter. `NNNNN.blocks` of a store has the
XXH3-64 of each block of `NNNNN.tokens`, so that every block can be verified by itself.

The cache is one sparse file of S slots. Block b of an object that begins at slot s lies in slot (s + b) mod S. A slot
may hold anything: a reader compares it with the hash of the block that it expects, and reads the block from the bucket
if they differ. Therefore, several writers, killed processes and faulty disks do no harm, no lock is needed, and the
file cannot become larger than its limit. The block that was in the slot before is lost.
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
REQUEST_BLOCKS = 512  # Most blocks of one request.
CACHE_FILE = "blocks"


class BlockHasher:
    """Computes the hashes of the blocks of a file whose content is given part by part."""

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
    """Return the number of blocks of a file of `size` bytes."""
    return -(-size // BLOCK_BYTES)


class BlockCache:
    """The file of blocks in a folder. Any number of threads and processes may use it."""

    def __init__(self, folder: Path, limit_bytes: int):
        """Create the file, and shorten it to the limit. Raise `UserError` if that is not possible."""
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
        """Return the content of slot `slot` mod S, which may be anything, and shorter than a block."""
        try:
            return os.pread(self._descriptor, BLOCK_BYTES, slot % self._slots * BLOCK_BYTES)
        except OSError:  # A faulty disk.
            return b""

    def write(self, slot: int, block: bytes) -> None:
        """Write a block to slot `slot` mod S. If the disk is full, print one line, and leave the slot as it is."""
        try:
            os.pwrite(self._descriptor, block, slot % self._slots * BLOCK_BYTES)
        except OSError as error:
            _print_once(f"{self._file} cannot be written ({error.strerror}); blocks are read from the bucket each time")


class CachedObject:
    """An object of a known size and of blocks with known hashes, read through a cache."""

    def __init__(self, path: BucketPath, size: int, hashes: np.ndarray, *, cache: BlockCache, slot: int):
        """Take the hash of each block, uint64, and the slot of the first block."""
        self._path, self._size, self._hashes, self._cache, self._slot = path, size, hashes, cache, slot

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes `start` … `stop - 1`. Raise `UserError` if the object does not have the blocks of the hashes."""
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
        """Read blocks, which may be wrong, from the bucket into the cache. Yield the number and content of each."""
        runs = list(_runs(blocks))
        ranges = [(run[0] * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, self._size)) for run in runs]
        for run, found in zip(runs, objects.read_ranges(self._path, ranges), strict=True):
            # The content may be shorter than its range.
            for block, content in zip(run, _split(found.content if found else b""), strict=False):
                self._cache.write(self._slot + block, content)
                yield block, content


def _split(content: bytes) -> list[bytes]:
    """Return the blocks of a content."""
    return [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]


def _runs(blocks: list[int]) -> Iterator[list[int]]:
    """Split ascending numbers into runs of successive ones, of at most `REQUEST_BLOCKS`."""
    for _, run in itertools.groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        for part in itertools.batched((block for _, block in run), REQUEST_BLOCKS):
            yield list(part)


@functools.cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
