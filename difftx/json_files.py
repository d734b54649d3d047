"""JSON files: values with a schema, records with a SHA-256, and local files of JSON lines."""

import errno
import hashlib
import io
import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from difftx.errors import UserError
from difftx.files import UNLOCKED, Owner, new_file, read_file, write_atomically
from difftx.storage.paths import AnyPath

# JSON type → name in error messages.
TYPE_NAMES = {int: "a count", str: "text", dict: "an object", bool: "true or false", float: "a number"}


def read_json(path: AnyPath, content: bytes | None = None) -> Any:
    """Return the value in a JSON file. Raise `UserError` if the file does not exist or is not JSON.

    `content` is the file's content, if the caller has already read it.
    """
    content = read_file(path) if content is None else content
    if content is None:
        raise UserError(f"{path}: {os.strerror(errno.ENOENT)}")
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno} is not JSON ({error.msg})") from error
    except ValueError as error:  # For example, invalid UTF-8 or a huge number.
        raise UserError(f"{path}: not JSON ({error})") from error


def schema_error(value: Any, shape: Any, path: str = "") -> str | None:
    """Check a JSON value against a schema. Return the first error, such as "files.config: not an object", or None.

    The schema `shape` is a type, `{name: shape}` for an object with at least these names, `{str: shape}` for an object
    with any names, or `[shape]` for a list. `int` means a count in 0 … 2**63 - 1, and `object` means any value. `path`
    is the path of `value` within a larger value, for the message.
    """
    at = path or "the text"
    if isinstance(shape, type):
        fits = type(value) is shape and (shape is not int or 0 <= value < 2**63)
        return None if fits or shape is object else f"{at}: not {TYPE_NAMES[shape]}"
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
    return next((found for name, (item, inner) in parts.items() if (found := schema_error(item, inner, name))), None)


class JsonLines:
    """A local file with one JSON object per line. Several threads and processes may append to it.

    If a process is killed in `append`, the last line may be incomplete. `read` skips such a line.
    """

    def __init__(self, path: Path, owner: Owner = UNLOCKED):
        self.path, self._owner, self._lock = path, owner, threading.Lock()

    def read(self, shape: Any = dict) -> list[dict[str, Any]]:
        """Return the objects that match the schema `shape` (see `schema_error`). Return [] if the file is absent."""
        return list(parse_json_lines(self.content(), shape))

    def content(self) -> bytes:
        """Return the file's content, or b"" if it is absent."""
        return read_file(self.path) or b""

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append objects and sync them to disk."""
        self._owner.check()
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        self.path.parent.mkdir(exist_ok=True)  # Do not create parents: a deleted run must stay deleted.
        # A killed process may have left an incomplete last line.
        with self._lock, self.path.open("a+b") as file:
            if size := file.seek(0, os.SEEK_END):
                file.seek(size - 1)
                content = content if file.read(1) == b"\n" else b"\n" + content
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def rewrite(self, rows: Iterable[dict[str, Any]]) -> None:
        """Atomically replace the content of the file."""
        self._owner.check()
        self.path.parent.mkdir(exist_ok=True)
        with new_file(self.path) as file:
            file.writelines((json.dumps(row) + "\n").encode() for row in rows)

    def remove(self) -> None:
        """Delete the file if it exists."""
        self._owner.check()
        self.path.unlink(missing_ok=True)


def parse_json_lines(content: bytes, shape: Any) -> Iterator[dict[str, Any]]:
    """Yield the object in each line, without lines that are not JSON or do not match `shape`."""
    return (row for row in map(_parse_json, io.BytesIO(content)) if schema_error(row, shape) is None)


def _parse_json(text: bytes) -> Any:
    """Parse a JSON text. Return None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def write_record(path: AnyPath, content: dict[str, Any]) -> None:
    """Atomically write a JSON object together with its SHA-256."""
    write_atomically(path, json.dumps(with_sha256(content)))


def read_record(path: AnyPath) -> dict[str, Any] | None:
    """Read a file of `write_record`. Return None if the file is absent or its SHA-256 is missing or wrong."""
    return parse_record(read_file(path) or b"")


def parse_record(content: bytes) -> dict[str, Any] | None:
    """Parse the content of a file of `write_record`. Return None if its SHA-256 is missing or wrong."""
    return without_sha256(_parse_json(content))


def with_sha256(content: dict[str, Any]) -> dict[str, Any]:
    """Add a last field "sha256", the SHA-256 of all other fields, to a JSON object."""
    return content | {"sha256": json_sha256(content)}


def without_sha256(value: Any) -> dict[str, Any] | None:
    """Remove the field "sha256" from a JSON object. Return None if the SHA-256 is missing or wrong."""
    if not isinstance(value, dict):
        return None
    content = {name: inner for name, inner in value.items() if name != "sha256"}
    return content if value.get("sha256") == json_sha256(content) else None


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a JSON value. It does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
