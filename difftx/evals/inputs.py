"""Contents of the files that suites read, on which their results depend."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from difftx.config.fields import entry_type, marks_of, types_of
from difftx.config.flag import Flag
from difftx.data.sources import may_be_store, text_files
from difftx.data.store import META
from difftx.errors import UserError
from difftx.files import open_file, sha256_of, size_of
from difftx.json_files import json_sha256
from difftx.storage.paths import path_of

HEADER_BYTES = 2**20  # Longest first line that identifies a large file.


def with_contents(group: type, values: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Return the values of some fields of a group, with the contents of files in place of their paths."""
    found = {}
    for name in fields:
        kind, value = types_of(group)[name], values[name]
        if value is not None and Flag.LOCATION in marks_of(kind):
            value = _content(value, is_large=Flag.HEADER in marks_of(kind))
        elif dataclasses.is_dataclass(kind):
            value = with_contents(kind, value, value)
        elif entry := entry_type(kind):
            value = [with_contents(entry, item, item) for item in value]
        found[name] = value
    return found


def _content(path: str, *, is_large: bool) -> Any:
    """Return what identifies the content of a file, the files of a glob, a folder or a store.

    If they cannot be read, return the path: the `check` of the suite reports the error.
    """
    try:
        root = path_of("path", path)
        if is_large:
            with open_file(root) as file:
                return json_sha256(file.readline(HEADER_BYTES).decode(errors="replace"))
        if not may_be_store(root):
            # Readers choose the format by the ending of a file's name.
            return [sha256_of(file) + file.suffix for file in text_files(path)]
        if size_of(root / META) is not None:  # It has the hashes of the store's other files.
            return sha256_of(root / META)
        files = [file for file in Path(path).rglob("*") if file.is_file() and file.parent.name != "__pycache__"]
        return {str(file.relative_to(path)): sha256_of(file) for file in sorted(files)}
    except (OSError, UserError):
        return path
