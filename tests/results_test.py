"""docs/results.md says what docs/results.json says, and that is what runs said."""

import json
import re
import statistics

import pytest

from benchmarks import results

COLLECTED = json.loads(results.COLLECTED.read_text())


def test_the_page_is_what_the_runs_make_of_the_template():
    page = results.render(COLLECTED, results.TEMPLATE.read_text())
    assert page == results.PAGE.read_text(), "run `python benchmarks/results.py render`, and read what changed"


def test_the_template_has_no_result_of_its_own():
    """A decimal outside of a command or a code span would be a number that no run stands behind."""
    text = re.sub(r"`[^`]*`|^    .*$|\{\{.*?\}\}|arXiv \S+", "", results.TEMPLATE.read_text(), flags=re.MULTILINE)
    assert not re.findall(r"\d*\.\d+", text)


@pytest.mark.parametrize("arm", dict.fromkeys(r["arm"] for r in COLLECTED["arms"]))
@pytest.mark.parametrize("task", ["books", "recall"])
def test_every_arm_has_three_seeds_and_as_many_parameters_and_tokens(task, arm):
    own, reference = (
        [r for r in COLLECTED["arms"] if (r["task"], r["arm"]) == (task, name)] for name in (arm, "transformer")
    )
    assert {r["seed"] for r in own} == {r["seed"] for r in reference} == {0, 1, 2}
    assert {r["tokens"] for r in own} == {r["tokens"] for r in reference}
    assert own[0]["parameters"] == pytest.approx(reference[0]["parameters"], rel=0.01)


def test_intervals_are_those_of_a_table_of_students_t():
    values = [3.1, 3.4, 3.2]
    mean, half = results.estimate(values)
    assert mean == pytest.approx(statistics.fmean(values))
    assert half == pytest.approx(4.302653 * statistics.stdev(values) / 3**0.5, rel=1e-6)  # Two degrees of freedom.
    assert results.estimate([2.0]) == (2.0, None)
