"""Generated table of docs/files.md: the rows of metrics.jsonl.

    python benchmarks/reference_tables.py

difftx/training/metrics.py declares the fields of rows.
"""

import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from difftx.training.metrics import ROW_FIELDS, SPLIT_FIELDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "files.md"
BEGIN = "<!-- benchmarks/reference_tables.py writes from here -->"
END = "<!-- to here -->"
TYPES: dict[Any, str] = {int: "integer", float: "number", str: "text", types.NoneType: "null"}


def rows_table() -> str:
    """Return a table with the fields that every row of metrics.jsonl has, by split."""
    lines = ["| `split` | field | type |", "|---|---|---|"]
    fields_of = {"every split": ROW_FIELDS, **{f"`{name}`": fields for name, fields in SPLIT_FIELDS.items()}}
    for split, fields in fields_of.items():
        for name, kind in fields.items():
            kinds = dict.fromkeys(TYPES[part] for part in getattr(kind, "__args__", (kind,)))
            shown = [text for text in kinds if not (text == "integer" and "number" in kinds)]
            lines.append(f"| {split} | `{name}` | {' or '.join(shown)} |")
    return "\n".join(lines)


def with_table() -> str:
    """Return the text of docs/files.md with a new table between the markers."""
    before, found, rest = PAGE.read_text().partition(BEGIN)
    if not found:
        raise ValueError(f"{PAGE} has no line {BEGIN}")
    return f"{before}{BEGIN}\n\n{rows_table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table())
