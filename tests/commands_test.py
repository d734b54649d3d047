"""train.py, eval.py, `difftx` and make, as a user calls them. Most calls run in forks, some in new interpreters."""

import json
import shutil

import pytest
from conftest import ROOT, TINY
from helpers.command_server import commands, run_new
from helpers.report_runs import tiny, write_run

import difftx
from difftx.__main__ import COMMANDS
from difftx.commands import eval as eval_command
from difftx.commands import report
from difftx.errors import UserError
from difftx.evals import SUITES


def run(*arguments):
    return commands().run(arguments)


def training_in(folder):
    """Return the flags of a tiny training on a text in a folder."""
    fields = TINY | {"data.path": str(folder / "text.txt"), "eval.loss_tokens": "512", "checkpoint.every_steps": "3"}
    return [f"--workdir={folder / 'run'}", *(f"--config.{name}={value}" for name, value in fields.items())]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    result = run("train.py", "--config=configs/quickstart.py:diff", *training_in(folder))
    assert result.returncode == 0, result.stderr
    return folder


def test_each_command_refuses_a_config_that_does_not_fit(tmp_path):
    flags = ["--config=quickstart", "--config.model.num_heads=3"]
    sweep = ["sweep", "--grid", "seed=0", f"--out={tmp_path}"]
    each = [["train", "--print_config"], ["train", "--dry_run"], sweep, ["plan", "--topology=cpu:1"], ["doctor"]]
    for result in commands().run_together([["difftx", *command, *flags] for command in each]):
        assert result.returncode == 2, result.args
        reason = "model.num_heads=3: their 6 sub-heads do not divide d_model=128; use 2"
        assert reason in result.stderr.splitlines()[-1]


def test_a_user_error_exits_with_code_2_and_its_reason():
    cases = [
        (["--workdir=x", "--config.eval.suites=loss,exact_match"], "no data path is a synthetic task"),
        (["--workdir=x", "--config.data.path=no/such/*.txt"], "glob; `difftx prepare --input=hf:NAME` reads a data"),
        (["--workdir=x", "--confg.model.num_heads=3"], "Did you mean --config.model.num_heads?"),
        (["--print_config", "--config.train.global_batch_tokens=1000"], "is not a multiple of data.sequence_length × "),
        (["--print_config", "--config.train.global_batch_tokens=32"], "use 256, or 8192 if 32 is a number of rows"),
        ([], "--workdir=DIR is needed"),
    ]
    started = [["train.py", "--config=configs/quickstart.py", *flags] for flags, _ in cases]
    for result, (_, message) in zip(commands().run_together(started), cases, strict=True):
        assert result.returncode == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr
    assert not (ROOT / "x").exists()


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


def test_eval_writes_the_same_numbers_as_the_training_loop(trained):
    workdir = trained / "run"
    result = run("eval.py", f"--workdir={workdir}", "--suite=loss,sample", "--eval.sample_tokens=8")
    assert result.returncode == 0, result.stderr
    assert "bits_per_byte" in result.stdout
    newest = json.loads((workdir / "evals" / "loss" / "6.json").read_text())
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    in_loop = [row for row in rows if row["split"] == "valid" and row["step"] == 6]
    assert newest["numbers"]["loss"] == in_loop[0]["loss"]  # Both use the same code path, and are equal bit for bit.
    assert "evals/loss/6.json was made with the same settings" in result.stdout


def test_the_report_takes_runs_folders_and_globs(tmp_path, monkeypatch, capsys):
    """tutorials_test.py runs the command itself. Figures are not drawn here, because that takes longest."""
    monkeypatch.setattr("difftx.report.page.page_figure", lambda *_: ("", {}))
    runs, page = tmp_path / "runs", tmp_path / "page" / "report.html"
    for name in ("diff", "transformer"):
        write_run(runs / name, tiny(name, train__steps=3))
    assert report.main([f"--workdir={runs}/diff"]) == 0
    headline, *_, path = capsys.readouterr().out.splitlines()
    assert headline.startswith("diff reaches a validation loss of ")
    assert path == f"{runs}/diff/report.html"
    for named in (f"{runs}/diff,{runs}/transformer", runs, f"{runs}/*"):
        assert report.main([f"--workdir={named}", f"--out={page}"]) == 0
        assert "difftx report: transformer and diff" in page.read_text()
    for wrong, message in (
        (f"{runs}/diff,{runs}/none", "no config.json there"),
        (f"{runs}/none*", "no config.json there"),
        (f"{runs}/diff,{runs}", "a run is named twice"),
        ("hdfs://x", "hdfs://x"),
    ):
        with pytest.raises(UserError, match=message):
            report.main([f"--workdir={wrong}"])


def test_difftx_train_equals_train_py():
    flags = ["--print_config", "--config.train.steps=777"]
    commands_of_both = [
        ["train.py", "--config=configs/quickstart.py:diff", *flags],
        ["difftx", "train", "--config=quickstart:diff", *flags],
    ]
    by_file, by_name = commands().run_together(commands_of_both)
    assert (by_name.returncode, by_name.stdout) == (0, by_file.stdout)
    assert json.loads(by_name.stdout)["train"]["steps"] == 777


def test_user_errors_of_eval(tmp_path):
    workdir = write_run(tmp_path / "run", tiny("diff", train__steps=3))
    (tmp_path / "broken").mkdir()
    shutil.copy(workdir / "manifest.json", tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{")
    for flags, message in (
        (["--workdir=no/such", "--suite=loss"], "no config.json there"),
        ([f"--workdir={tmp_path}/broken", "--suite=loss"], "line 1 is not JSON"),
        (["--curves=no/such/*", f"--out={tmp_path}"], "no folder with a metrics.jsonl"),
        (["--curves=no/such/*"], "need --out=DIR"),
        ([f"--scaling={workdir}", f"--out={tmp_path}"], "too few points"),
        ([], "--workdir=RUN --suite=loss"),
    ):
        with pytest.raises(UserError, match=message):
            eval_command.main(flags)


def test_eval_lists_its_suites():
    result = run("eval.py", "--list")
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


def test_suites_are_checked_before_slow_imports(tmp_path):
    """Run the commands in one new interpreter, as if two packages could not be imported."""
    code = """
import runpy, sys
sys.modules |= dict.fromkeys(["lm_eval", "math_verify"])
for command in sys.argv[1:]:
    sys.argv = command.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        print(ended.code)
print({"orbax", "grain", "difftx.training"} & sys.modules.keys())
"""
    commands = [f"eval.py --workdir={tmp_path} --suite=los", f"eval.py --workdir={tmp_path} --suite=harness"]
    commands.append("train.py --config=quickstart --dry_run --config.eval.suites=math")
    done = run_new("-c", code, *commands)
    assert done.stdout.split() == ["2", "2", "2", "set()"]
    reasons = ("'los': no such suite. Did you mean 'loss'?", "lm_eval is not installed: ", "math_verify is not install")
    for line, reason in zip(done.stderr.splitlines(), reasons, strict=True):
        assert line.startswith(f"error: {reason}")
