"""Results name their weights, also in runs that change. train.py, eval.py, generate and convert run as processes."""

import json
import shutil

import pytest
from conftest import TINY
from helpers.command_server import commands

pytestmark = pytest.mark.long
CHANGED = ("--config.model.rope_theta=100.0", "--config.model.norm_eps=0.01", "--allow_config_change")


def run(*arguments, code=0):
    result = commands().run(arguments)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout if code == 0 else result.stderr


def train(text_file, workdir, steps, *flags):
    fields = TINY | {
        "data.path": str(text_file),
        "train.steps": str(steps),
        "optimizer.warmup_steps": "1",
        "optimizer.learning_rate": "0.01",
        "checkpoint.every_steps": "10",
        "checkpoint.keep": "9",
        "eval.every_steps": "10",
        "eval.loss_tokens": "512",
        "logging.trackers": "",
    }
    changes = [f"--config.{name}={value}" for name, value in fields.items()]
    return run("train.py", "--config=configs/quickstart.py:diff", f"--workdir={workdir}", *changes, *flags)


def evaluate(workdir, step, *flags):
    """Evaluate a step and return the printed text."""
    return run("eval.py", f"--workdir={workdir}", "--suite=loss", f"--step={step}", *flags)


def result_of(workdir, step):
    return json.loads((workdir / "evals" / "loss" / f"{step}.json").read_text())


def manifest_of(workdir, step):
    return json.loads((workdir / "checkpoints" / str(step) / "manifest.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the file of training text and the directory of a run of 20 steps."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i}: the square of {i} is {i * i}, its cube {i**3}.\n" for i in range(4000)))
    train(text, folder / "run", 20)
    return text, folder / "run"


@pytest.fixture
def workdir(trained, tmp_path):
    return shutil.copytree(trained[1], tmp_path / "run")


def test_an_old_step_is_read_by_its_own_config(trained, workdir, tmp_path):
    """Continue a run with another model. Results, generated text and converted weights of old steps do not change."""
    text, _ = trained
    in_training = {10: result_of(workdir, 10)["numbers"]}
    prompt = [f"--workdir={workdir}", "--step=10", "--prompt=line", "--new_tokens=25", "--temperature=1", "--seed=1"]
    convert = ["convert", "--from=difftx", "--to=hf", f"--input={workdir}", "--step=10"]
    continuation = run("difftx", "generate", *prompt)
    run("difftx", *convert, f"--out={tmp_path / 'before'}")

    train(text, workdir, 40, *CHANGED)
    assert json.loads((workdir / "config.json").read_text())["model"]["rope_theta"] == 100.0
    in_training |= {step: result_of(workdir, step)["numbers"] for step in (20, 30, 40)}
    evaluate(workdir, 10, "--again")
    assert result_of(workdir, 10)["numbers"] == in_training[10]
    assert run("difftx", "generate", *prompt) == continuation
    run("difftx", *convert, f"--out={tmp_path / 'after'}")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()

    # Evaluate steps of two configs in one command. The numbers equal those that the training loop computed.
    shutil.rmtree(workdir / "evals")
    evaluate(workdir, "all")
    assert {step: result_of(workdir, step)["numbers"] for step in in_training} == in_training
    for step in in_training:
        manifest, result = manifest_of(workdir, step), result_of(workdir, step)
        assert (result["weights"], result["checkpoint"]) == (manifest["weights"], manifest["sha256"])

    # The config matters: the same weights have another loss in the later model.
    shutil.copytree(workdir / "checkpoints" / "10", tmp_path / "weights")
    flags = [
        f"--config.checkpoint.init_from={tmp_path / 'weights'}",
        "--config.optimizer.learning_rate=1e-30",
        *CHANGED,
    ]
    train(text, tmp_path / "later", 2, *flags)
    assert abs(result_of(tmp_path / "later", 2)["numbers"]["loss"] - in_training[10]["loss"]) > 1e-3


def test_a_step_that_was_trained_again_is_evaluated_again(trained, workdir):
    text, _ = trained
    path, first = workdir / "evals" / "loss" / "20.json", result_of(workdir, 20)
    assert first["weights"] == manifest_of(workdir, 20)["weights"]
    assert first["checkpoint"] is None
    assert "skipped" in evaluate(workdir, 20)
    shutil.rmtree(workdir / "checkpoints" / "20")
    train(text, workdir, 20, "--config.optimizer.learning_rate=0.1", "--allow_config_change")
    second = result_of(workdir, 20)
    assert second["weights"] == manifest_of(workdir, 20)["weights"] != first["weights"]
    assert second["settings"] == first["settings"]
    path.write_text(json.dumps(first))  # As written by an evaluation that began before the training.

    page = workdir / "report.html"
    run("difftx", "report", f"--workdir={workdir}")
    assert "evals/loss/20.json is left out: its weights are not those of checkpoints/20" in page.read_text()
    printed = evaluate(workdir, 20)
    assert "skipped" not in printed
    assert result_of(workdir, 20)["numbers"] == second["numbers"] != first["numbers"]
    assert result_of(workdir, 20)["checkpoint"] == manifest_of(workdir, 20)["sha256"]
    assert "skipped" in evaluate(workdir, 20)
    run("difftx", "report", f"--workdir={workdir}")
    assert "is left out" not in page.read_text()


def test_average_has_its_own_results(trained, tmp_path):
    """eval.py, generate and convert can read the average."""
    text, without = trained
    workdir, ema = tmp_path / "run", "--weights=ema"
    train(text, workdir, 20, "--config.train.ema_decay=0.95")
    raw, path = result_of(workdir, 20), workdir / "evals" / "loss" / "20.ema.json"
    assert "skipped" not in evaluate(workdir, 20, ema)
    averaged, manifest = json.loads(path.read_text()), manifest_of(workdir, 20)
    assert result_of(workdir, 20) == raw
    assert (raw["weights"], averaged["weights"]) == (manifest["weights"], f"{manifest['weights']}/ema")
    assert averaged["checkpoint"] == manifest["sha256"]
    assert averaged["numbers"]["loss"] != raw["numbers"]["loss"]
    assert "skipped" in evaluate(workdir, 20, ema)
    path.rename(workdir / "evals" / "loss" / "20.json")  # As if it were the parameters' result.
    run("difftx", "report", f"--workdir={workdir}")
    assert "evals/loss/20.json is left out" in (workdir / "report.html").read_text()
    assert "skipped" not in evaluate(workdir, 20)

    prompt = ["difftx", "generate", f"--workdir={workdir}", "--prompt=line", "--new_tokens=28", "--temperature=1"]
    assert run(*prompt) != run(*prompt, ema)
    convert = ["difftx", "convert", "--from=difftx", "--to=hf", f"--input={workdir}", f"--out={tmp_path / 'hf'}"]
    assert "ema of step 20" in run(*convert, ema)

    message = f"--weights=ema: {without / 'checkpoints' / '20'} has no such weights"
    for reader in (
        ["eval.py", f"--workdir={without}", "--suite=loss"],
        [*prompt[:2], f"--workdir={without}", prompt[3]],
    ):
        assert message in run(*reader, ema, code=2)
