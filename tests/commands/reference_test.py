"""Generated pages are up to date."""

import pytest
from conftest import ROOT

from benchmarks import reference_pages


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_a_generated_page_is_up_to_date(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", reference_pages.WIDTH)  # The generator sets it.
    page = (ROOT / name).read_text()
    assert page == reference_pages.PAGES[name](), "run: python benchmarks/reference_pages.py"


def test_every_field_has_a_meaning():
    rows = [line for line in (ROOT / "docs" / "config.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert not [row for row in rows if row.endswith("|  |")]
