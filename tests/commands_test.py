"""train.py, eval.py, `difftx` and make, as a user calls them. Most calls run in forks, some in new interpreters."""

import importlib
import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TINY
from helpers.command_server import commands, run_new

import difftx
from difftx.__main__ import COMMANDS
from difftx.errors import run_command
from difftx.evals import SUITES

TINY_FLAGS = [f"--config.{name}={value}" for name, value in TINY.items()]


def run(*arguments):
    return commands().run(arguments)


def train(*flags):
    return run("train.py", "--config=configs/quickstart.py", *flags)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    result = run_new(*training_of("diff", folder))
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def both_trained(trained):
    result = run(*training_of("transformer", trained))
    assert result.returncode == 0, result.stderr
    return trained


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--config=quickstart", "--print_config"),
        ("train", "--config=quickstart", "--dry_run"),
        ("sweep", "--config=quickstart", "--grid", "seed=0", "--out=sweep"),
        ("plan", "--config=quickstart", "--topology=cpu:1"),
        ("doctor", "--config=quickstart", "--json"),
    ],
    ids=" ".join,
)
def test_each_command_refuses_a_config_that_does_not_fit(arguments, tmp_path):
    for field, value, message in (
        ("model.num_heads", "3", "model.num_heads=3: their 6 sub-heads do not divide d_model=128; use 2"),
        ("model.top_k", "8", "model.top_k=8: model.top_k is a group; set one of its fields: k"),
        ("train.global_batch_tokens", "1000", "is not a multiple of data.sequence_length × train.accumulation = 256"),
    ):
        result = run("difftx", *arguments, f"--config.{field}={value}")
        assert result.returncode == 2
        assert message in result.stderr.splitlines()[-1]


def test_an_evaluation_refuses_a_config_that_does_not_fit(trained):
    result = run("eval.py", f"--workdir={trained}/runs/diff", "--suite=loss", "--model.attention_implementation=splash")
    assert result.returncode == 2
    assert (
        "model.attention_implementation='splash' does not serve architecture 'diff'; use one of auto" in result.stderr
    )


def training_of(architecture, folder):
    return [
        "train.py",
        f"--config=configs/quickstart.py:{architecture}",
        f"--workdir={folder / 'runs' / architecture}",
        "--config.checkpoint.every_steps=3",
        *TINY_FLAGS,
        f"--config.data.path={folder / 'text.txt'}",
        "--config.eval.loss_tokens=512",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workdir=x", "--config.eval.suites=los"], "Did you mean 'loss'"),
        (["--workdir=x", "--config.eval.suites=loss,exact_match"], "no data path is a synthetic task"),
        (["--workdir=x", "--config.data.path=no/such/*.txt"], "data.path='no/such/*.txt'"),
        (["--workdir=x", "--confg.model.num_heads=3"], "Did you mean --config.model.num_heads?"),
        ([], "--workdir=DIR is needed"),
    ],
)
def test_a_user_error_exits_with_code_2_and_its_reason(flags, message):
    result = train(*flags)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (ROOT / "x").exists()


def test_print_config_is_the_config():
    result = train("--print_config", "--config.train.steps=777")
    assert result.returncode == 0
    assert json.loads(result.stdout)["train"]["steps"] == 777


@pytest.mark.long
def test_dry_run_prints_the_cost_and_trains_nothing(tmp_path):
    result = run_new("train.py", "--config=configs/quickstart.py", "--dry_run", f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    chosen = (
        "820,096 parameters",
        "4 layers of width 128, 2 differential heads = 4 sub-heads of width 32, mlp_dim",
        "rate 0.004 after a warm-up of 275 steps",
    )
    for part in (*chosen, "training tokens", "FLOPs per token", "of train state"):
        assert part in result.stdout
    assert not (tmp_path / "run").exists()


def test_dry_run_of_a_paper_config_prints_its_cost_before_it_asks_for_data():
    result = run(
        "train.py",
        "--config=configs/scaling.py:diff-13.1b",
        "--dry_run",
        "--config.data.tokenizer=bytes",
    )
    assert result.returncode == 2
    assert "diff, 13,083,724,800 parameters" in result.stdout
    assert "data.path is not set" in result.stderr


def test_a_dry_run_warns_if_a_recipe_resizes_a_matched_model(trained, tmp_path):
    recipe = tmp_path / "own.py"
    lines = ["c = quickstart.get_config('gda')", "c.model.d_model = 256", f"c.data.path = '{trained / 'text.txt'}'"]
    body = "".join(f"    {line}\n" for line in [*lines, "return c"])
    recipe.write_text(f"from difftx.configs import quickstart\n\n\ndef get_config():\n{body}")
    result = run("train.py", f"--config={recipe}", "--dry_run")
    assert "model.mlp_dim=360, not 384; 2,094,848 parameters, not 2,168,576" in result.stdout, result.stderr


def test_eval_writes_the_same_numbers_as_the_training_loop(trained):
    workdir = trained / "runs" / "diff"
    result = run_new("eval.py", f"--workdir={workdir}", "--suite=loss,sample", "--eval.sample_tokens=8")
    assert result.returncode == 0, result.stderr
    assert "bits_per_byte" in result.stdout
    newest = json.loads((workdir / "evals" / "loss" / "6.json").read_text())
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    in_loop = [row for row in rows if row["split"] == "valid" and row["step"] == 6]
    assert newest["numbers"]["loss"] == in_loop[0]["loss"]  # Both use the same code path, and are equal bit for bit.
    assert "evals/loss/6.json was made with the same settings" in result.stdout
    result = run("eval.py", f"--workdir={workdir}", "--suite=loss", "--step=all", "--mesh.data=-1", "--mesh.fsdp=1")
    assert result.returncode == 0, result.stderr
    assert (workdir / "evals" / "loss" / "3.json").exists()


@pytest.mark.long
def test_eval_writes_curves_of_all_runs(both_trained):
    result = run("eval.py", f"--curves={both_trained}/runs/*", f"--out={both_trained / 'out'}")
    assert result.returncode == 0, result.stderr
    assert "transformer" in result.stdout
    assert {p.name for p in (both_trained / "out").iterdir()} == {
        "curves.png",
        "curves.svg",
        "curves.json",
    }


@pytest.mark.long
def test_a_report_of_both_runs(both_trained):
    runs, page = both_trained / "runs", both_trained / "page" / "report.html"
    result = run("difftx", "report", f"--workdir={runs}/diff,{runs}/transformer", f"--out={page}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(page)
    text = page.read_text()
    for part in ("Training loss of each batch", "λ of each layer: diff", "model.architecture", "bits per byte"):
        assert part in text
    result = run("difftx", "report", f"--workdir={runs}/diff")
    assert result.stdout.strip() == str(runs / "diff" / "report.html")
    # The flag also accepts a folder of runs, such as a sweep's, and a glob.
    for runs_flag in (f"--workdir={runs}", f"--workdir={runs}/*"):
        assert run("difftx", "report", runs_flag, f"--out={page}").returncode == 0
        assert "difftx report: transformer and diff" in page.read_text()
    for wrong, message in (
        (f"--workdir={runs}/diff,{runs}/none", "no config.json there"),
        (f"--workdir={runs}/none*", "no config.json there"),
        (f"--workdir={runs}/diff,{runs}", "a run is named twice"),
        ("--workdir=hdfs://x", "hdfs://x"),
    ):
        result = run("difftx", "report", wrong)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr


def test_difftx_train_equals_train_py(trained):
    flags = ["--config=configs/quickstart.py:diff", "--print_config", "--config.train.seed=3"]
    by_file = run("train.py", *flags)
    by_name = run("difftx", "train", "--config=quickstart:diff", *flags[1:])
    assert (by_name.returncode, by_name.stdout) == (0, by_file.stdout)
    # A finished run has nothing left to do.
    workdir = trained / "runs" / "diff"
    flags = [*TINY_FLAGS, f"--config.data.path={trained / 'text.txt'}", "--config.eval.loss_tokens=512"]
    result = run(
        "difftx",
        "train",
        "--config=quickstart:diff",
        f"--workdir={workdir}",
        "--config.checkpoint.every_steps=3",
        *flags,
    )
    assert result.returncode == 0, result.stderr
    assert "step 6" in result.stdout


@pytest.mark.long
def test_eval_writes_figures_and_the_ratio_of_sizes_from_a_table(tmp_path):
    losses = {"diff": 0.7, "transformer": 1.0}  # Share of the Transformer's size that reaches an equal loss.
    points = [
        {"architecture": name, "size": size, "tokens": 1e10, "loss": 2 + (size / share / 1e9) ** -0.3}
        for name, share in losses.items()
        for size in (1e9, 2e9, 4e9, 8e9)
    ]
    (tmp_path / "points.json").write_text(json.dumps(points))
    result = run("eval.py", f"--scaling={tmp_path / 'points.json'}", f"--out={tmp_path / 'out'}")
    assert result.returncode == 0, result.stderr
    assert "70.0% (" in result.stdout
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"scaling_size.png", "scaling_size.svg", "scaling.json"}


def test_user_errors_of_eval(trained, tmp_path, monkeypatch, capsys):
    """Run the first case in a new interpreter, and the others in this process, which has imported the slow modules."""
    workdir = trained / "runs" / "diff"
    shutil.copy(workdir / "manifest.json", tmp_path)
    (tmp_path / "config.json").write_text("{")
    cases = [
        ([f"--workdir={workdir}", "--suite=los"], "Did you mean 'loss'"),
        (["--workdir=no/such", "--suite=loss"], "no config.json there"),
        ([f"--workdir={tmp_path}", "--suite=loss"], "line 1 is not JSON"),
        (["--curves=no/such/*", f"--out={tmp_path}"], "no folder with a metrics.jsonl"),
        (["--curves=no/such/*"], "need --out=DIR"),
        ([f"--scaling={workdir}", f"--out={tmp_path}"], "too few points"),
        ([], "--workdir and --suite"),
    ]
    for flags, message in cases:
        if flags == cases[0][0]:
            result = run_new("eval.py", *flags)
            code, error = result.returncode, result.stderr
        else:
            monkeypatch.setattr(sys, "argv", ["eval.py", *flags])
            with pytest.raises(SystemExit) as ended:
                run_command(importlib.import_module("eval").main)
            code, error = ended.value.code, capsys.readouterr().err
        assert code == 2, flags
        assert message in error
        assert "Traceback" not in error


def test_eval_lists_its_suites():
    result = run_new("eval.py", "--list")
    assert result.returncode == 0
    listed = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert listed.keys() == SUITES.keys()


@pytest.mark.parametrize("flags", [[], ["--help"], ["--version"], ["trian"]])
def test_the_overview_of_commands_imports_only_the_standard_library(flags):
    # With -S, Python can import only the standard library and difftx.
    result = run_new("-S", "-m", "difftx", *flags)
    if flags == ["trian"]:
        assert result.returncode == 2
        assert result.stderr == "error: 'trian': no such command. Did you mean 'train'?\n"
    elif flags == ["--version"]:
        assert (result.returncode, result.stdout) == (0, f"difftx {difftx.__version__}\n")
    else:
        listed = dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if line.startswith("  "))
        assert (result.returncode, listed) == (0, COMMANDS)


def test_every_command_has_a_module_that_names_it():
    modules = {path.stem for path in (ROOT / "difftx" / "commands").glob("*.py")}
    others = {"__init__", "checkpoint_actions", "cost", "evaluate", "examination", "flags"}
    assert modules - others == set(COMMANDS)
    for name, result in zip(
        COMMANDS, commands().run_together([["difftx", name, "--help"] for name in COMMANDS]), strict=True
    ):
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(f"usage: difftx {name} ")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["eval.py", "--workdir={folder}", "--suite=los"], "'los': no such suite. Did you mean 'loss'?"),
        (["eval.py", "--workdir={folder}", "--suite=harness"], "lm_eval is not installed: "),
        (
            ["train.py", "--config=quickstart", "--dry_run", "--config.eval.suites=math"],
            "math_verify is not installed: ",
        ),
    ],
)
def test_suites_are_checked_before_slow_imports(command, message, tmp_path):
    code = """
import atexit, runpy, sys
sys.modules |= dict.fromkeys(["lm_eval", "math_verify"])  # As if they could not be imported.
atexit.register(lambda: print({"orbax", "grain", "difftx.training"} & sys.modules.keys()))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    arguments = [argument.format(folder=tmp_path) for argument in command]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "set()\n")
    assert done.stderr.startswith(f"error: {message}")


def test_make_rejects_an_old_python(tmp_path):
    """With only an old python3 in PATH, make prints what to install."""
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "bash", "make", "test", "echo", "rm", "touch"):
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    old = tmp_path / "bin" / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")  # As `sys.exit(sys.version_info < (3, 12))` does in Python 3.11.
    old.chmod(0o755)
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("Makefile", "requirements.txt"):
        shutil.copyfile(ROOT / name, clone / name)
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    for target in ("test", "quickstart"):
        result = subprocess.run(["make", target], cwd=clone, env=environment, capture_output=True, text=True)
        assert result.returncode == 2
        assert "difftx needs Python 3.12 or newer" in result.stderr
        assert not (clone / ".venv").exists()
