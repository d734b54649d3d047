"""The public names of difftx. docs/api.md lists them, and mkdocstrings writes their documentation into the site."""

import importlib
import pkgutil
import re

import pytest
from helpers.pages import DOCS

import difftx

LISTED = re.findall(r"^::: (\S+)$|`(difftx\.[\w.]+)`", (DOCS / "api.md").read_text(), re.MULTILINE)
# With a colon, it is the attribute of `difftx`: in a clone, the module difftx.train would be train.py.
PUBLIC = {path: pkgutil.resolve_name(re.sub(r"^difftx\.(?=\w+$)", "difftx:", path)) for path in map("".join, LISTED)}


def test_the_top_level_names_are_public():
    top = {path.rpartition(".")[2] for path in PUBLIC if path.rpartition(".")[0] == "difftx"}
    assert top | {"kernels"} == set(difftx.__all__)
    with pytest.raises(AttributeError, match="module 'difftx' has no attribute 'Attention'"):
        _ = difftx.Attention


EXTENSIONS = [f"extensions/{path.name}" for path in sorted((DOCS / "extensions").glob("*.py"))]


@pytest.mark.parametrize("page", ["layer.md", "extend.md", *EXTENSIONS])
def test_pages_use_public_names_only(page):
    imports = re.findall(r"^from (difftx[\w.]*) import (.+)$", (DOCS / page).read_text(), re.MULTILINE)
    assert len(imports) >= 3
    modules = {path.rpartition(".")[0] for path in PUBLIC}
    for path in (f"{module}.{name}" for module, names in imports for name in names.split(", ")):
        assert path in PUBLIC or path in modules
        assert hasattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2])
