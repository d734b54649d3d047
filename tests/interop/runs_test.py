"""An imported model is a run: eval.py, generate and init_from accept it like a trained run."""

import json

import pytest
from conftest import TINY
from helpers.command_server import commands
from helpers.interop_folders import FIXTURES

SIZES = {
    "model.d_model": "32",
    "model.num_layers": "3",
    "model.num_heads": "4",
    "model.mlp_dim": "48",
    "model.vocab_size": "260",
    "model.head_norm": "rms",
}


def run(*arguments, code=0):
    result = commands().run(arguments)
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    error = run("difftx", "convert", "--from=hf", "--to=difftx", f"--input={tmp_path}", "--out=x", code=2)
    assert error == "error: --to=difftx requires --config=FILE.py, the config of the new run (docs/config.md)\n"


@pytest.mark.long
def test_imported_run_supports_eval_generate_and_init_from(text_file, tmp_path):
    workdir = tmp_path / "imported"
    base = {n: v for n, v in TINY.items() if not n.startswith("model.")}
    base |= {"data.path": str(text_file), "eval.loss_tokens": "512", "logging.tensorboard": "false"}
    flags = ["--config=configs/quickstart.py:diff", *(f"--config.{name}={value}" for name, value in base.items())]
    where = ["--from=hf", "--to=difftx", f"--input={FIXTURES / 'diff'}", f"--out={workdir}"]
    assert "a run of step 0, diff: 3 layers, 4 differential heads" in run("difftx", "convert", *where, *flags)

    run("eval.py", f"--workdir={workdir}", "--suite=loss")
    numbers = json.loads((workdir / "evals" / "loss" / "0.json").read_text())["numbers"]
    assert 5 < numbers["loss"] < 9  # Random weights.
    text = run("difftx", "generate", f"--workdir={workdir}", "--prompt=line", "--new_tokens=5")
    assert text.startswith("line")
    assert "0: every checksum is right" in run("difftx", "checkpoint", "verify", f"--workdir={workdir}")

    sizes = [f"--config.{name}={value}" for name, value in SIZES.items()]
    init = f"--config.checkpoint.init_from={workdir}"
    said = run("train.py", *flags, *sizes, f"--workdir={tmp_path / 'trained'}", init)
    assert f"parameters from {workdir}/checkpoints/0" in said
    error = run("train.py", *flags, *sizes, f"--workdir={workdir}", code=2)
    assert "has weights alone, from difftx convert; use a new --workdir with --config.checkpoint.init_from=" in error
