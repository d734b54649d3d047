"""Write files and folders atomically and read them with retries, on local disks and in buckets.

Functions that read a file retry after temporary errors, and raise `UnreadableError` if all attempts fail. Functions
with a parameter of type `AnyPath` also accept paths in buckets (docs/storage.md).
"""

import argparse
import contextlib
import errno
import fnmatch
import functools
import glob
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from difftx.errors import UnreadableError, UserError, note_copy
from difftx.storage import hub, objects
from difftx.storage.paths import AnyPath, BucketPath, is_bucket, path_of
from difftx.storage.reading import open_object

# Pauses between read attempts. Together, they give a file server time to restart.
RETRY_SECONDS = (0.2, 0.8, 2.0)
ONE_REQUEST_BYTES = 32 * 2**20  # Larger files are uploaded to a bucket in parts.


def sha256_of(file: AnyPath) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with open_file(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@functools.cache  # Hash once: if the files change later, the process still runs the modules that it has loaded.
def source_sha256(folder: Path = Path(__file__).parent) -> str:
    """Return a SHA-256 of the names and contents of all Python files below a folder, by default difftx's own.

    Leave out `configs/`, because the package contains this folder in a wheel but not in a clone.
    """
    names = glob.glob("**/*.py", root_dir=folder, recursive=True)  # Three times faster than Path.rglob.
    hashes = {name: sha256_of(folder / name) for name in sorted(names) if not name.startswith("configs/")}
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def require_local(name: str, path: str | Path) -> None:
    """Raise `UserError` if one of the comma-separated paths is in an object store, such as gs://bucket/run."""
    slashes = "/" if isinstance(path, Path) else "//"  # `Path` removes one of the two slashes.
    if re.search(f"(^|,)[A-Za-z][A-Za-z0-9+.-]+:{slashes}", str(path)):
        shown = re.sub(r":/(?!/)", "://", str(path))
        raise UserError(f"{name}={shown}: this path must be on this machine; copy the file, or mount the bucket")


def require_local_paths(flags: argparse.Namespace) -> None:
    """Raise `UserError` if a flag of type `Path` is an address in an object store."""
    for name, value in vars(flags).items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path):
                require_local(f"--{name}", path)


def require_writable(folder: AnyPath) -> None:
    """Raise an `OSError` with the cause if a folder is not writable and cannot be created.

    For a bucket, raise `UserError` if the store does not support conditional writes.
    """
    if is_bucket(folder):
        return objects.require_conditions(folder)
    folder = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".difftx-", dir=folder))
    except OSError as error:
        raise OSError(error.errno, f"No file can be created there ({error.strerror})", str(folder)) from error


def resolved(path: AnyPath) -> AnyPath:
    """Return a local path as an absolute path without symbolic links, and a path in a bucket unchanged."""
    return path if is_bucket(path) else path.resolve()


def is_below(path: AnyPath, folder: AnyPath) -> bool:
    """Return whether a path equals a folder or lies below it."""
    if is_bucket(path) or is_bucket(folder):
        return f"{path}/".startswith(f"{str(folder).rstrip('/')}/")
    return path.resolve().is_relative_to(folder.resolve())


def make_folder(path: AnyPath) -> None:
    """Create a folder and its parents if they are missing. Do nothing for buckets, which have no folders."""
    if not is_bucket(path):
        path.mkdir(parents=True, exist_ok=True)


def require_writable_file(path: AnyPath) -> None:
    """Raise an `OSError` with the cause if a file cannot be written."""
    if list_folder(path) if is_bucket(path) else path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    require_writable(path.parent)


def require_run(workdir: AnyPath) -> None:
    """Raise `UserError` if a folder is not a run directory."""
    path = workdir / "config.json"
    if size_of(path) is None and (is_bucket(path) or not path.is_dir()):
        fix, above = "train a run with `difftx train`", (workdir.parent, workdir.parent.parent)
        if run := next((folder for folder in above if size_of(folder / path.name) is not None), None):
            fix = f"write --workdir={run} --step={workdir.name if workdir.name.isdecimal() else 'N'}"
        elif runs := matching_folders("--workdir", f"{glob.escape(str(workdir))}/*", path.name):
            fix = f"name one of its {len(runs)} runs, such as --workdir={runs[0]}; difftx report takes all of them"
        raise UserError(f"--workdir={workdir}: no config.json there, so it is not a run; {fix}")


@contextlib.contextmanager
def new_file(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a file under a temporary name. At the end of the block, sync it to disk and rename it to `path`.

    If the block raises an exception, delete the file. A killed process leaves a file whose name begins with a dot. For
    a bucket, write a local temporary file and upload it at the end of the block.
    """
    if is_bucket(path):
        with tempfile.TemporaryDirectory(prefix="difftx-") as folder:
            with (source := Path(folder, "file")).open("wb") as file:
                yield file
            upload(path, source)
        return
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.is_dir():
            raise UserError(f"{path} is a folder, not a file; move it away")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def upload(path: BucketPath, source: Path) -> None:
    """Upload a local file to an object, which may exist. Small files need one request."""
    if source.stat().st_size <= ONE_REQUEST_BYTES:
        objects.write(path, source.read_bytes())
    else:
        objects.upload(path, str(source))


def is_glob(path: AnyPath) -> bool:
    """Return whether a path is a glob. If a file or folder has exactly this name, the path is not a glob."""
    if not glob.has_magic(str(path)):
        return False
    return not (list_folder(path) if is_bucket(path) else os.path.exists(path))


def matching_folders(flag: str, pattern: str, file: str) -> list[AnyPath]:
    """Return the folders that match a path or glob and contain a file named `file`, sorted by name."""
    root = path_of(flag, pattern)
    if not is_bucket(root):
        names = sorted(glob.glob(pattern)) if is_glob(root) else [pattern]
        return [Path(name) for name in names if (Path(name) / file).exists()]
    if not is_glob(root):
        return [root] if size_of(root / file) is not None else []
    scheme, _, rest = str(root).partition("://")
    bucket, *parts = rest.split("/")
    found = [path_of(flag, f"{scheme}://{bucket}")]
    for part in filter(None, parts):
        if glob.has_magic(part):
            found = [
                folder / name
                for folder in found
                for name, is_folder in sorted(list_folder(folder).items())
                if is_folder and fnmatch.fnmatchcase(name, part)
            ]
        else:
            found = [folder / part for folder in found]
    return [folder for folder in found if size_of(folder / file) is not None]


@contextlib.contextmanager
def uploaded(folder: AnyPath) -> Iterator[Path]:
    """Yield a local folder for new files: `folder` itself, or for a bucket one that is uploaded after the block."""
    if not is_bucket(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="difftx-") as made:
        note_copy(made, str(folder))
        yield Path(made)
        for file in sorted(Path(made).iterdir()):
            upload(folder / file.name, file)


@contextlib.contextmanager
def appended(path: AnyPath) -> Iterator[Path]:
    """Yield a local file to append to: `path` itself, or for a bucket a copy that is uploaded after the block."""
    if not is_bucket(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="difftx-") as made:
        local = Path(made, path.name)
        local.write_bytes(read_file(path) or b"")
        try:
            yield local
        finally:
            upload(path, local)


@contextlib.contextmanager
def downloaded(path: AnyPath) -> Iterator[Path]:
    """Yield a local folder to read: `path` itself, or for a bucket a copy that is deleted after the block."""
    if not is_bucket(path):
        yield path
        return
    names = [local_name(path, name) for name in objects.describe_below(path)]
    with tempfile.TemporaryDirectory(prefix="difftx-") as made:
        for name in names:
            target = Path(made, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            objects.download(path / name, str(target))
        yield Path(made)


def local_name(folder: BucketPath, name: str) -> str:
    """Return an object's relative name. Raise `UserError` if a local path with this name would leave its folder."""
    if name.startswith("/") or ".." in name.split("/"):  # Anyone with write access to the bucket can choose names.
        raise UserError(f"{folder}: the name of an object, {name!r}, is not a path below that folder; rename it")
    return name


@contextlib.contextmanager
def new_folder(path: AnyPath, last: str, after_each_upload: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Create a folder under a temporary name. At the end of the block, rename it to `path`.

    If the block raises an exception, delete the folder. If a process is killed, the next call deletes its folder. For a
    bucket, create a local temporary folder. At the end of the block, upload its files, and the file `last` after all
    others: commands ignore a folder without it. Call `after_each_upload` after each file. If a process is killed during
    the upload, the same command replaces its objects. Raise `FileExistsError` if there are other objects.
    """
    if is_bucket(path):
        with tempfile.TemporaryDirectory(prefix="difftx-") as made:
            yield Path(made)
            _upload_folder(path, Path(made), last, after_each_upload)
        return
    remove_temporaries(path.parent, path.name)
    temporary = temporary_path(path)
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def is_taken(path: AnyPath, last: str) -> bool:
    """Return whether a folder exists already, so that `new_folder` would fail."""
    return size_of(path / last) is not None if is_bucket(path) else path.exists()


def _upload_folder(path: BucketPath, source: Path, last: str, after_each_upload: Callable[[], None]) -> None:
    files = {file.relative_to(source).as_posix(): file for file in source.rglob("*") if file.is_file()}
    objects_there = (name for name in objects.describe_below(path) if not name.startswith(objects.PROBE))
    if other := next((name for name in objects_there if name not in files or name == last), None):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path / other))
    content = files.pop(last).read_bytes()
    for name in sorted(files):
        upload(path / name, files[name])
        after_each_upload()
    if objects.write_if(path / last, content, None) is None:
        raise FileExistsError(errno.EEXIST, "Another process has written the same folder", str(path))


def remove_folder(path: AnyPath) -> None:
    """Delete a folder with all its files, if it exists."""
    if is_bucket(path):
        objects.delete(path / name for name in objects.describe_below(path))
    elif path.exists():
        shutil.rmtree(path)


def write_atomically(path: AnyPath, text: str) -> None:
    """Replace a file's text atomically: after a crash, the file has either the old text or the new text."""
    with new_file(path) as file:
        file.write(text.encode())


class Owner:
    """The right of this process to write the files of a run. Each write first calls `check`.

    `check` raises an error if this process no longer owns the run. `folder` contains the run's small files: it is the
    run directory itself, or for a run in a bucket a local copy (`run_files.py`). The default folder contains no files.
    """

    def __init__(self, folder: Path = Path(os.devnull), check: Callable[[], None] = lambda: None):
        self.folder, self.check = folder, check

    def push(self) -> None:
        """Upload all changed files in `folder`, if it is a local copy, and return when the store has them."""

    def write(self, path: AnyPath, text: str) -> None:
        """Check the ownership, then call `write_atomically`."""
        self.check()
        write_atomically(path, text)

    def write_if(self, path: AnyPath, content: bytes, generation: bytes | None) -> bytes | None:
        """Replace a file if it still has this generation (see `stored`). If `generation` is None, create the file.

        Return the new generation, or None if the condition does not hold. `content` must be unique to this call.
        """
        self.check()
        if is_bucket(path):
            return objects.write_if(path, content, generation)
        found = read_file(path)  # The folder is locked, so no other owner can write in between.
        if found != generation:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            file.write(content)
        return content

    def delete_if(self, path: AnyPath, generation: bytes) -> None:
        """Delete a file if it exists with this generation."""
        self.check()
        if is_bucket(path):
            objects.delete_if(path, generation)
        elif read_file(path) == generation:
            path.unlink()


UNLOCKED = Owner()  # For files that no lock protects.


def stored(path: AnyPath) -> objects.Stored | None:
    """Return a file's content and generation, or None if it is absent. The generation changes with the content.

    For a bucket, the caller must verify the content (see `objects.read`).
    """
    if is_bucket(path):
        return objects.read(path)
    content = read_file(path)
    return None if content is None else objects.Stored(content, content)


def remove_temporaries(folder: Path, name: str | None = None) -> None:
    """Delete temporary files and folders of killed processes on this host, or only those made for the path `name`."""
    wanted = ".+" if name is None else re.escape(name)
    temporary = re.compile(rf"\.{wanted}\.{re.escape(platform.node())}\.(\d+)")
    for path in folder.iterdir():
        found = temporary.fullmatch(path.name)
        if found and not _is_running(int(found[1])):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    """Return whether another process on this host has the id `process`."""
    if process == os.getpid():  # In a restarted container, an earlier process may have had the same id.
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # Another user's process, or an invalid process id.
        return True
    return True


def temporary_path(path: Path) -> Path:
    """Return the temporary path that this process uses until `path` is complete."""
    # Include the host in the name, because containers that share a folder may use the same process id.
    return path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")


def remove_file(path: AnyPath) -> None:
    """Delete a file if it exists."""
    objects.delete([path]) if is_bucket(path) else path.unlink(missing_ok=True)


def retry_read[T](path: Path, read: Callable[[], T]) -> T:
    """Call `read` until it succeeds. Retry after errors that may be temporary, such as EIO, ESTALE, EACCES or EMFILE.

    `read` must open `path` in each call, because a stale file handle stays stale.
    """
    for pause in (*RETRY_SECONDS, None):
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # Retrying does not help.
            raise
        except OSError as error:
            if pause is None:
                attempts = f"{len(RETRY_SECONDS) + 1} attempts in {sum(RETRY_SECONDS):g} s"
                raise UnreadableError(f"{path} cannot be read: {error.strerror} ({attempts})") from error
        time.sleep(pause)
    raise AssertionError("The last attempt returns or raises.")


def open_file(path: AnyPath | hub.HubFile) -> io.BufferedReader:
    """Open a seekable file for reading."""
    if isinstance(path, hub.HubFile):
        return io.BufferedReader(hub.HubReader(path), hub.REQUEST_BYTES)
    return open_object(path) if is_bucket(path) else path.open("rb")


def read_file(path: AnyPath) -> bytes | None:
    """Return the contents of a file, or None if the file does not exist. Raise `UserError` if `path` is a folder."""
    if is_bucket(path):
        return None if (found := objects.read_verified(path)) is None else found.content

    def read() -> bytes:
        with open_file(path) as file:
            return file.read()

    try:
        return retry_read(path, read)
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder, not a file; move it away") from error
    except (FileNotFoundError, NotADirectoryError):
        return None


def size_of(path: AnyPath) -> int | None:
    """Return the size of a file in bytes, or None if `path` is not an existing regular file."""
    if is_bucket(path):
        return found.size if (found := objects.describe(path)) else None
    # Do not use `Path.is_file`, which returns False if an error prevents it from finding out. Raise that error.
    try:
        status = retry_read(path, path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def describe_below(folder: AnyPath) -> dict[str, objects.Description]:
    """Return the size and, in a bucket, the checksum of all files below a folder, by relative path."""
    if is_bucket(folder):
        return objects.describe_below(folder)
    found = {}
    for name, is_folder in list_folder(folder).items():
        if is_folder and not (folder / name).is_symlink():
            found |= {f"{name}/{inner}": each for inner, each in describe_below(folder / name).items()}
        elif (size := size_of(folder / name)) is not None:
            found[name] = objects.Description(size, None, 0.0, "")
    return found


def list_folder(path: AnyPath) -> dict[str, bool]:
    """Return the names in a folder, each with True for folders and symbolic links. Return {} if it is absent.

    Raise `UserError` if `path` is a file, and `UnreadableError` if it is a link to a missing target.
    """
    if is_bucket(path):
        return objects.list_folder(path)

    def scan() -> dict[str, bool]:
        with os.scandir(path) as entries:
            return {entry.name: entry.is_symlink() or entry.is_dir() for entry in entries}

    try:
        return retry_read(path, scan)
    except NotADirectoryError as error:
        raise UserError(f"{path} is not a folder; move it away") from error
    except FileNotFoundError:
        check_link(path)
        return {}


def check_link(path: Path) -> None:
    """Raise `UnreadableError` if `path` is a link to a missing target, for example on an unmounted disk."""
    if path.is_symlink() and not path.exists():
        raise UnreadableError(f"{path} cannot be read: it is a link to {path.readlink()}, which does not exist here")
