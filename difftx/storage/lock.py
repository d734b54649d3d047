"""The lock of a run in a bucket: an object that names its owner. The owner renews it by writing it again.

A waiting process takes over the lock if the object's generation has not changed for `takeover_seconds`. It measures
this time on its own clock, so clocks of different machines may differ. If the owner and the waiting process have
different `takeover_seconds`, the larger value counts. The owner stops writing before another process can take over: it
measures the time since the start of its last renewal, on a clock that also counts while the machine is suspended.
"""

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from types import TracebackType
from typing import Any, Self

from difftx.errors import RunError, UnreadableError, UserError, printable
from difftx.storage import objects
from difftx.storage.paths import BucketPath

RENEWALS = 6  # Number of renewals by the owner per `takeover_seconds`.
# The owner trusts a renewal for this share of `takeover_seconds`. The rest is a margin for clocks of different speed.
TRUSTED = 0.8
POLLS = 10  # Number of reads by a waiting process per `takeover_seconds`.
EXTRA_WAIT = 1.5  # A waiting process waits for at least this multiple of `takeover_seconds` before it gives up.


def busy(flag: str, owner: str) -> UserError:
    """Return the error for a process that does not get the lock. `flag` is the flag with the folder, `--flag=PATH`."""
    return UserError(f"{flag}: {owner} is at work there; stop it, or use another {flag.partition('=')[0]}")


class BucketLock:
    """The lock at a path in a bucket, as a context manager. Only its owner may write the files that it protects.

    Entering raises `UserError` if a live process still holds the lock after `wait_seconds`.
    """

    def __init__(self, path: BucketPath, flag: str, *, takeover_seconds: float, wait_seconds: float):
        """Prepare the lock. `flag` is the flag with the locked folder, for messages."""
        self._path, self._flag, self._takeover, self._wait = path, flag, takeover_seconds, wait_seconds
        self._me: dict[str, Any] = {"id": uuid.uuid4().hex, "host": platform.node(), "pid": os.getpid()}
        self._me |= {"takeover_seconds": takeover_seconds}
        self._renewing = threading.Lock()
        self._generation: bytes | None = None
        self._renewed = 0.0  # Time (by `_now`) at which the last renewal started.
        self._successor: str | None = None  # The process that has taken over the lock, if any.
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._acquire()
        self._thread = threading.Thread(target=self._renew_regularly, name="difftx lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._ended.set()
        self._thread.join()
        with self._renewing:
            if self._successor is None:
                # Mark the lock as free instead of deleting it, because not every store supports conditional deletes. If
                # the write fails, the next process waits until the lock expires.
                with contextlib.suppress(UserError, UnreadableError):
                    objects.write_if(self._path, _content(None), self._generation)

    def check(self) -> None:
        """Raise `RunError` if this process has lost or released the lock. Call this directly before each commit.

        If the last renewal is too old, renew the lock now. Raise `UnreadableError` if the store cannot be reached.
        """
        with self._renewing:
            if self._ended.is_set():
                raise RunError(f"{self._path.parent}: this process has released the lock, so it does not write there")
            if self._successor is None and _now() - self._renewed > TRUSTED * self._takeover:
                self._renew()
            if self._successor is not None:
                raise RunError(
                    f"{self._path.parent}: {self._successor} has taken this folder over, because this process did not "
                    f"renew its lock for {self._takeover:g} s; this process stops"
                )

    def _acquire(self) -> None:
        begun, seen, since, announced = None, None, 0.0, False
        while True:
            found = objects.read_verified(self._path)
            now = time.monotonic()  # Not before the read, because the owner may renew during the read.
            begun = now if begun is None else begun  # Do not count the first request, which may take seconds.
            generation = None if found is None else found.generation
            if generation != seen:
                seen, since = generation, now
            owner = None if found is None else _owner(found.content)
            # If the owner has a longer takeover time, it renews the lock less often.
            takeover = self._takeover if owner is None else max(self._takeover, owner["takeover_seconds"])
            if owner is None or now - since > takeover:
                started = _now()
                generation = objects.write_if(self._path, _content(self._me), seen)
                if generation is not None:
                    self._generation, self._renewed = generation, started
                    return
                continue  # Another process has taken over the lock first.
            if not announced:
                print(printable(f"{self._path.parent}: waiting for {_name(owner)}, which is at work there"), flush=True)
                announced = True
            if now - begun > max(self._wait, EXTRA_WAIT * takeover):
                raise busy(self._flag, _name(owner))
            time.sleep(max(0.0, min(self._takeover / POLLS, since + takeover - now)))

    def _renew_regularly(self) -> None:
        while not self._ended.wait(self._takeover / RENEWALS) and self._successor is None:
            # Ignore errors here. `check` raises one if no renewal succeeds in time.
            with self._renewing, contextlib.suppress(UserError, UnreadableError):
                self._renew()

    def _renew(self) -> None:
        """Write the lock again, unless another process has written it. The caller must hold `_renewing`."""
        while True:
            started = _now()
            generation = objects.write_if(self._path, _content(self._me), self._generation)
            if generation is not None:
                self._generation, self._renewed = generation, started
                return
            found = objects.read_verified(self._path)
            owner = None if found is None else _owner(found.content)
            if found is None or owner is None or owner["id"] != self._me["id"]:
                self._successor = "another process" if owner is None else _name(owner)
                return
            self._generation = found.generation  # An earlier renewal raised an error but was written.


def _content(owner: dict[str, Any] | None) -> bytes:
    """Return a unique content for the lock object. It must be unique, because S3's generation is a content hash."""
    return json.dumps({"owner": owner, "renewal": uuid.uuid4().hex}).encode()


def _owner(content: bytes) -> dict[str, Any] | None:
    """Return the owner that a lock object's content names, or None if the lock is free."""
    return json.loads(content)["owner"]


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}"


def _now() -> float:
    """Return the seconds of a clock that also runs while the machine is suspended, if the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
