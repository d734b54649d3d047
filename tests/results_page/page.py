"""docs/results.md: its text and tables, and how it writes numbers."""

import functools

import pytest
from conftest import ROOT

from results_page.significance import interval

PAGE = (ROOT / "docs" / "results.md").read_text()
PROSE = " ".join(PAGE.split())


def claim(sentence):
    """Decorate a test of what a sentence of docs/results.md says.

    The test first checks that the page has the sentence, so that the two change together.
    """

    def decorate(test):
        @functools.wraps(test)
        def check():
            assert sentence in PROSE, f"docs/results.md lacks {sentence!r}"
            test()

        return check

    return decorate


def section(start, end):
    return PAGE.partition(f"\n{start}\n")[2].partition(f"\n{end}\n")[0]


def row_of(one, other, section):
    """Return the cells of a contrast's row in a section of the page."""
    [line] = [line for line in section.splitlines() if line.startswith(f"| `{one}` − `{other}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def shown(values):
    """Return mean and interval with three decimals, or with four if three do not show which one is larger."""
    mean, half = interval(values)
    decimals = 4 if f"{abs(mean):.3f}" == f"{half:.3f}" != "0.000" else 3
    return f"{mean:+.{decimals}f} ± {half:.{decimals}f}"


def shows_p(text, p):
    """Return whether a table's text is a p-value, with three decimals."""
    return text == "<0.001" if p < 0.001 else float(text) == pytest.approx(p, abs=6e-4)
