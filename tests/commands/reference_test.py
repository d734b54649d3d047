"""docs/cli.md has the help text of every command."""

from conftest import ROOT

from difftx.commands import reference


def test_the_page_is_up_to_date(monkeypatch):
    monkeypatch.setenv("COLUMNS", reference.WIDTH)
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == reference.reference_page(), "run: python -m difftx.commands.reference > docs/cli.md"
