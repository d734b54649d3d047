"""Rules of the architecture that a program can check: the direction of imports and the size of the entry points."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "difftx"

# The table of packages in docs/design.md, from the bottom up. A file imports only earlier packages and its own package.
TABLE = (ROOT / "docs/design.md").read_text().partition("## 2. Packages")[2].partition("\n## ")[0]
ROWS = [line.split("|")[1] for line in TABLE.splitlines() if line.startswith("| `difftx/")]
ORDER = list(
    dict.fromkeys(re.sub(r"\.py$", "", name) for row in ROWS for name in re.findall(r"`(?:difftx/)?([\w.]+)", row))
)
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_packages(path: Path) -> set[str]:
    names = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):  # Imports for type checkers do not run.
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "difftx":
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    for name in imported_packages(path) - {own}:
        assert ORDER.index(name) < ORDER.index(own), f"{own} must not import {name}"


def test_kernels_import_nothing_else_of_difftx():
    for path in (PACKAGE / "kernels").rglob("*.py"):
        assert imported_packages(path) <= {"kernels"}, path


def test_entry_points_stay_small():
    for path in (ROOT / "train.py", ROOT / "eval.py"):
        assert len(path.read_text().splitlines()) <= 60, f"{path}: move code into difftx/"
