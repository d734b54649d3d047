"""A log in a bucket, to which several processes append, and which one process may replace.

The object at the log's path is its head. It holds an epoch, a number `first`, and the bytes of all appends before it.
Append n of an epoch is the object `<path>.parts/<epoch>/<n>`, a part, which is created only if it is absent. An append
takes the first absent number, so numbers have no gaps. The content of the log is that of the head and of the parts
`first`, `first` + 1, … until one is absent. docs/storage_protocol.md explains why no row is lost or doubled.
"""

import hashlib
import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from difftx.errors import RunError, UnreadableError
from difftx.storage import objects

if TYPE_CHECKING:
    from etils import epath

COMPACTION_PARTS = 500  # Number of parts after which an append moves them into the head.
ATTEMPTS = 100  # Tries of an operation that other processes interrupt.
HEADER = re.compile(rb'\{"difftx": "log", [^\n]*\}\n')


class _Head(NamedTuple):
    """The head of a log. An absent one has generation None."""

    epoch: int
    first: int
    content: bytes
    generation: bytes | None


class BucketLog:
    """The log at a path in a bucket. Each append is visible as a whole or not at all, and once."""

    def __init__(self, path: "epath.Path"):
        self._path, self._folder = path, path.with_name(f"{path.name}.parts")
        self._lock = threading.Lock()
        self._owned: int | None = None  # Epoch that this object has begun with `replace`.
        self._head: _Head | None = None  # Head that was read last. `content` is not kept.
        self._next = 0  # Number from which `append` tries to create a part, in the epoch of `_head`.

    def read(self) -> bytes:
        """Return the content. An absent log has none."""
        for _ in range(ATTEMPTS):
            head = self._read_head()
            content = b"".join([head.content, *self._read_parts(head)])
            if self._is_current(head):  # Otherwise another process may have deleted parts in the meantime.
                return content
        raise UnreadableError(f"{self._path} cannot be read: other processes replace it all the time")

    def append(self, content: bytes) -> None:
        """Append bytes. They are visible when the function returns; after an `UnreadableError`, they may be.

        Raise `RunError` if another process has replaced the content that this object wrote with `replace`.
        """
        with self._lock:
            head = self._refreshed()
            part = _sealed({"id": uuid.uuid4().hex}, content)
            number = max(self._next, head.first)
            while objects.write_if(self._part(head.epoch, number), part, None) is None:
                number += 1  # Another process has appended.
            newest = head if self._is_current(head) else self._read_head()
            self._require_owned(newest)
            # If another process has moved the part into the head, `first` is larger by at most `COMPACTION_PARTS`. If
            # it is larger by more, the number may be one whose part was deleted before this append.
            if newest.epoch != head.epoch or newest.first > number + COMPACTION_PARTS:
                raise RunError(
                    f"{self._path}: another process replaced this file during a write; run the command again"
                )
            self._head, self._next = newest._replace(content=b""), number + 1
            if self._next - newest.first >= COMPACTION_PARTS:
                self._compact()

    def replace(self, content: bytes) -> None:
        """Atomically replace the content. From then on, this object accepts no `replace` by another process."""
        with self._lock:
            for _ in range(ATTEMPTS):
                head = self._read_head()
                self._require_owned(head)
                # Later than all epochs whose parts may be left, also of a log that was removed.
                epoch = max(head.epoch + 1, time.time_ns())
                generation = self._write_head(head, epoch=epoch, first=0, content=content)
                if generation is not None:
                    self._owned, self._next = epoch, 0
                    self._head = _Head(epoch, 0, b"", generation)
                    return self._delete_old_parts(self._head)
            raise UnreadableError(f"{self._path} cannot be written: other processes replace it all the time")

    def remove(self) -> None:
        """Delete the log. It may be absent."""
        with self._lock:
            self._owned = self._head = None
            objects.delete([self._path])
            objects.delete(self._folder / name for name in objects.list_below(self._folder))

    def _refreshed(self) -> _Head:
        """Return the newest head, after its creation if it is absent."""
        head = self._head
        if head is None or not self._is_current(head):
            found = self._read_head()
            self._require_owned(found)
            if found.generation is None:
                epoch = time.time_ns()
                if self._write_head(found, epoch=epoch, first=0, content=b"") is None:
                    return self._refreshed()  # Another process has created it.
                found = self._read_head()
            if head is None or head.epoch != found.epoch:
                self._next = 1 + max((n for epoch, n in self._listed() if epoch == found.epoch), default=-1)
            head = found
        return head

    def _compact(self) -> None:
        """Move all parts into the head, and delete them."""
        head = self._read_head()
        parts = list(self._read_parts(head))
        first, content = head.first + len(parts), b"".join([head.content, *parts])
        if (generation := self._write_head(head, epoch=head.epoch, first=first, content=content)) is not None:
            self._head = _Head(head.epoch, first, b"", generation)
            self._delete_old_parts(self._head)

    def _delete_old_parts(self, head: _Head) -> None:
        """Delete the parts of earlier epochs, and those long before `first`. A killed process may have left them.

        The last `COMPACTION_PARTS` parts before `first` remain, so that a slow append by another process finds its
        number taken.
        """
        kept = head.epoch, head.first - COMPACTION_PARTS
        old = [(epoch, number) for epoch, number in self._listed() if (epoch, number) < kept]
        objects.delete(self._part(*each) for each in old)

    def _require_owned(self, head: _Head) -> None:
        if self._owned is not None and head.epoch != self._owned:
            raise RunError(f"{self._path}: another process has replaced this file, so this process stops writing it")

    def _read_head(self) -> _Head:
        header, content, generation = _verified(self._path, objects.read(self._path)) or ({}, b"", None)
        return _Head(header.get("epoch", 0), header.get("first", 0), content, generation)

    def _write_head(self, head: _Head, *, epoch: int, first: int, content: bytes) -> bytes | None:
        """Replace a head unless another process has. Return the new generation, or None if another process has."""
        sealed = _sealed({"id": uuid.uuid4().hex, "epoch": epoch, "first": first}, content)
        return objects.write_if(self._path, sealed, head.generation)

    def _read_parts(self, head: _Head) -> Iterator[bytes]:
        """Yield the content of all parts after a head. The listing may be old: reads find the end."""
        listed = [number for epoch, number in self._listed() if epoch == head.epoch]
        number, end = head.first, max(listed, default=head.first - 1) + 1
        while True:
            paths = [self._part(head.epoch, each) for each in range(number, max(end, number + 1))]
            for path, found in zip(paths, objects.read_all(paths), strict=True):
                if (verified := _verified(path, found)) is None:
                    return
                yield verified[1]
            number += len(paths)

    def _is_current(self, head: _Head) -> bool:
        if head.generation is None:
            return objects.read(self._path) is None
        return objects.is_current(self._path, head.generation)

    def _listed(self) -> list[tuple[int, int]]:
        """Return epoch and number of each part in the listing."""
        found = map(re.compile(r"(\d+)/(\d+)").fullmatch, objects.list_below(self._folder))
        return [(int(name[1]), int(name[2])) for name in found if name]

    def _part(self, epoch: int, number: int) -> "epath.Path":
        return self._folder / str(epoch) / f"{number:08d}"


def _sealed(header: dict[str, Any], content: bytes) -> bytes:
    """Return the bytes of an object: one JSON line with the SHA-256 of the content, then the content."""
    line = {"difftx": "log", **header, "sha256": hashlib.sha256(content).hexdigest()}
    return json.dumps(line).encode() + b"\n" + content


def _verified(path: "epath.Path", found: objects.Stored | None) -> tuple[dict[str, Any], bytes, bytes | None] | None:
    """Return header, content and generation of an object that was read, or None if it is absent.

    Read it again while the content does not match. The header of an object that was copied from a local disk is empty.
    """
    for pause in (*objects.REREAD_SECONDS, None):
        if found is None:
            return None
        if sealed := HEADER.match(found.content):
            header, content = json.loads(sealed[0]), found.content[sealed.end() :]
            if header["sha256"] == hashlib.sha256(content).hexdigest():
                return header, content, found.generation
        if not found.content.startswith(b'{"difftx": "log"') and objects.read_verified(path) == found.content:
            return {}, found.content, found.generation
        if pause is not None:
            time.sleep(pause)
            found = objects.read(path)
    raise UnreadableError(f"{path} cannot be read: its content does not have the SHA-256 of its first line")
