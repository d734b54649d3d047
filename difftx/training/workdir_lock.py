"""The lock of a run's directory, which keeps a second training out."""

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from difftx.config import MultihostConfig
from difftx.errors import UserError, printable
from difftx.files import read_file, remove_temporaries
from difftx.folders import lock_file
from difftx.storage import objects
from difftx.storage.lock import BucketLock
from difftx.storage.paths import AnyPath, is_bucket


@contextlib.contextmanager
def lock_workdir(workdir: AnyPath, limits: MultihostConfig, wait_seconds: float) -> Iterator[Callable[[], None]]:
    """Lock the directory of a run. Raise `UserError` if another process still has the lock after `wait_seconds`.

    In a bucket, wait longer if necessary, until a lock that its owner no longer renews has expired
    (`limits.lock_takeover_seconds`). Yield a function that raises an error if this process has lost the lock, which is
    possible in a bucket.
    """
    if not is_bucket(workdir):
        with _lock_folder(workdir, wait_seconds):
            yield lambda: None
        return
    path, takeover = workdir / ".lock", float(limits.lock_takeover_seconds)
    with BucketLock(path, takeover_seconds=takeover, wait_seconds=wait_seconds) as held:
        objects.remove_probes(workdir, path)
        yield held.check


@contextlib.contextmanager
def _lock_folder(workdir: Path, wait_seconds: float) -> Iterator[None]:
    """Lock the folder and its file `.lock`, which names the process that has the lock, and is empty afterwards."""
    # The folder is locked because a user may delete `.lock`, and the file because NFS cannot lock folders.
    workdir.mkdir(parents=True, exist_ok=True)
    folder, path, deadline = os.open(workdir, os.O_RDONLY), workdir / ".lock", time.monotonic() + wait_seconds
    try:  # However the process ends, the operating system releases the locks.
        folder_is_locked = _wait_for_lock(folder, path, deadline)
        with path.open("a+") as file:
            if not _wait_for_lock(file.fileno(), path, deadline) and not folder_is_locked:
                print(printable(f"{workdir}: no file locks here, so nothing keeps a second training out"), flush=True)
            file.truncate(0)
            print(f"process {os.getpid()} on {platform.node()}", file=file, flush=True)
            try:
                remove_temporaries(workdir)
                yield
            finally:
                file.truncate(0)  # The process id may become that of another process.
    finally:
        os.close(folder)


def _wait_for_lock(descriptor: int, path: Path, deadline: float) -> bool:
    """Lock an open file or folder, and return True, or False if the file system has no such locks.

    At the deadline, raise `UserError` with the name of the process that has the lock, from the file `path`.
    """
    holder = None
    while True:
        try:
            return lock_file(descriptor)
        except BlockingIOError:
            pass
        if holder is None:
            holder = (read_file(path) or b"").decode().strip() or "another process"
            print(printable(f"{path.parent}: waiting for {holder}, which trains there"), flush=True)
        if time.monotonic() > deadline:
            raise UserError(f"--workdir={path.parent}: {holder} trains there; stop it, or use another --workdir")
        time.sleep(0.2)
