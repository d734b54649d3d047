"""Files that appear whole or not at all, and JSON that may be broken."""

import argparse
import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from difftx.errors import UserError

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
    """
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder under a temporary name, to be filled; it gets its own at the end of the block.

    After an exception there is no folder, after a kill at most a temporary one, whose name begins with a dot.
    """
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


def _temporary(path: Path) -> Path:
    # With the host: containers that share a folder may share a process number too.
    return path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        UserError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
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


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
