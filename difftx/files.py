"""Files that appear whole or not at all."""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


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
