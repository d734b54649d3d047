"""Generator of docs/config.md, the reference of all config fields.

Usage: python -m difftx.config.reference > docs/config.md
"""

import ast
import dataclasses
import inspect
import textwrap

from difftx.config import Config
from difftx.config.build import describe_type
from difftx.config.fields import entry_type, plain, types_of

HEADER = """# Config fields

`python -m difftx.config.reference > docs/config.md` makes this page from the schema in `difftx/config/`.

Set a field in a recipe (`c.optimizer.learning_rate = 1e-3`) or on the command line
(`--config.optimizer.learning_rate=1e-3`, or without `config.`).
"""


def reference_page() -> str:
    """Return docs/config.md, which has a section per group with the type, default and meaning of each field."""
    return HEADER + "".join(_section(Config, ""))


def _section(group: type, path: str) -> list[str]:
    rows, sections, meanings = [], [], _meanings_of(group)
    for field in dataclasses.fields(group):
        if field.name == "extensions":
            continue
        name, annotation = f"{path}{field.name}", types_of(group)[field.name]
        if dataclasses.is_dataclass(annotation):
            sections += _section(annotation, f"{name}.")  # pyrefly: ignore[bad-argument-type]
            continue
        default = "required" if field.default is dataclasses.MISSING else f"`{plain(field.default)!r}`"
        meaning = " ".join(meanings[field.name].split())
        cells = (f"`{field.name}`", describe_type(annotation), default, meaning)
        rows.append(f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |\n")
        if entry := entry_type(annotation):
            sections += _section(entry, f"{name}.N.")
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


if __name__ == "__main__":
    print(reference_page(), end="")
