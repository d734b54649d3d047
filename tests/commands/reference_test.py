"""docs/cli.md has the help text of every command, and texts for users name commands that a wheel has."""

import ast

from conftest import ROOT

from difftx.commands import reference

# Files whose texts are about a clone, which has train.py and eval.py.
OF_CLONES = ("__main__.py", "commands/reference.py", "commands/config_reference.py", "launch/jobs.py")


def test_the_page_is_up_to_date(monkeypatch):
    monkeypatch.setenv("COLUMNS", reference.WIDTH)
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == reference.reference_page(), "run: python -m difftx.commands.reference > docs/cli.md"


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
