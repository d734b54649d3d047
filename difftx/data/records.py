"""JSON lines from a plain or compressed file, checked line by line."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftx.data.streams import LONGEST_DOCUMENT, READ_ERRORS, TOO_LONG, open_stream, why_unreadable
from difftx.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Record:
    """The JSON object of one line."""

    name: str  # File and line number, for messages.
    values: dict[str, Any]

    def field(self, name: str) -> Any:
        """Return the value of a field, or raise `UserError` if the record has no such field."""
        if name not in self.values:
            raise UserError(f"{self.name} has no field {name!r}.{did_you_mean(name, self.values)}")
        return self.values[name]

    def text(self, name: str) -> str:
        """Return the value of a field, or raise `UserError` if it is missing, empty or not text."""
        value = self.field(name)
        if not isinstance(value, str) or not value:
            raise UserError(f"{self.name}: {name}={value!r} must be text, and not empty")
        return value


def read_records(path: Path, *, field: str, what: str) -> Iterator[Record]:
    """Yield the JSON object of each line that is not blank.

    Args:
        path: File to read, decompressed if its name ends in .gz, .zst or .xz.
        field: Flag or config field that names the file, for messages.
        what: Plural noun for the objects, such as "prompts", for messages.

    Raises:
        UserError: If the file cannot be read or has no objects, or if a line is too long or not a JSON object.
    """
    empty = True
    try:
        with open_stream(path) as stream:
            for number in itertools.count(1):
                line = stream.readline(LONGEST_DOCUMENT + 1)
                if not line:
                    break
                if len(line) > LONGEST_DOCUMENT and not line.endswith(b"\n"):
                    raise UserError(f"{path}: line {number} {TOO_LONG}")
                if line.strip():
                    empty = False
                    yield _record(f"{path}: line {number}", line)
    except READ_ERRORS as error:
        raise UserError(f"{field}={why_unreadable(path, error)}") from error
    if empty:
        raise UserError(f"{field}={path}: the file has no {what}")


def _record(name: str, line: bytes) -> Record:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # Includes UnicodeDecodeError.
        raise UserError(f"{name} is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f'{name} is not a JSON object, such as {{"text": "Once"}}')
    return Record(name, values)
