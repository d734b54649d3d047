"""Files that appear whole or not at all, reads that may fail, and JSON that may be broken."""

import argparse
import contextlib
import errno
import hashlib
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
from typing import Any, BinaryIO

from difftx.errors import UnreadableError, UserError

# Seconds between the attempts to read. A restarting file server usually answers again within them, and a process that
# had too many open files has closed some.
RETRY_SECONDS = (0.2, 0.8, 2.0)
# What these errors say about a path does not change by waiting.
PERMANENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
NAMES = {int: "a count", str: "text", dict: "an object"}


def require_local(name: str, path: str | Path) -> None:
    """Raise `UserError` if a path is the address of an object store, such as gs://bucket/run.

    Args:
        name: the flag or the config field that holds the path, for the message.
        path: one path, or several with commas; a `Path` has lost one of the two slashes.
    """
    slashes = "/" if isinstance(path, Path) else "//"
    if re.search(f"(^|,)[A-Za-z][A-Za-z0-9+.-]+:{slashes}", str(path)):
        shown = re.sub(r":/(?!/)", "://", str(path))
        raise UserError(f"{name}={shown}: object stores are not supported yet; use a local or mounted path")


def require_local_paths(flags: argparse.Namespace) -> None:
    """Raise `UserError` if a flag whose type is `Path` is the address of an object store."""
    for name, value in vars(flags).items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path):
                require_local(f"--{name}", path)


def require_writable(folder: Path) -> None:
    """Check that a folder can be written, or made with the parents that are missing; leave nothing behind.

    Raises:
        OSError: of the system, with the path that is the problem.
    """
    folder = folder.absolute()
    while not os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder.lstat()  # Names that are too long, folders that cannot be searched.
        folder = folder.parent
    if not folder.exists():
        raise FileNotFoundError(errno.ENOENT, "Broken symbolic link", str(folder))
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".difftx-", dir=folder))
    except OSError as error:
        raise OSError(error.errno, f"No file can be created there ({error.strerror})", str(folder)) from error


def require_writable_file(path: Path) -> None:
    """Check that a file can be written, as `require_writable` does for the folder that holds it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    require_writable(path.parent)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing under a temporary name; it gets its own at the end of the block, once it is on disk.

    After an exception there is no file, after a kill at most a temporary one, whose name begins with a dot.

    Raises:
        UserError: `path` is a folder.
    """
    temporary = _temporary(path)
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


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder under a temporary name, to be filled; it gets its own at the end of the block.

    After an exception there is no folder, after a kill at most a temporary one, whose name begins with a dot. The next
    call for the same path deletes it.
    """
    remove_temporaries(path.parent, path.name)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part."""
    with new_file(path) as file:
        file.write(text.encode())


def remove_temporaries(folder: Path, name: str | None = None) -> list[str]:
    """Delete the temporary files and folders that killed processes of this host have left in a folder.

    Args:
        folder: of the files; subfolders are not searched.
        name: of the file or folder that was to be made; None: of any.

    Returns:
        The names of what was deleted.
    """
    wanted = ".+" if name is None else re.escape(name)
    temporary = re.compile(rf"\.{wanted}\.{re.escape(platform.node())}\.(\d+)")
    removed = []
    for path in sorted(folder.iterdir()):
        found = temporary.fullmatch(path.name)
        if found and not _is_running(int(found[1])):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _is_running(process: int) -> bool:
    """Whether another process of this host has the number; a restarted container gets its old numbers again."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # Another user's; not a process number.
        return True
    return True


def _temporary(path: Path) -> Path:
    # With the host: containers that share a folder may share a process number too.
    return path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")


def retry_read[T](path: Path, read: Callable[[], T]) -> T:
    """Return `read()`, and retry after errors that may pass, such as EIO, ESTALE, EACCES or EMFILE.

    Args:
        path: file or folder that `read` reads, for the message.
        read: opens `path` in every call, because a stale handle stays stale.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        IsADirectoryError: it is a folder.
        UnreadableError: every attempt failed with another OSError.
    """
    for pause in (*RETRY_SECONDS, None):
        try:
            return read()
        except PERMANENT:
            raise
        except OSError as error:
            if pause is None:
                attempts = f"{len(RETRY_SECONDS) + 1} attempts in {sum(RETRY_SECONDS):g} s"
                raise UnreadableError(f"{path} cannot be read: {error.strerror} ({attempts})") from error
        time.sleep(pause)
    raise AssertionError("The last attempt returns or raises.")


def read_file(path: Path) -> bytes | None:
    """Return a file's content, or None if there is no such file.

    Raises:
        UserError: it is a folder.
        UnreadableError: it exists and cannot be read.
    """
    try:
        return retry_read(path, path.read_bytes)
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder, not a file; move it away") from error
    except (FileNotFoundError, NotADirectoryError):
        return None


def size_of(path: Path) -> int | None:
    """Return a file's size in bytes, or None if there is no such file.

    `Path.is_file` is not used because it reads errors such as EACCES of a parent folder as "no".

    Raises:
        UnreadableError: whether the file exists cannot be determined.
    """
    try:
        status = retry_read(path, path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def list_folder(path: Path) -> dict[str, bool]:
    """Return the names in a folder, and whether each is a folder or a symbolic link; none if there is no such folder.

    Raises:
        UserError: it is not a folder.
        UnreadableError: it cannot be read, or is a link whose target does not exist.
    """

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
    """Raise `UnreadableError` if `path` is a link to what does not exist: the disk may not be mounted yet."""
    if path.is_symlink() and not path.exists():
        raise UnreadableError(f"{path} cannot be read: it is a link to {path.readlink()}, which does not exist here")


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        UserError: there is no such file, or it is not JSON.
        UnreadableError: it cannot be read.
    """
    content = read_file(path)
    if content is None:
        raise UserError(f"{path}: {os.strerror(errno.ENOENT)}")
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno} is not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:  # Not UTF-8, a number of thousands of digits, brackets without end.
        raise UserError(f"{path}: not JSON ({error})") from error


def misfit(value: Any, shape: Any, path: str = "") -> str | None:
    """Return where a JSON value is not of a shape, such as "files.config: not an object"; None if it is of it.

    Args:
        value: as `read_json` returns it.
        shape: a type, with `int` for a count, 0 … 2**63 - 1; `{name: shape}` for an object with at least these names;
            `{str: shape}` for one with any names; `[shape]` for a list.
        path: of the value, in what holds it.
    """
    at = path or "the text"
    if isinstance(shape, type):
        fits = type(value) is shape and (shape is not int or 0 <= value < 2**63)
        return None if fits else f"{at}: not {NAMES[shape]}"
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{at}: not a list"
        parts = {f"{path}[{i}]": (item, shape[0]) for i, item in enumerate(value)}
    elif not isinstance(value, dict):
        return f"{at}: not an object"
    else:
        wanted = dict.fromkeys(value, shape[str]) if str in shape else shape
        if missing := [name for name in wanted if name not in value]:
            return f"{at}: no {missing[0]!r}"
        parts = {f"{path}.{name}".lstrip("."): (value[name], inner) for name, inner in wanted.items()}
    return next((found for name, (item, inner) in parts.items() if (found := misfit(item, inner, name))), None)


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object with its own SHA-256, atomically."""
    write_atomically(path, json.dumps(content | {"sha256": json_sha256(content)}))


def read_record(path: Path) -> dict[str, Any] | None:
    """Return what `write_record` wrote; None if the file holds anything else.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.pop("sha256", None) != json_sha256(content):
        return None
    return content


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
