"""Every command of docs/reproducing.md: its config, fields and suites are there. None of them is run."""

import re
import shlex

import pytest
from conftest import ROOT

from difftx.__main__ import COMMANDS
from difftx.commands.flags import parse_overrides
from difftx.config.build import override
from difftx.config.recipes import load_config
from difftx.config.suites import SUITES
from difftx.launch.grid import make_points, parse_grid
from difftx.model.flops import flops_per_token

PAGE = (ROOT / "docs" / "reproducing.md").read_text()
LINES = [line.strip() for line in PAGE.splitlines() if line.startswith("    python ")]
# What a reader's own files stand for.
FILES = {
    "sets.json": '[{"name": "a", "path": "a.jsonl", "kind": "question_answering", "document": "context", '
    '"question": "input", "answers": "answers", "new_tokens": 32}]',
    "tasks.json": '[{"name": "a", "train": "a", "test": "b", "text": "text", "label": "label", "text_word": "Q", '
    '"label_word": "A"}]',
    "math.json": '[{"name": "gsm8k", "format": "gsm8k", "test": "a", "train": "b", "train_format": null}]',
}


def arguments(line):
    return shlex.split(re.sub(r"\$\(cat (\S+)\)", lambda found: FILES[found[1]].replace('"', '\\"'), line))


def options(flags, *groups):
    """Return the flags that no group of the config has, by name, and those of the groups."""
    of_groups = [flag for flag in flags if flag.startswith(tuple(f"--{group}." for group in groups))]
    own = dict(flag.partition("=")[::2] for flag in flags if flag not in of_groups)
    return own, of_groups


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("python train.py")])
def test_training_commands(line):
    own, overrides = options(arguments(line)[2:], "config")
    load_config(str(ROOT / own["--config"]), parse_overrides(overrides, "config"))
    assert own.keys() <= {"--config", "--workdir", "--dry_run"}


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("python eval.py")])
def test_evaluation_commands(line):
    own, overrides = options(arguments(line)[2:], "eval")
    override(load_config(str(ROOT / "configs" / "base.py"), {}), parse_overrides(overrides, "eval"))
    assert set(own.get("--suite", "loss").split(",")) <= set(SUITES)
    assert own.keys() <= {"--workdir", "--suite", "--step", "--report", "--out", "--scaling", "--curves"}


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("python -m")])
def test_other_commands(line):
    words = arguments(line)
    assert words[2] == "difftx"
    assert words[3] in COMMANDS
    if words[3] == "sweep":
        own, overrides = options([word for word in words if word.startswith("--") and word != "--grid"], "config")
        grid = parse_grid([word for word in words[4:] if not word.startswith("--")])
        assert make_points(str(ROOT / own["--config"]), grid, parse_overrides(overrides, "config"))


def test_every_table_and_figure_of_the_paper_and_experiment_of_the_review_is_there():
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
