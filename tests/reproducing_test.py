"""docs/reproducing.md names every table, figure and experiment, with costs that follow from the configs."""

import re

import pytest
from conftest import ROOT
from helpers.page_commands import commands_of

from difftx.config.recipes import load_config
from difftx.model.flops import flops_per_token

PAGE = (ROOT / "docs" / "reproducing.md").read_text()


def test_the_page_has_commands():
    """The page has enough commands. tests/site_test.py checks each of them."""
    assert len(commands_of(PAGE)) > 40


def test_the_page_names_every_table_figure_and_experiment():
    for name in ("Table", "Figure"):
        found = re.findall(r"\d+", " ".join(re.findall(rf"{name}s? ([\d, ab]+)", PAGE)))
        assert {int(number) for number in found} >= set(range(1, 11 if name == "Table" else 10)), name
    for name in ("NC1", "NC2", "NC3", "SP1", "SP2", "SP3", "Q1", "Q2", "Q3", "Q4", "Q5"):
        assert f"| {name} |" in PAGE


@pytest.mark.parametrize(
    ("row", "spec"),
    [
        ("Table 10, 830M", "scaling.py:diff-830m"),
        ("13.1B", "scaling.py:diff-13.1b"),
        ("Table 9, 3B, 1T tokens", "diff_3b.py:diff"),
        ("64K, 1.5B tokens more", "long_context.py:diff"),
        ("mathematics, stage 2", "math.py:diff-stage2"),
        ("an ablation of Table 6", "ablations.py:diff"),
        ("an arm of the review, retrieval", "review.py:nc2-retrieval"),
    ],
)
def test_costs_are_those_of_the_configs(row, spec):
    config = load_config(str(ROOT / "configs" / spec), {})
    tokens = config.train.steps * config.train.global_batch_tokens
    flops = tokens * flops_per_token(config.model, config.data.sequence_length, causal=False)
    [cells] = [line.split("|")[2:-1] for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    printed = [float(cell.replace(",", "")) for cell in cells[1:]]
    assert printed == pytest.approx([flops, flops / 400e12 / 3600, flops / 230e12 / 3600], rel=0.06)
