"""Overrides of config fields. The first test compares them with those of ml_collections.config_flags."""

import subprocess
import sys
import textwrap

import pytest
from absl import flags as absl_flags
from ml_collections import config_flags

from difftx.commands.flags import parse_overrides
from difftx.config.recipes import default_config, load_config
from difftx.errors import UserError

ACCEPTED = [
    ["--config.train.steps=700"],
    ["--config.train.steps", "700"],
    ["--config.model.remat", "full"],
    ["--config.optimizer.learning_rate=3e-4"],
    ["--config.optimizer.final_learning_rate", "1e-5"],
    ["--config.data.verify"],
    ["--noconfig.logging.tensorboard"],
    ["--config.data.verify=true"],
    ["--config.logging.tensorboard=false"],
    ["--config.eval.suites=('loss','recall')"],
    ["--config.eval.suites=('loss',)"],
    ["--config.eval.needle.depths=(0.0, 1.0)"],
    ["--config.eval.outliers.ranks=(1, 5)"],
    ["--config.data.path=stdlib"],
    ["--config.model.num_kv_heads=2"],
]


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
    ours = load_config(path, parse_overrides(arguments, "config"))
    (field,) = parse_overrides(arguments, "config")
    for name in field.split("."):
        expected, ours = expected[name], getattr(ours, name)
    assert ours == expected
    assert type(ours) is type(expected)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("loss,recall", ("loss", "recall")),
        ('["loss", "recall"]', ("loss", "recall")),
        ('("loss","recall")', ("loss", "recall")),
        ("loss", ("loss",)),
        ("()", ()),
        ("[]", ()),
    ],
)
def test_lists_are_read_as_python_json_or_commas(text, value):
    assert load_config("quickstart", {"eval.suites": text}).eval.suites == value


def test_lists_of_numbers_and_of_groups_are_json_too():
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
        (["--config.train.steps", "--config.data.verify"], "the value is missing"),
        (["--noconfig.train.steps"], "only a true-or-false field"),
        (["--noconfig.data.verify=true"], "only a true-or-false field"),
        (["--config.data.verfy"], "Did you mean 'verify'"),
        (["--confg.train.steps=1"], "is not understood"),
        (["stray"], "is not understood"),
    ],
)
def test_invalid_overrides_are_rejected_in_one_line(arguments, expected):
    with pytest.raises(UserError, match=expected) as error:
        parse_overrides(arguments, "config")
    assert "\n" not in str(error.value)


def test_recipes_are_found_by_name_and_by_path():
    assert load_config("quickstart:diff", {}) == load_config("configs/quickstart.py:diff", {})
    with pytest.raises(UserError, match="Did you mean 'quickstart'"):
        load_config("quickstrt:diff", {})
    with pytest.raises(UserError, match=r"Known: ablations, base, .*, quickstart, .*, toy"):
        load_config("zzz", {})
    with pytest.raises(UserError, match="The recipe of difftx is --config=quickstart"):
        load_config("nowhere/quickstart.py", {})


@pytest.mark.long
def test_a_recipe_imports_its_base_in_any_folder(tmp_path):
    """The import line of difftx's recipes works in a user's own file and in another working directory."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from difftx.configs import quickstart\n\n\ndef get_config(name='diff'):\n"
        "    c = quickstart.get_config(name)\n    c.train.seed = 5\n    return c\n"
    )
    code = "from difftx.config.recipes import load_config; print(load_config('mine.py', {}).train.seed)"
    root = __file__.rpartition("/tests/")[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "5"


def test_defaults_refuse_values_of_another_type():
    c = default_config()
    with pytest.raises(TypeError):
        c.model.num_kv_heads = "two"
    with pytest.raises(TypeError):
        c.optimizer.learning_rate = "fast"
    c.model.num_kv_heads = 2
