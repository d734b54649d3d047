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
        view = memoryview(self._rest + bytes(content))
        whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
        self._hashes += _hashes(view[:whole])
        self._rest = bytes(view[whole:])

    def hashes(self) -> np.ndarray:
        return np.array([*self._hashes, *_hashes(self._rest)], "<u8")


def block_count(size: int) -> int:
    """Return the number of blocks of a file of `size` bytes."""
    return -(-size // BLOCK_BYTES)


class BlockCache:
    """The file of blocks in a folder. It can be pickled, and any number of threads and processes may use it."""

    def __init__(self, folder: Path, limit_bytes: int):
        """Create the file, and shorten it to the limit. Raise `UserError` if that is not possible."""
        self._file, self._slots = folder.expanduser() / CACHE_FILE, limit_bytes // BLOCK_BYTES
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            if os.fstat(self._descriptor).st_size > self._slots * BLOCK_BYTES:
                os.ftruncate(self._descriptor, self._slots * BLOCK_BYTES)
        except OSError as error:
            raise UserError(
                f"data.cache_path: {self._file} cannot be written or read ({error.strerror}); name another folder"
            ) from error

    def read(self, slot: int, count: int) -> bytes:
        """Return the content of `count` slots. Bytes beyond the end of the file are zero."""
        return b"".join(self._read(*each) for each in self._wrapped_ranges(slot, count))

    def write(self, slot: int, content: memoryview) -> None:
        """Write blocks to consecutive slots. If the disk is full, print one line, and leave the slots as they are."""
        try:
            for start, count in self._wrapped_ranges(slot, block_count(len(content))):
                size = count * BLOCK_BYTES
                os.pwrite(self._descriptor, content[:size], start * BLOCK_BYTES)
                content = content[size:]
        except OSError as error:
            _print_once(f"{self._file} cannot be written ({error.strerror}); blocks are read from the bucket each time")

    @functools.cached_property
    def _descriptor(self) -> int:
        return os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _read(self, slot: int, count: int) -> bytes:
        try:
            return os.pread(self._descriptor, count * BLOCK_BYTES, slot * BLOCK_BYTES).ljust(count * BLOCK_BYTES, b"\0")
        except OSError:  # A faulty disk.
            return bytes(count * BLOCK_BYTES)

    def _wrapped_ranges(self, slot: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the first slot and the length of each range of a sequence of slots that begins at `slot` mod S."""
        while count:
            slot %= self._slots
            part = min(count, self._slots - slot)
            yield slot, part
            slot, count = slot + part, count - part

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_descriptor"}


class CachedObject:
    """An object of a known size and of blocks with known hashes, read through a cache."""

    def __init__(self, path: BucketPath, size: int, hashes: np.ndarray, *, cache: BlockCache, slot: int):
        """Take the hash of each block, uint64, and the slot of the first block."""
        self._path, self._size, self._hashes, self._cache, self._slot = path, size, hashes, cache, slot

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes `start` … `stop - 1`. Raise `UserError` if the object does not have the blocks of the hashes."""
        first, last = start // BLOCK_BYTES, block_count(stop)
        content = bytearray(self._cache.read(self._slot + first, last - first))
        pauses = iter((0.0, *objects.REREAD_SECONDS))
        while wrong := self._wrong_blocks(content, first, last):
            if (pause := next(pauses, None)) is None:
                raise UserError(
                    f"{self._path}: changed since the store was opened, or corrupt: bytes from "
                    f"{wrong[0] * BLOCK_BYTES} on do not have the hash in the store; restore it, or prepare the store "
                    "again"
                )
            time.sleep(pause)
            self._fetch(wrong, content, first)
        return memoryview(content)[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def _wrong_blocks(self, content: bytearray, first: int, last: int) -> list[int]:
        """Return the blocks that do not have their hashes. `content` has blocks `first` … `last - 1`."""
        wrong = []
        for block in range(first, last):
            start = (block - first) * BLOCK_BYTES
            stop = start + min(BLOCK_BYTES, self._size - block * BLOCK_BYTES)
            if xxhash.xxh3_64_intdigest(memoryview(content)[start:stop]) != self._hashes[block]:
                wrong.append(block)
        return wrong

    def _fetch(self, blocks: list[int], content: bytearray, first: int) -> None:
        """Read blocks, which may be wrong, into the cache and into `content`, which begins at block `first`."""
        runs = list(_runs(blocks))
        ranges = [(run[0] * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, self._size)) for run in runs]
        for run, found in zip(runs, objects.read_ranges(self._path, ranges), strict=True):
            if found is not None:
                start = (run[0] - first) * BLOCK_BYTES
                content[start : start + len(found.content)] = found.content
                self._cache.write(self._slot + run[0], memoryview(found.content))


def _hashes(content: Buffer) -> list[int]:
    view = memoryview(content)
    return [xxhash.xxh3_64_intdigest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]


def _runs(blocks: list[int]) -> Iterator[list[int]]:
    """Split ascending numbers into runs of successive ones, of at most `REQUEST_BLOCKS`."""
    for _, run in itertools.groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        for part in itertools.batched((block for _, block in run), REQUEST_BLOCKS):
            yield list(part)


@functools.cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
