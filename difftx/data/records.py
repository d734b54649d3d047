"""JSON lines of a file, plain or compressed, checked line by line."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftx.data.readers import BROKEN_STREAM, open_stream, why_broken
from difftx.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Record:
    """An object of a line."""

    name: str  # Where it stands, for messages.
    values: dict[str, Any]

    def field(self, name: str) -> Any:
        """Return a field's value.

        Raises:
            UserError: there is no such field; says which line.
        """
        if name not in self.values:
            raise UserError(f"{self.name} has no field {name!r}.{did_you_mean(name, self.values)}")
        return self.values[name]

    def text(self, name: str) -> str:
        """Return a field that must be text, and not empty.

        Raises:
            UserError: it is not, or there is no such field; says which line.
        """
        value = self.field(name)
        if not isinstance(value, str) or not value:
            raise UserError(f"{self.name}: {name}={value!r} must be text, and not empty")
        return value


def read_records(path: Path, *, field: str, what: str) -> Iterator[Record]:
    """Yield the JSON object of each line that is not blank; files may end in .gz, .zst or .xz.

    Args:
        path: of the file.
        field: what the user set, such as a flag, for messages.
        what: the lines are, for messages: "prompts".

    Raises:
        UserError: the file cannot be read or holds nothing, or a line is not an object; says which.
    """
    try:
        with open_stream(path) as stream:
            lines = stream.read().splitlines()
    except BROKEN_STREAM as error:
        raise UserError(f"{field}={why_broken(path, error)}") from error
    if not any(line.strip() for line in lines):
        raise UserError(f"{field}={path}: the file has no {what}")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _record(f"{path}: line {number}", line)


def _record(name: str, line: bytes) -> Record:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # Not UTF-8 too.
        raise UserError(f"{name} is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f'{name} is not a JSON object, such as {{"text": "Once"}}')
    return Record(name, values)
