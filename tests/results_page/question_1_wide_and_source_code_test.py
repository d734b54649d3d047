"""Question 1 with wide heads, and on the source code of Python's library."""

import pytest

from results_page.page import claim, row_of, section, shown, shows_p
from results_page.question_1 import better
from results_page.runs import LOSS, contrast
from results_page.significance import corrected, interval, two_sided

MAIN = [("diff", "zero-norm"), ("diff", "transformer"), ("diff", "transformer-gain")]
WIDE_SECTION = section("### Wide heads", "### Other text")
STDLIB_SECTION = section("### Other text", "## Question 2: warm-up and optimizer")
MAIN_PARTS = [
    ("question-1-wide", LOSS, WIDE_SECTION),
    ("question-1-stdlib", "loss/bits_per_byte", STDLIB_SECTION),
]


@pytest.mark.parametrize(("study", "number", "part"), MAIN_PARTS, ids=["wide", "stdlib"])
def test_wide_heads_and_other_text_have_the_three_contrasts(study, number, part):
    values = {pair: contrast(study, *pair, number) for pair in MAIN}
    p_values = corrected({pair: two_sided(of) for pair, of in values.items()})
    for pair, of in values.items():
        cells = row_of(*pair, part)
        assert cells[2] == shown(of)
        assert shows_p(cells[3], p_values[pair])
        expected = "open" if p_values[pair] >= 0.05 else "worse" if interval(of)[0] > 0 else "better"
        assert cells[4] == expected


def verdicts(part):
    return [row_of(*pair, part)[4] for pair in MAIN]


@claim(
    "With heads of width 32, `diff` is behind the Transformer with a gain (marginal); the other two contrasts are open"
)
def test_wide_heads():
    assert verdicts(WIDE_SECTION) == ["open", "open", "worse"]


@claim("On the source code of Python's library, `diff` is behind both Transformers (marginal), as on novels")
def test_source_code():
    assert verdicts(STDLIB_SECTION) == ["open", "worse", "worse"]
    assert all(better(arm, "diff") for arm in ("transformer", "transformer-gain"))
