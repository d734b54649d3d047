"""Generator of the reference pages: docs/cli.md, docs/config.md, and the table of metrics.jsonl in docs/files.md.

    python benchmarks/reference_pages.py

The pages come from the help texts of the commands, from the schema in difftx/config/, and from the fields of rows that
difftx/training/metrics.py declares.
"""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from difftx.commands import COMMANDS
from difftx.config import Config, ModelConfig
from difftx.config.build import describe_type
from difftx.config.fields import entry_type, plain, type_of, types_of
from difftx.model.architectures import ARCHITECTURES
from difftx.training.metrics import ROW_FIELDS, SPLIT_FIELDS

ROOT = Path(__file__).resolve().parents[1]
WIDTH = "100"  # Columns of the help texts.
BEGIN = "<!-- benchmarks/reference_pages.py writes from here -->"
END = "<!-- to here -->"
TYPES: dict[Any, str] = {int: "integer", float: "number", str: "text", list: "list", types.NoneType: "null"}

COMMANDS_HEADER = """# Commands

`python benchmarks/reference_pages.py` makes this page. `difftx COMMAND --help` prints the same text. If
difftx is not installed, write `python -m difftx COMMAND` in the clone. There, `python train.py` is `difftx train`, and
`python eval.py` is `difftx eval`. [files.md](files.md#exit-codes) lists the exit codes.
"""
CONFIG_HEADER = """# Config fields

`python benchmarks/reference_pages.py` makes this page from the schema in `difftx/config/`.

Set a field in a recipe (`c.optimizer.learning_rate = 1e-3`) or on the command line
(`--config.optimizer.learning_rate=1e-3`, or without `config.`).
"""


def commands_page() -> str:
    """Return docs/cli.md, which has a section per command with its help text, and those of its subcommands."""
    os.environ["COLUMNS"] = WIDTH
    return COMMANDS_HEADER + "".join(_command(name, text) for name, text in COMMANDS.items())


def _command(name: str, text: str) -> str:
    shown = [_help(name)]
    subcommands = re.search(r"^  \{([a-z,]+)\}$", shown[0], re.MULTILINE)
    shown += [_help(name, subcommand) for subcommand in subcommands[1].split(",")] if subcommands else []
    blocks = "".join(f"\n```text\n{help_text}```\n" for help_text in shown)
    return f"\n## difftx {name}\n\n{text[0].upper()}{text[1:]}.\n{blocks}"


def _help(name: str, *subcommand: str) -> str:
    main = importlib.import_module(f"difftx.commands.{name}").main
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*subcommand, "--help"])
    return printed.getvalue()


def config_page() -> str:
    """Return docs/config.md, which has a section per group with the type, default and meaning of each field."""
    for name in ARCHITECTURES:
        type_of(ModelConfig, name)  # Adds the architecture's own group.
    return CONFIG_HEADER + "".join(_group(Config, ""))


def _group(group: type, path: str) -> list[str]:
    rows, sections, meanings = [], [], {}
    for parent in filter(dataclasses.is_dataclass, reversed(group.__mro__)):
        meanings |= _meanings_of(parent)
    declared = {field.name: field for field in dataclasses.fields(group)}
    for field_name, annotation in types_of(group).items():
        name = f"{path}{field_name}"
        if dataclasses.is_dataclass(annotation):
            sections += _group(annotation, f"{name}.")  # pyrefly: ignore[bad-argument-type]
            continue
        field = declared[field_name]
        default = "required" if field.default is dataclasses.MISSING else f"`{plain(field.default)!r}`"
        meaning = " ".join(meanings[field.name].split())
        cells = (f"`{field.name}`", describe_type(annotation), default, meaning)
        rows.append(f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |\n")
        if entry := entry_type(annotation):
            sections += _group(entry, f"{name}.N.")
    if not rows:
        return sections
    summary = " ".join((group.__doc__ or "").split())
    head = f"\n## {path.rstrip('.')}\n\n{summary}\n\n| field | type | default | meaning |\n|---|---|---|---|\n"
    return [head, *rows, *sections]


def _meanings_of(group: type) -> dict[str, str]:
    """Return the string that follows each field of a dataclass in the source code, by field name."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(group))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found[field.target.id] = inspect.cleandoc(str(below.value.value))  # pyrefly: ignore[missing-attribute]
    return found


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


def files_page() -> str:
    """Return docs/files.md with a new table between the markers."""
    before, found, rest = (ROOT / "docs/files.md").read_text().partition(BEGIN)
    if not found:
        raise ValueError(f"docs/files.md has no line {BEGIN}")
    return f"{before}{BEGIN}\n\n{rows_table()}\n\n{END}{rest.partition(END)[2]}"


PAGES: dict[str, Callable[[], str]] = {
    "docs/cli.md": commands_page,
    "docs/config.md": config_page,
    "docs/files.md": files_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / name).write_text(page())
