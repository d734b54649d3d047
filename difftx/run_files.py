"""The lock of a run's directory, which prevents a second training there, and the small files of a run.

All files of a run except checkpoints and exports are small. Code reads and writes them as local files. If the run is in
a bucket, its owner copies the small files to a scratch folder at its start, changes the copy, and pushes changed files
to the bucket. Each file is one object. A push writes it only if it still has the generation that this process has seen
last. docs/design.md, section 12, describes when files are pushed.
"""

import atexit
import contextlib
import errno
import fcntl
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from difftx.errors import RunError, UserError, note_copy, printable
from difftx.files import UNLOCKED, Owner, local_name, read_file, remove_temporaries, retry_read
from difftx.storage import objects
from difftx.storage.lock import BucketLock, busy
from difftx.storage.paths import AnyPath, BucketPath, is_bucket

PUSH_SECONDS = 120.0  # Time between two pushes by the owner's thread.
FIRST = ("manifest.json", "config.json")  # Push these first: the manifest names the extensions that the config needs.
# Matches the small files. train.log, which `difftx sweep` writes, is not one of them. Names of folders end in "/".
COPIED = re.compile(r"[^/.][^/]*\.jsonl?|evals/.*[^/]|checkpoints/\d+/manifest\.json")


def pulled(workdir: AnyPath) -> Path:
    """Return a local folder with the small files of a run: the run directory, or for a bucket an up-to-date copy.

    A copy also contains the manifests of the checkpoints. It is deleted when the process ends.
    """
    if not is_bucket(workdir):
        return workdir
    if (address := str(workdir)) not in _copies:
        _copies[address] = _Copy(workdir)
        atexit.register(_copies[address].close)
    _copies[address].pull("evals", "checkpoints")
    return _copies[address].folder


@contextlib.contextmanager
def small_files(workdir: AnyPath, lock: Owner = UNLOCKED) -> Iterator[Owner]:
    """Yield an owner whose `folder` contains the small files of a run. Push changed files at the end of the block.

    Without a lock, as in `difftx eval`, other processes may change other files of the run at the same time.
    """
    if not is_bucket(workdir):
        yield Owner(workdir, lock.check)
        return
    copy, ended = _Copy(workdir, lock), threading.Event()
    copy.pull("evals")
    thread = threading.Thread(target=_push_regularly, args=[copy, ended], name="difftx push", daemon=True)
    thread.start()
    try:
        yield copy
    except BaseException:
        with contextlib.suppress(OSError, UserError, RunError):
            copy.push()
        raise
    else:
        copy.push()
    finally:
        ended.set()
        thread.join()
        copy.close()


def _push_regularly(owner: Owner, ended: threading.Event) -> None:
    while not ended.wait(PUSH_SECONDS):
        with contextlib.suppress(OSError, UserError, RunError):  # The next push tries again.
            owner.push()


class _Copy(Owner):
    """A local copy of a run's small files, for a run in a bucket."""

    def __init__(self, workdir: BucketPath, lock: Owner = UNLOCKED):
        self._workdir = workdir
        self._scratch = tempfile.TemporaryDirectory(prefix="difftx-")
        super().__init__(Path(self._scratch.name).resolve())
        self.check = lock.check
        note_copy(str(self.folder), str(workdir))
        self._lock = threading.Lock()
        self._versions: dict[str, str] = {}  # Name of a file → its version in the last listing.
        self._generations: dict[str, bytes] = {}  # Name → generation that this process last read or wrote.
        self._states: dict[str, tuple[int, ...]] = {}  # Name → `_state` of the local file at that generation.

    def close(self) -> None:
        """Delete the copy."""
        self._scratch.cleanup()

    def pull(self, *folders: str) -> None:
        """Download small files in the run's folder and below the given subfolders that have changed in the bucket."""
        with self._lock, ThreadPoolExecutor(objects.CONCURRENT) as pool:
            listed = objects.describe_files(self._workdir)
            for folder in folders:
                below = objects.describe_below(self._workdir / folder)
                listed |= {f"{folder}/{name}": each for name, each in below.items()}
            listed = {name: each for name, each in listed.items() if COPIED.fullmatch(name)}
            changed = [name for name in listed if listed[name].version != self._versions.get(name)]
            for name in self._versions.keys() - listed.keys():
                (self.folder / name).unlink(missing_ok=True)
                del self._versions[name]
            contents = pool.map(lambda name: objects.read_verified(self._workdir / name, listed[name]), changed)
            for name, found in zip(changed, contents, strict=True):
                if found is not None:  # None: the file was deleted after the listing.
                    target = self.folder / local_name(self._workdir, name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(found.content)
                    self._versions[name], self._generations[name] = listed[name].version, found.generation
                    self._states[name] = _state(target)

    def push(self) -> None:
        """Upload the files that have changed since the last push, and delete objects whose files are gone."""
        with self._lock:
            self.check()
            paths = (path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith("."))
            files = {path.relative_to(self.folder).as_posix(): path for path in paths}
            for name in sorted(files, key=lambda name: (name not in FIRST, name != FIRST[0], name)):
                with contextlib.suppress(FileNotFoundError):  # Deleted in the meantime.
                    self._push_file(name, files[name])
            for name in self._generations.keys() - files.keys():
                objects.delete_if(self._workdir / name, self._generations.pop(name))
                self._states.pop(name)

    def _push_file(self, name: str, file: Path) -> None:
        state = _state(file)  # Before the read, so that a file that changes during the read is pushed again.
        if state == self._states.get(name):
            return
        path, content, generation = self._workdir / name, file.read_bytes(), self._generations.get(name)
        while (written := objects.write_if(path, content, generation)) is None:
            # If another process has taken over the run, `check` raises an error. If not, a process without the lock has
            # written the file: `difftx eval`, or a former owner that was suspended before its write. Overwrite it.
            self.check()
            found = objects.read(path)
            generation = None if found is None else found.generation
        self._generations[name], self._states[name] = written, state


_copies: dict[str, _Copy] = {}  # Address of a run → the copy that `pulled` returns.


def _state(file: Path) -> tuple[int, ...]:
    """Return file properties that change whenever the content changes."""
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


@contextlib.contextmanager
def lock_workdir(workdir: AnyPath, takeover_seconds: float, wait_seconds: float) -> Iterator[Owner]:
    """Lock the directory of a run (see `locked`). Yield an owner whose folder contains the run's small files."""
    lock = locked(workdir, f"--workdir={workdir}", takeover_seconds, wait_seconds)
    with lock as held, small_files(workdir, held) as owner:
        yield owner


@contextlib.contextmanager
def locked(folder: AnyPath, flag: str, takeover_seconds: float, wait_seconds: float) -> Iterator[Owner]:
    """Lock a folder. Raise `UserError` if another process still holds the lock after `wait_seconds`.

    In a bucket, wait at least until a lock that its owner no longer renews has expired (`takeover_seconds`). Yield an
    owner. Its `check` raises an error if this process has lost the folder: in a bucket, if another process has taken
    over the lock; on a disk, if the locked folder is no longer at its path. `flag` is the flag with the folder.
    """
    if is_bucket(folder):
        options = {"takeover_seconds": takeover_seconds, "wait_seconds": wait_seconds}
        with BucketLock(folder / ".lock", flag, **options) as held:
            yield Owner(check=held.check)
        return
    # Lock both the folder and a file in it: a user may delete `.lock`, and NFS cannot lock folders.
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, path, deadline = os.open(folder, os.O_RDONLY), folder / ".lock", time.monotonic() + wait_seconds
    status = os.fstat(descriptor)  # While `descriptor` is open, no other folder has the same inode number.

    def require_same_folder() -> None:
        try:
            is_same = os.path.samestat(retry_read(folder, folder.stat), status)
        except (FileNotFoundError, NotADirectoryError):
            is_same = False
        if not is_same:
            # At this error, `run_command` ends the process without waiting for other processes, which still train.
            why = "this folder was moved, deleted, replaced or unmounted while this process wrote there, so it stops"
            raise FileNotFoundError(errno.ENOENT, why, str(folder))

    try:  # The operating system releases the locks when the process ends, even if it is killed.
        folder_is_locked = _wait_for_lock(descriptor, path, flag, deadline)
        require_same_folder()  # The folder may have been moved during the wait.
        with path.open("a+") as file:
            if not _wait_for_lock(file.fileno(), path, flag, deadline) and not folder_is_locked:
                print(printable(f"{flag}: no file locks here, so nothing keeps a second process out"), flush=True)
            file.truncate(0)
            print(f"process {os.getpid()} on {platform.node()}", file=file, flush=True)
            try:
                remove_temporaries(folder)
                yield Owner(check=require_same_folder)
            finally:
                file.truncate(0)  # Another process may get this process id later.
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, path: Path, flag: str, deadline: float) -> bool:
    """Lock an open file or folder. Return True, or False if the file system does not support locks.

    At the deadline, raise `UserError` with the name of the process that holds the lock, which the file `path` contains.
    """
    holder = None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            # Some file systems do not support locks, such as Lustre without -o flock. NFS cannot lock folders (EBADF).
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF):
                raise
            return False
        if holder is None:
            holder = (read_file(path) or b"").decode().strip() or "another process"
            print(printable(f"{path.parent}: waiting for {holder}, which is at work there"), flush=True)
        if time.monotonic() > deadline:
            raise busy(flag, holder)
        time.sleep(0.2)
