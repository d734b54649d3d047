"""Files that appear whole or not at all, and JSON that may be broken."""

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from difftx.errors import UserError

NAMES = {int: "a count", str: "text", dict: "an object"}


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
