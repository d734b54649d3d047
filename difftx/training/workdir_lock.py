"""The lock of a run's directory, which keeps a second training out."""

import contextlib
import errno
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from difftx.config import MultihostConfig
from difftx.errors import UserError, printable
from difftx.files import Owner, read_file, remove_temporaries, retry_read
from difftx.folders import lock_file
from difftx.run_files import small_files
from difftx.storage import objects
from difftx.storage.lock import BucketLock
from difftx.storage.paths import AnyPath, is_bucket


@contextlib.contextmanager
def lock_workdir(workdir: AnyPath, limits: MultihostConfig, wait_seconds: float) -> Iterator[Owner]:
    """Lock the directory of a run. Raise `UserError` if another process still has the lock after `wait_seconds`.

    In a bucket, wait longer if necessary, until a lock that its owner no longer renews has expired
    (`limits.lock_takeover_seconds`). Yield the owner of the run, which raises an error if this process has lost the
    run: if another process has taken over the lock in a bucket, or if the locked folder is no longer at its path.
    """
    if not is_bucket(workdir):
        with _lock_folder(workdir, wait_seconds) as require_same_folder:
            yield Owner(workdir, require_same_folder)
        return
    path, takeover = workdir / ".lock", float(limits.lock_takeover_seconds)
    with BucketLock(path, takeover_seconds=takeover, wait_seconds=wait_seconds) as held:
        objects.remove_probes(workdir, path)
        with small_files(workdir, held) as owner:
            yield owner


@contextlib.contextmanager
def _lock_folder(workdir: Path, wait_seconds: float) -> Iterator[Callable[[], None]]:
    """Lock the folder and its file `.lock`, which names the process that has the lock, and is empty afterwards."""
    # The folder is locked because a user may delete `.lock`, and the file because NFS cannot lock folders.
    workdir.mkdir(parents=True, exist_ok=True)
    folder, path, deadline = os.open(workdir, os.O_RDONLY), workdir / ".lock", time.monotonic() + wait_seconds
    locked = os.fstat(folder)  # While `folder` is open, no other folder has the same inode number.

    def require_same_folder() -> None:
        try:
            is_same = os.path.samestat(retry_read(workdir, workdir.stat), locked)
        except (FileNotFoundError, NotADirectoryError):
            is_same = False
        if not is_same:
            # `run_command` ends the process at this error without waiting for other processes, which still train.
            why = "this folder was moved, deleted, replaced or unmounted while this process trained in it, so it stops"
            raise FileNotFoundError(errno.ENOENT, why, str(workdir))

    try:  # However the process ends, the operating system releases the locks.
        folder_is_locked = _wait_for_lock(folder, path, deadline)
        require_same_folder()  # It may have been moved during the wait.
        with _open_lock_file(path) as file:
            if not _wait_for_lock(file.fileno(), path, deadline) and not folder_is_locked:
                print(printable(f"{workdir}: no file locks here, so nothing keeps a second training out"), flush=True)
            file.truncate(0)
            print(f"process {os.getpid()} on {platform.node()}", file=file, flush=True)
            try:
                remove_temporaries(workdir)
                yield require_same_folder
            finally:
                file.truncate(0)  # The process id may become that of another process.
    finally:
        os.close(folder)


def _open_lock_file(path: Path) -> TextIO:
    """Open `.lock`, but not the target of a link, because the file is emptied."""
    try:
        return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "a+")
    except PermissionError as error:
        raise UserError(
            f"{path}: {error.strerror}; its owner lets others train there with: chmod -R g+w {path.parent}"
        ) from error


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
