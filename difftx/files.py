"""Files that appear whole or not at all, and JSON that may be broken."""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from difftx.errors import UserError


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing under a temporary name; it gets its own at the end of the block, once it is on disk.

    After an exception there is no file, after a kill at most a temporary one, whose name begins with a dot.
    """
    # With the host: containers that share a folder may share a process number too.
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part."""
    with new_file(path) as file:
        file.write(text.encode())


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


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
