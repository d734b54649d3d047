"""Generated pages are up to date, and texts for users name commands that a wheel has."""

import ast

import pytest
from conftest import ROOT

from benchmarks import reference_pages

OF_CLONES = ("__main__.py", "launch/jobs.py")  # Files whose texts are about a clone, which has train.py and eval.py.


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_a_generated_page_is_up_to_date(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", reference_pages.WIDTH)  # The generator sets it.
    page = (ROOT / name).read_text()
    assert page == reference_pages.PAGES[name](), "run: python benchmarks/reference_pages.py"


def test_every_field_has_a_meaning():
    rows = [line for line in (ROOT / "docs" / "config.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert not [row for row in rows if row.endswith("|  |")]


def test_messages_name_the_command_difftx():
    """The scripts train.py and eval.py are not in a wheel. `SCRIPTS` in the report translates their names."""
    package = ROOT / "difftx"
    files = [path for path in package.rglob("*.py") if str(path.relative_to(package)) not in OF_CLONES]
    texts = {
        (path.name, node.value)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    texts |= {(path.name, path.read_text()) for path in package.rglob("*.html")}
    assert len(texts) > 1000
    scripts = ("eval.py", "train.py ", "python train.py", "python -m difftx")
    assert [(name, text) for name, text in texts if any(script in text for script in scripts)] == []
