"""JSON files: values with a schema and records with a SHA-256, also in buckets, and local files of lines."""

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

    `content` is that of the file, if it has been read already.
    """
    content = read_file(path) if content is None else content
    if content is None:
        raise UserError(f"{path}: {os.strerror(errno.ENOENT)}")
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno} is not JSON ({error.msg})") from error
    except ValueError as error:  # Invalid UTF-8, or a huge number.
        raise UserError(f"{path}: not JSON ({error})") from error


def schema_error(value: Any, shape: Any, path: str = "") -> str | None:
    """Return the first schema error of a JSON value, such as "files.config: not an object", or None if there is none.

    The schema `shape` is a type, `{name: shape}` for an object with at least these names, `{str: shape}` for an object
    with any names, or `[shape]` for a list. The type `int` means a count in 0 … 2**63 - 1, and `object` any value.
    `path` is the path of `value` within a larger value, for the message.
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
    """A local file of JSON objects, one per line, to which several threads and processes may append.

    If a process is killed in `append`, the last line may be incomplete. `read` skips such a line.
    """

    def __init__(self, path: Path, owner: Owner = UNLOCKED):
        self.path, self._owner, self._lock = path, owner, threading.Lock()

    def read(self, shape: Any = dict) -> list[dict[str, Any]]:
        """Return the objects that match `shape`, a schema for `schema_error`. An absent file has none."""
        return list(parse_json_lines(self.content(), shape))

    def content(self) -> bytes:
        """Return all lines. An absent file has none."""
        return read_file(self.path) or b""

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append objects. They are on disk when the function returns."""
        self._owner.check()
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        self.path.parent.mkdir(exist_ok=True)  # Without parents, because a run's folder must not be made again.
        # Another process may have left an incomplete line since the last call.
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
        """Delete the file. It may be absent."""
        self._owner.check()
        self.path.unlink(missing_ok=True)


def parse_json_lines(content: bytes, shape: Any) -> Iterator[dict[str, Any]]:
    """Yield the object in each line, without lines that are not JSON or do not match `shape`."""
    return (row for row in map(_parse_json, io.BytesIO(content)) if schema_error(row, shape) is None)


def _parse_json(text: bytes) -> Any:
    """Return the JSON value in a text, or None if the text is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def write_record(path: AnyPath, content: dict[str, Any]) -> None:
    """Atomically write a JSON object together with its SHA-256."""
    write_atomically(path, json.dumps(with_sha256(content)))


def read_record(path: AnyPath) -> dict[str, Any] | None:
    """Return the object that `write_record` wrote, or None if the file is absent or holds anything else."""
    return parse_record(read_file(path) or b"")


def parse_record(content: bytes) -> dict[str, Any] | None:
    """Return the object in the content of a file that `write_record` wrote, or None if it is anything else."""
    return without_sha256(_parse_json(content))


def with_sha256(content: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a last field "sha256", the SHA-256 of the other fields."""
    return content | {"sha256": json_sha256(content)}


def without_sha256(value: Any) -> dict[str, Any] | None:
    """Return an object without its field "sha256", or None if `value` is not an object with the right SHA-256."""
    if not isinstance(value, dict):
        return None
    content = {name: inner for name, inner in value.items() if name != "sha256"}
    return content if value.get("sha256") == json_sha256(content) else None


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of object keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
