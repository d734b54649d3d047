"""Generated tables of docs/suites.md (numbers of each suite) and docs/files.md (rows of metrics.jsonl).

    python benchmarks/reference_tables.py

The suites declare their numbers (`Suite.measures`), and difftx/training/metrics.py the fields of rows.
"""

import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from difftx.evals import SUITES
from difftx.training.metrics import ROW_FIELDS, SPLIT_FIELDS

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- to here -->"
TYPES: dict[Any, str] = {int: "integer", float: "number", str: "text", types.NoneType: "null"}


def suites_table() -> str:
    """Return a table with a row for each suite and unit of its numbers."""
    lines = ["| suite | numbers | unit | better |", "|---|---|---|---|"]
    for name, suite in SUITES.items():
        if suite.inner_numbers:
            lines.append(f"| `{name}` | `{suite.inner_numbers}` | as in that suite | as in that suite |")
        forms: dict[tuple[str, str], list[str]] = {}  # Unit and better direction → forms of names.
        for form, measure in suite.measures.items():
            forms.setdefault((measure.unit, measure.better or ""), []).append(f"`{form}`")
        lines += [f"| `{name}` | {', '.join(found)} | {unit} | {better} |" for (unit, better), found in forms.items()]
    return "\n".join(lines)


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


TABLES = {"suites": suites_table, "files": rows_table}


def with_table(page: str) -> tuple[Path, str]:
    """Return the path of a page of docs/, and its text with a new table between the markers."""
    path = ROOT / "docs" / f"{page}.md"
    begin = "<!-- benchmarks/reference_tables.py writes from here -->"
    before, found, rest = path.read_text().partition(begin)
    if not found:
        raise ValueError(f"{path} has no line {begin}")
    return path, f"{before}{begin}\n\n{TABLES[page]()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name in TABLES:
        file, content = with_table(name)
        file.write_text(content)
