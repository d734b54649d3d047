"""The lock of a run in a bucket: an object that names its owner, which the owner renews.

A waiting process takes the lock over if the generation of the object has not changed for `takeover_seconds` on its own
clock, so that clocks may differ. If the `takeover_seconds` of the owner and of the waiting process differ, the larger
one counts. The owner stops writing before that: it counts from the start of its last renewal, on a clock that includes
suspension.
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

RENEWALS = 6  # Renewals of the owner within `takeover_seconds`.
# Share of `takeover_seconds` for which the owner trusts a renewal. The rest covers clocks of different speed.
TRUSTED = 0.8
POLLS = 10  # Reads of a waiting process within `takeover_seconds`.
EXTRA_WAIT = 1.5  # A waiting process gives up after this multiple of `takeover_seconds`, and after `wait_seconds`.


def busy(flag: str, owner: str) -> UserError:
    """Return the error of a process that does not get the lock of a folder, which `flag` names."""
    return UserError(f"{flag}: {owner} is at work there; stop it, or use another {flag.partition('=')[0]}")


class BucketLock:
    """The lock at a path in a bucket, as a context manager. Only its owner may write what the lock protects.

    Entering raises `UserError` if a live process still has the lock after `wait_seconds`.
    """

    def __init__(self, path: BucketPath, flag: str, *, takeover_seconds: float, wait_seconds: float):
        """`flag` names the folder for the user."""
        self._path, self._flag, self._takeover, self._wait = path, flag, takeover_seconds, wait_seconds
        self._me: dict[str, Any] = {"id": uuid.uuid4().hex, "host": platform.node(), "pid": os.getpid()}
        self._me |= {"takeover_seconds": takeover_seconds}
        self._renewing = threading.Lock()
        self._generation: bytes | None = None
        self._renewed = 0.0  # Time before the last renewal, on the clock of `_now`.
        self._successor: str | None = None  # The process that has taken the lock over.
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
                # Mark the lock as free and keep it, because not every store deletes on a condition. If the write fails,
                # the next process waits until the lock has expired.
                with contextlib.suppress(UserError, UnreadableError):
                    objects.write_if(self._path, _content(None), self._generation)

    def check(self) -> None:
        """Raise `RunError` if this process has lost or released the lock. Call this directly before each commit.

        Without a recent renewal, renew the lock now, and raise `UnreadableError` if the store cannot be reached.
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
            now = time.monotonic()  # After the read, because the owner may have renewed the lock until then.
            begun = now if begun is None else begun  # The first request may take seconds.
            generation = None if found is None else found.generation
            if generation != seen:
                seen, since = generation, now
            owner = None if found is None else _owner(found.content)
            # The owner renews the lock six times within its own takeover time, which may be longer.
            takeover = self._takeover if owner is None else max(self._takeover, owner["takeover_seconds"])
            if owner is None or now - since > takeover:
                started = _now()
                generation = objects.write_if(self._path, _content(self._me), seen)
                if generation is not None:
                    self._generation, self._renewed = generation, started
                    return
                continue  # Another process was first.
            if not announced:
                print(printable(f"{self._path.parent}: waiting for {_name(owner)}, which is at work there"), flush=True)
                announced = True
            if now - begun > max(self._wait, EXTRA_WAIT * takeover):
                raise busy(self._flag, _name(owner))
            time.sleep(max(0.0, min(self._takeover / POLLS, since + takeover - now)))

    def _renew_regularly(self) -> None:
        while not self._ended.wait(self._takeover / RENEWALS) and self._successor is None:
            # `check` raises the error if no renewal succeeds in time.
            with self._renewing, contextlib.suppress(UserError, UnreadableError):
                self._renew()

    def _renew(self) -> None:
        """Write the lock again, unless another process has. The caller holds `_renewing`."""
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
            self._generation = found.generation  # A renewal may take place although it raises an error.


def _content(owner: dict[str, Any] | None) -> bytes:
    """Return a new content of a lock. Contents differ, because S3's generation is a hash of the content."""
    return json.dumps({"owner": owner, "renewal": uuid.uuid4().hex}).encode()


def _owner(content: bytes) -> dict[str, Any] | None:
    """Return the owner in the content of a lock, or None if the lock is free."""
    return json.loads(content)["owner"]


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}"


def _now() -> float:
    """Return the seconds of a clock that also counts while the machine is suspended, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
