"""Rules of the architecture that a program can check: the direction of imports and the size of the entry points."""

import ast
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "difftx"

# The table of packages in docs/design.md, from the bottom up. A file imports only earlier packages and its own package.
TABLE = (ROOT / "docs/design.md").read_text().partition("## 2. Packages")[2].partition("\n## ")[0]
ROWS = [line.split("|")[1] for line in TABLE.splitlines() if line.startswith("| `difftx/")]
ORDER = list(
    dict.fromkeys(re.sub(r"\.py$", "", name) for row in ROWS for name in re.findall(r"`(?:difftx/)?([\w.]+)", row))
)
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
REGISTERED = re.compile(r"(difftx(?:\.\w+)+):\w+")  # An entry of a registry, which is imported at its first use.


def imported_modules(module: str) -> set[str]:
    """Return the modules of difftx that a module imports, at its start or later.

    Entries of registries count if they are in another package. A registry names the modules of its own package, as it
    names those of extensions, and its modules may use it.
    """
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):  # Imports for type checkers do not run.
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "difftx":
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.Constant) and (entry := REGISTERED.fullmatch(str(node.value))):
            found |= {entry[1]} - {name for name in MODULES if package_of(name) == package_of(module)}
    return found


def package_of(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


IMPORTS = {module: imported_modules(module) for module in MODULES}


def test_imports_run_one_way():
    for module in MODULES:
        own = package_of(module)
        if own not in ("", "__main__"):
            for name in {package_of(name) for name in IMPORTS[module]} - {own}:
                assert ORDER.index(name) < ORDER.index(own), f"{module} must not import {name}"


def test_no_imports_run_in_a_circle():
    graphlib.TopologicalSorter(IMPORTS).prepare()


def test_kernels_import_nothing_else_of_difftx():
    kernels = {module for module in MODULES if package_of(module) == "kernels"}
    assert set().union(*(IMPORTS[module] for module in kernels)) <= kernels


def test_entry_points_stay_small():
    for path in (ROOT / "train.py", ROOT / "eval.py"):
        assert len(path.read_text().splitlines()) <= 60, f"{path}: move code into difftx/"
