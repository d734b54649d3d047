"""Read files that may be compressed or in buckets, and JSON objects, one per line."""

import dataclasses
import functools
import glob
import gzip
import json
import lzma
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from difftx.errors import UserError, did_you_mean, read_error
from difftx.files import open_file
from difftx.storage import objects
from difftx.storage.hub import HubFile
from difftx.storage.paths import AnyPath, BucketPath, glob_matcher, is_bucket, path_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# By default, zstd refuses windows above 128 MiB, which `zstd --long=31` writes. Allow all windows. They take at most 2
# GiB of memory.
ZSTD_OPTIONS = {zstd.DecompressionParameter.window_log_max: zstd.DecompressionParameter.window_log_max.bounds()[1]}
OPENERS = {".gz": gzip.open, ".zst": functools.partial(zstd.open, options=ZSTD_OPTIONS), ".xz": lzma.open}
READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError)
ONE_OBJECT = 'write one object per line, such as {"prompt": "Once"}'  # Advice if a line is not an object.
BYTE_ORDER_MARK = "\ufeff"  # Some Windows programs write it at the start of a UTF-8 file. It is not part of the text.


def open_stream(file: AnyPath | HubFile, stored: BinaryIO | None = None) -> BinaryIO:
    """Open a file, and decompress it if its suffix is .gz, .zst or .xz. `stored` is the file if it is already open."""
    opener = OPENERS.get(Path(str(file)).suffix.lower())
    if opener is None:
        return stored or open_file(file)
    return cast(BinaryIO, opener(stored or (file if isinstance(file, Path) else open_file(file)), "rb"))


def bucket_files(pattern: BucketPath) -> dict[BucketPath, objects.Description]:
    """Return the description of each object that matches a path, folder or glob, sorted by path."""
    parts = pattern.parts
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    if fixed == len(parts) and (found := objects.describe(pattern)):
        return {pattern: found}
    folder = type(pattern)(*parts[:fixed])
    matches = glob_matcher("/".join(parts[fixed:]) or "**")
    return {
        folder / name: description
        for name, description in sorted(objects.describe_below(folder).items())
        if matches(name)
    }


def files_of(pattern: str, field: str) -> dict[AnyPath, int]:
    """Return the size of each file that matches a path, folder or glob, sorted by path.

    `pattern` is the value of `field`. In folders, skip names that begin with a dot.
    """
    path = path_of(field, pattern)
    if is_bucket(path):
        sizes: dict[AnyPath, int] = {file: description.size for file, description in bucket_files(path).items()}
    else:
        # Unlike `Path.rglob`, this follows links to folders. It skips names that begin with a dot.
        names = glob.glob("**", root_dir=path, recursive=True) if path.is_dir() else [""]
        # If the path exists, do not expand it, because a file name may contain glob characters.
        found = [path / name for name in names] if path.exists() else map(Path, glob.glob(pattern, recursive=True))
        sizes = {file: file.stat().st_size for file in sorted(found) if file.is_file()}
    if not sizes:
        raise UserError(
            f"{field}={pattern!r}: no such file, no such folder with files, and no file matches it as a glob; `difftx "
            "prepare --input=hf:NAME` reads a data set of the Hugging Face Hub"
        )
    return sizes


def why_unreadable(file: AnyPath | HubFile, error: BaseException) -> str:
    """Return a message with the file and the cause of `error`, one of `READ_ERRORS`."""
    if isinstance(error, OSError) and error.strerror:
        return f"{file}: cannot be read ({error.strerror})"
    how = "truncated" if isinstance(error, EOFError) else "corrupt"
    return f"{file}: the compressed file is {how} ({error})"


@dataclasses.dataclass(frozen=True)
class Record:
    """A JSON object read from one line of a file."""

    name: str  # File name and line number, for messages.
    values: dict[str, Any]

    def field(self, name: str) -> Any:
        """Return the value of a field. Raise `UserError` if the record does not have it."""
        if name not in self.values:
            raise UserError(f"{self.name} has no field {name!r}.{did_you_mean(name, self.values)}")
        return self.values[name]

    def text(self, name: str) -> str:
        """Return the value of a text field. Raise `UserError` if it is missing, empty or not text."""
        value = self.field(name)
        if not isinstance(value, str) or not value:
            raise UserError(f"{self.name}: {name}={value!r} must be text, and not empty")
        return value


def read_records(path: AnyPath, *, field: str, what: str) -> Iterator[Record]:
    """Yield the JSON object of each line. Error messages use `what` for an object and `field` for the path."""
    empty = True
    try:
        with open_stream(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    empty = False
                    yield _record(f"{path}: line {number}", line)
    except READ_ERRORS as error:
        raise read_error(error, f"{field}={why_unreadable(path, error)}") from error
    if empty:
        raise UserError(f"{field}={path}: the file has no {what}")


def _record(name: str, line: bytes) -> Record:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # Includes UnicodeDecodeError, a subclass of ValueError.
        raise UserError(f"{name} is not JSON ({error}); {ONE_OBJECT}") from error
    if not isinstance(values, dict):
        raise UserError(f"{name} is not a JSON object; {ONE_OBJECT}")
    return Record(name, values)
