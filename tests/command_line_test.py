"""Overrides of config fields. The first test compares them with those of ml_collections.config_flags."""

import importlib
import sys
import textwrap

import pytest
from absl import flags as absl_flags
from ml_collections import config_flags

from difftx.commands import train
from difftx.commands.flags import Parser
from difftx.config.build import override
from difftx.config.recipes import load_config
from difftx.errors import UserError
from difftx.launch.grid import make_points

ACCEPTED = [
    ["--config.train.steps", "700"],
    ["--config.model.remat", "full"],
    ["--config.optimizer.final_learning_rate", "1e-5"],
    ["--config.data.verify"],
    ["--config.data.verify=true"],
    ["--config.eval.suites=('loss','recall')"],
    ["--config.eval.needle.depths=(0.0, 1.0)"],
    ["--config.data.path=stdlib"],
    ["--config.model.num_kv_heads=2"],
]


def overrides(arguments, *fields):
    return Parser("difftx train", None, *(fields or ["config"])).overrides(arguments)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"

    def write(*lines):
        body = textwrap.indent("\n".join(lines), "    ")
        path.write_text(
            "from ml_collections import config_dict\n\nfrom difftx.config.recipes import default_config\n\n\n"
            f"def get_config():\n    c = default_config()\n{body}\n    return c\n"
        )
        return str(path)

    return write


@pytest.mark.parametrize("arguments", ACCEPTED, ids=" ".join)
def test_overrides_equal_those_of_config_flags(recipe, arguments, monkeypatch):
    path = recipe("pass")
    values = absl_flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values)
    monkeypatch.setattr(sys, "argv", ["program", f"--config={path}", *arguments])  # config_flags reads sys.argv.
    values(sys.argv)
    expected = values.config.to_dict()
    ours = load_config(path, overrides(arguments))
    (field,) = overrides(arguments)
    for name in field.split("."):
        expected, ours = expected[name], getattr(ours, name)
    assert ours == expected
    assert type(ours) is type(expected)


def test_lists_are_read_as_python_json_or_commas():
    both = ("loss", "recall")
    texts = {"loss,recall": both, '["loss", "recall"]': both, '("loss","recall")': both, "loss": ("loss",), "()": ()}
    for text, value in texts.items():
        assert load_config("quickstart", {"eval.suites": text}).eval.suites == value
    assert load_config("quickstart", {"eval.needle.depths": "[0.0,1.0]"}).eval.needle.depths == (0.0, 1.0)
    cases = load_config("quickstart", {"eval.needle.cases": '[{"needles": 3, "queries": 2}]'}).eval.needle.cases
    assert [(case.needles, case.queries) for case in cases] == [(3, 2)]
    cases = load_config("quickstart", {"eval.needle.cases.0.needles": "5"}).eval.needle.cases
    assert (cases[0].needles, cases[1].needles) == (5, 2)


def test_a_field_reference_follows_an_override(recipe):
    path = recipe("c.train.steps = 100", "c.optimizer.warmup_steps = c.train.get_ref('steps') // 2")
    assert load_config(path, {}).optimizer.warmup_steps == 50
    assert load_config(path, {"train.steps": "30"}).optimizer.warmup_steps == 15
    assert load_config(path, {"train.steps": "30", "optimizer.warmup_steps": "4"}).optimizer.warmup_steps == 4


def test_a_required_placeholder_requires_its_flag(recipe):
    path = recipe("c.train.steps = config_dict.required_placeholder(int)")
    assert load_config(path, {"train.steps": "400"}).train.steps == 400
    with pytest.raises(UserError, match=r"--config\.FIELD=value"):
        load_config(path, {})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config.train.steps"], "the value is missing"),
        (["--config.data.verfy"], "Did you mean 'verify'"),
        (["--confg.train.steps=1"], r"Did you mean --config\.train\.steps\?"),
        (["--train.step=1"], r"train\.step: no such field\. Did you mean 'steps'"),
        (["--config.lr=1"], r"lr: no such field\. Did you mean 'optimizer\.learning_rate'"),
    ],
)
def test_invalid_overrides_are_rejected_in_one_line(arguments, expected):
    with pytest.raises(UserError, match=expected) as error:
        overrides(arguments)
    assert "\n" not in str(error.value)


def test_the_word_config_may_be_left_out():
    for arguments in ACCEPTED:
        assert overrides([arguments[0].replace("config.", ""), *arguments[1:]]) == overrides(arguments)


def test_a_command_changes_only_its_groups():
    suites = ["--config.eval.suites=loss"]
    assert overrides(suites, "eval", "mesh") == overrides(suites)
    with pytest.raises(UserError, match=r"does not change train.steps, only eval\.…, mesh\.…$"):
        overrides(["--config.train.steps=9"], "eval", "mesh")


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("train --config=toy --lr=3e-4", "--lr=3e-4: no such flag. Did you mean --config.optimizer.learning_rate?"),
        ("train --config=toy --steps 10", "--steps: no such flag. Did you mean --config.train.steps?"),
        ("train --config=toy --batch_size=32", "--config.train.global_batch_tokens (in tokens: sequences × data.seq"),
        ("train --config=toy --num_train_epochs=3", "Did you mean --config.train.steps (in updates, not epochs)?"),
        ("train --config=toy --train.batch_size=32", "Did you mean 'train.global_batch_tokens' (in tokens: sequences"),
        ("train --config=toy --resume_from_checkpoint=x", "Did you mean --workdir (directory of a run; a training re"),
        ("train --config=toy --wandb_project=x", "Did you mean --config.logging.trackers (such as wandb:PROJECT)?"),
        ("eval --workdir=x --tasks=piqa", "Did you mean --suite (tasks of lm-eval: --suite=harness --eval.h"),
        ("train --config=toy steps=10", "steps=10: no such flag. Did you mean --config.train.steps?"),
        ("train --config=toy --seed=9", "Did you mean --config.data.seed or --config.train.seed or"),
        ("train --config=toy --dry-run", "--dry-run: no such flag. Did you mean --dry_run?"),
        ("train --config=toy --dry_run=true", "argument --dry_run: takes no value, but has 'true'; see difftx train"),
        ("train --config=toy --zzz", "--zzz: no such flag. Known: --help, --config, --workdir, "),
        ("train --train.steps=9", "the following arguments are required: --config; see difftx train --help"),
        ("generate --workdir=x --max_new_tokens=20", "Did you mean --new_tokens?"),
        ("generate --workdir=x ROMEO", "'ROMEO' belongs to no flag; quote a value that has spaces"),
        ("generate --workdir=x --lr=1", "--lr=1: difftx generate does not change optimizer.learning_rate, only mesh.…"),
        ("eval --workdir=x --config.train.steps=9", "difftx eval does not change train.steps, only eval.…, mesh.…, "),
        ("eval --workdir=x --suite=loss test", "'test' belongs to no flag; quote a value that has spaces, and write"),
        ("checkpoint ls --workdir=x --workdr=x", "--workdr=x: no such flag. Did you mean --workdir?"),
        ("data verify", "the following arguments are required: folder; see difftx data verify --help"),
        ("eval --workdir=x --weights=mean", "argument --weights: invalid choice: 'mean' (choose from 'params', 'ema')"),
    ],
)
def test_a_mistaken_flag_names_the_flag_or_field_that_is_meant(command, fix):
    name, *arguments = command.split()
    with pytest.raises(UserError) as error:
        importlib.import_module(f"difftx.commands.{name}").main(arguments)
    assert fix in str(error.value)


def test_a_config_in_json_is_a_config(tmp_path, monkeypatch, capsys):
    """The config that a run or --print_config writes, with overrides, is that of the recipe."""
    changes = ["--config.train.steps=777", "--optimizer.warmup_steps=5"]
    assert train.main(["--config=quickstart:diff", "--print_config", *changes]) == 0
    path = tmp_path / "config.json"
    path.write_text(capsys.readouterr().out)
    expected = load_config("quickstart:diff", overrides(changes))
    assert load_config(str(path), {}) == expected
    (point,) = make_points(str(path), {"train.seed": ["3"]}, {})
    assert (point.spec, point.config) == (str(path), override(expected, {"train.seed": "3"}))
    for text, message in (("{", "line 1 is not JSON"), ('{"train": {"step": 3}}', "train.step=3: no such field")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            load_config(str(path), {})
    with pytest.raises(UserError, match=r"its name must end in \.py \(a recipe\) or \.json \(a config\)"):
        load_config(str(tmp_path / "config.yaml"), {})
