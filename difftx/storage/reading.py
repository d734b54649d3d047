"""File objects that read from buckets, and a map that prefetches items with threads."""

import collections
import concurrent.futures
import errno
import io
import os
from collections.abc import Buffer, Callable, Iterable, Iterator
from typing import Any

from difftx.errors import UnreadableError, UserError
from difftx.storage import objects
from difftx.storage.paths import BucketPath

BUFFER_BYTES = 8 * 2**20  # Bytes per request.
AHEAD = 8  # Number of items that are read at a time. In `difftx prepare`, they take tens of MB of memory.


def map_ahead[Item, Result](read: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield `read(item)` for each item, in order, while threads read the next items."""
    results: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(AHEAD) as pool:
        try:
            for item in items:
                results.append(pool.submit(read, item))
                if len(results) == AHEAD:
                    yield results.popleft().result()
            while results:
                yield results.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def open_object(path: BucketPath) -> io.BufferedReader:
    """Open an object for reading. Raise `FileNotFoundError` if it is absent.

    If another process replaces the object after the first read, later reads raise `UserError`.
    """
    found = objects.describe(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return io.BufferedReader(ObjectReader(path, found.size), BUFFER_BYTES)


class ObjectReader(io.RawIOBase):
    """Base class of file objects that read an object of known size by ranges."""

    def __init__(self, path: Any, size: int):
        self.name = str(path)
        self._path, self._size, self._position = path, size, 0
        self._generation: bytes | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self._size)
        if stop <= self._position:
            return 0
        content = self._read(self._position, stop)
        view[: len(content)] = content
        self._position = stop
        return len(content)

    def _read(self, start: int, stop: int) -> bytes:
        [found] = objects.read_ranges(self._path, [(start, stop)])
        if found is None or len(found.content) != stop - start:
            why = f"it has fewer than {stop} bytes, or was deleted; run the same command again"
            raise UnreadableError(f"{self._path} cannot be read: {why}")
        if self._generation not in (None, found.generation):
            raise UserError(f"{self._path}: changed while it was read; run the same command again")
        self._generation = found.generation
        return found.content
