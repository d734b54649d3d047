"""The small files of a run, which are always local: those of a run in a bucket are copied to a scratch folder.

All files of a run are small, except checkpoints and exports. The owner of a run in a bucket copies them at its start,
changes the copy, and pushes the changed files. Each file is one object, which is written on the condition of the
generation that this process has seen last. docs/design.md, section 12, says when.
"""

import atexit
import contextlib
import re
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from difftx.errors import RunError, UserError, note_copy
from difftx.files import Owner, local_name
from difftx.storage import objects
from difftx.storage.lock import BucketLock
from difftx.storage.paths import AnyPath, BucketPath, is_bucket

PUSH_SECONDS = 120.0  # Time between two pushes by the thread of an owner.
FIRST = ("manifest.json", "config.json")  # A config can only be read with the extensions that the manifest names.
# Files that are copied. `difftx sweep` writes train.log, which is none of them. A name that ends in "/" is a folder.
COPIED = re.compile(r"[^/.][^/]*\.jsonl?|evals/.*[^/]|checkpoints/\d+/manifest\.json")


def pulled(workdir: AnyPath) -> Path:
    """Return a folder with the small files of a run: that of the run on a disk, or else an up-to-date local copy.

    The copy also has the manifests of the checkpoints. It is deleted when the process ends.
    """
    if not is_bucket(workdir):
        return workdir
    if (address := str(workdir)) not in _copies:
        _copies[address] = _Copy(workdir)
        atexit.register(_copies[address].close)
    _copies[address].pull("evals", "checkpoints")
    return _copies[address].folder


@contextlib.contextmanager
def small_files(workdir: AnyPath, lock: BucketLock | None = None) -> Iterator[Owner]:
    """Yield an owner whose `folder` has the small files of a run. The end of the block pushes the changed ones.

    Without a lock, as in `difftx eval`, other processes may change other files of the run meanwhile.
    """
    if not is_bucket(workdir):
        yield Owner(workdir)
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
    """A local copy of the small files of a run in a bucket."""

    def __init__(self, workdir: BucketPath, lock: BucketLock | None = None):
        self._workdir = workdir
        self._scratch = tempfile.TemporaryDirectory(prefix="difftx-")
        super().__init__(Path(self._scratch.name).resolve())
        if lock is not None:
            self.check, self.raise_if_lost = lock.check, lock.raise_if_lost
        note_copy(str(self.folder), str(workdir))
        self._lock = threading.Lock()
        self._versions: dict[str, str] = {}  # Name of a file → its version in the listing that was pulled last.
        self._generations: dict[str, bytes] = {}  # Name → generation that this process has read or written last.
        self._states: dict[str, tuple[int, ...]] = {}  # Name → state of the local file with that content.

    def close(self) -> None:
        """Delete the copy."""
        self._scratch.cleanup()

    def pull(self, *folders: str) -> None:
        """Copy the small files in the run's folder and below some of its folders, unless the copy is up to date."""
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
                if found is not None:  # Otherwise it has been deleted since the listing.
                    target = self.folder / local_name(self._workdir, name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(found.content)
                    self._versions[name], self._generations[name] = listed[name].version, found.generation
                    self._states[name] = _state(target)

    def push(self) -> None:
        """Write the files that have changed since the last push, and delete those that are gone."""
        with self._lock:
            self.check()
            paths = (path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith("."))
            files = {path.relative_to(self.folder).as_posix(): path for path in paths}
            for name in sorted(files, key=lambda name: (name not in FIRST, name != FIRST[0], name)):
                with contextlib.suppress(FileNotFoundError):  # Deleted meanwhile.
                    self._push_file(name, files[name])
            for name in self._generations.keys() - files.keys():
                objects.delete_if(self._workdir / name, self._generations.pop(name))
                self._states.pop(name)

    def _push_file(self, name: str, file: Path) -> None:
        state = _state(file)  # Before the read: a file that changes meanwhile is pushed again next time.
        if state == self._states.get(name):
            return
        path, content, generation = self._workdir / name, file.read_bytes(), self._generations.get(name)
        while (written := objects.write_if(path, content, generation)) is None:
            # Either another process has taken over the run, and `check` raises an error, or a process without the lock
            # has written: `difftx eval`, or a former owner that was frozen before its write. The last one wins.
            self.check()
            found = objects.read(path)
            generation = None if found is None else found.generation
        self._generations[name], self._states[name] = written, state


_copies: dict[str, _Copy] = {}  # Address of a run → the copy that `pulled` returns.


def _state(file: Path) -> tuple[int, ...]:
    """Return what changes with the content of a file."""
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino
