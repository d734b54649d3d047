"""Real training processes that are stopped, started again or rejected."""

import json
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT, TINY, child_environment
from helpers.command_server import commands
from helpers.evals_params import one_device
from helpers.training_runs import stop_after, train_losses, wait_for_step

from difftx.parallel.multihost import REPEAT_SECONDS
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import read_manifest, steps_in, why_invalid
from difftx.training.checkpoint.restoring import restore_state
from difftx.training.goodput import SECTIONS
from difftx.training.metrics import read_metrics
from difftx.training.run import read_config
from difftx.training.state import init_state

STEPS = 60
KEYS = {name: f"the value of {name}" for name in ("WANDB_API_KEY", "OPENAI_API_KEY", "HF_TOKEN")}


def command(text_file, workdir, **changes):
    overrides = TINY | {
        "data.path": str(text_file),
        "train.steps": str(STEPS),
        "checkpoint.every_steps": "20",
        "eval.every_steps": "25",
        "eval.loss_tokens": "512",
        "logging.trackers": "",
        "mesh.fsdp": "-1",
    }
    overrides |= {name.replace("__", "."): str(value) for name, value in changes.items()}
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    return ["train.py", "--config=configs/quickstart.py", f"--workdir={workdir}", *flags]


def train(text_file, workdir, *flags, devices=1, **changes):
    return commands().run(
        [*command(text_file, workdir, **changes), *flags], environment=child_environment(devices) | KEYS
    )


def stop_at(step, text_file, workdir, devices=1):
    """Train until `step` is in metrics.jsonl, then send SIGTERM; return the exit code."""
    return stop_after(step, signal.SIGTERM, command(text_file, workdir), workdir, devices)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    text = folder / "text.txt"
    rng = np.random.default_rng(0)
    words = ["attention", "noise", "signal", "head", "key", "value", "query", "map", "lambda"]
    text.write_text("".join(" ".join(rng.choice(words, 12)) + ".\n" for _ in range(4000)))
    result = train(text, folder / "run")
    assert result.returncode == 0, result.stderr
    (folder / "run" / "train.log").write_text(result.stdout + result.stderr)
    return text, folder / "run"


def test_stopped_run_resumes_bit_for_bit(uninterrupted, tmp_path):
    text, full_run = uninterrupted
    workdir = tmp_path / "stopped"
    assert stop_at(30, text, workdir) == 75
    saved = max(int(p.name) for p in (workdir / "checkpoints").iterdir())
    assert 30 <= saved < STEPS
    result = train(text, workdir)
    assert result.returncode == 0, result.stderr
    assert f"attempt 2, from step {saved}" in result.stdout
    losses, rows = train_losses(workdir)
    expected, _ = train_losses(full_run)
    assert losses == expected
    assert len(losses) == STEPS
    attempts = [row["attempt"] for row in rows if row["split"] == "train"]
    assert attempts == [1] * saved + [2] * (STEPS - saved)
    last = rows[-1]
    assert (last["split"], last["step"]) == ("goodput", STEPS)
    assert sum(last[f"{name}_seconds"] for name in SECTIONS) == pytest.approx(last["wall_seconds"], rel=0.01)
    assert last["lost_work_seconds"] == 0.0
    valid = [[r["loss"] for r in train_losses(w)[1] if r["split"] == "valid"] for w in (workdir, full_run)]
    assert valid[0] == valid[1]
    assert len(valid[0]) == 3


def train_rows(workdir):
    return [row for row in read_metrics(workdir / "metrics.jsonl") if row["split"] == "train"]


@pytest.mark.long
def test_a_killed_run_loses_less_than_the_period_of_its_rolling_checkpoints(uninterrupted, tmp_path):
    text, full_run = uninterrupted
    workdir, seconds = tmp_path / "killed", 2.0
    options = {"checkpoint__every_steps": 1000, "checkpoint__every_minutes": seconds / 60}
    # A step takes 50 ms at least, so there has been more than one period.
    assert stop_after(50, signal.SIGKILL, command(text, workdir, **options), workdir) == -signal.SIGKILL
    folders = [workdir / "checkpoints" / str(step) for step in steps_in(workdir / "checkpoints")]
    saved = [read_manifest(folder) for folder in folders if why_invalid(folder, content=True) is None]
    assert all("rolling" in checkpoint.loader for checkpoint in saved)
    assert 1 <= len(saved) <= len(folders) <= 2  # Two during a save.
    newest = max(checkpoint.step for checkpoint in saved)
    assert sum(row["step_seconds"] for row in train_rows(workdir) if row["step"] > newest) < seconds
    result = train(text, workdir, checkpoint__every_minutes=0.01)
    assert result.returncode == 0, result.stderr
    assert train_losses(workdir)[0] == train_losses(full_run)[0]
    jax.tree.map(np.testing.assert_array_equal, final_state(workdir), final_state(full_run))


@pytest.mark.long
def test_a_run_without_its_checkpoints_keeps_its_metrics(uninterrupted, tmp_path):
    text, full_run = uninterrupted
    workdir = tmp_path / "lost"
    shutil.copytree(full_run, workdir)
    (workdir / "checkpoints").rename(tmp_path / "elsewhere")

    def contents():
        return {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file() and path.name != ".lock"}

    before = contents()
    result = train(text, workdir)
    assert result.returncode == 2
    assert "there is no checkpoint, but" in result.stderr
    assert contents() == before
    # Each fix that the error message proposes.
    (tmp_path / "elsewhere").rename(workdir / "checkpoints")
    assert f"attempt 2, from step {STEPS}" in train(text, workdir).stdout
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "manifest.json").unlink()
    assert "from step 0" in train(text, workdir, train__steps=1, optimizer__warmup_steps=0).stdout


@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_starts_again(uninterrupted, tmp_path):
    text, full_run = uninterrupted
    killed = command(text, tmp_path / "killed", checkpoint__every_steps=STEPS + 1)
    assert stop_after(10, signal.SIGKILL, killed, tmp_path / "killed") == -signal.SIGKILL
    result = train(text, tmp_path / "killed")
    assert "attempt 2, from step 0" in result.stdout, result.stderr
    assert train_losses(tmp_path / "killed")[0] == train_losses(full_run)[0]


def test_a_finished_run_stays_finished(uninterrupted):
    text, full_run = uninterrupted
    before = train_losses(full_run)[0]
    result = train(text, full_run)
    assert result.returncode == 0
    assert train_losses(full_run)[0] == before


def test_files_of_a_run_do_not_contain_keys_of_the_environment(uninterrupted):
    files = [path for path in uninterrupted[1].rglob("*") if path.is_file()]
    assert len(files) > 15
    assert not [path for path in files for key in KEYS.values() if key.encode() in path.read_bytes()]


def test_run_directory_describes_the_run(uninterrupted):
    _, workdir = uninterrupted
    assert json.loads((workdir / "config.json").read_text())["train"]["steps"] == STEPS
    manifest = json.loads((workdir / "manifest.json").read_text())
    described = {"format", "run_id", "command", "commit", "python", "packages", "devices", "data", "extensions"}
    assert set(manifest) == described | {"source_sha256", "attention_kernel", "kernels", "has_saved"}
    assert (manifest["attention_kernel"], manifest["kernels"]) == ("xla", {})  # On a CPU, nothing is measured.
    assert len(manifest["data"]["source train"]) == 64
    row = next(row for row in train_losses(workdir)[1] if row["split"] == "train")
    wanted = {
        "split",
        "step",
        "attempt",
        "loss",
        "grad_norm",
        "learning_rate",
        "skipped",
        "tokens",
        "tokens_per_second",
    }
    assert wanted | {"step_seconds", "data_wait_seconds", "lambda"} == set(row)
    assert row["tokens"] == 256
    assert len(row["lambda"]) == 2


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        ((), {"model__mlp_dim": 96}, "changed since the checkpoint of step 60: model.mlp_dim: 64 → 96; restore"),
        pytest.param(
            ["--allow_config_change"],
            {"model__mlp_dim": 96},
            "mlp/down_FD is not (2, 96, 32) float32 there",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_checkpoint_of_another_config_is_refused(uninterrupted, tmp_path, flags, changes, message):
    text, full_run = uninterrupted
    shutil.copytree(full_run, tmp_path / "run")
    result = train(text, tmp_path / "run", *flags, train__steps=90, **changes)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "changed since the checkpoint: train.steps: 60 → 90 (allowed; the learning rate may jump" in result.stdout
    assert ("(not safe)" in result.stdout) == bool(flags)  # Without the flag, the error lists it.
    assert (tmp_path / "run" / "config.json").read_text() == (full_run / "config.json").read_text()


@pytest.mark.long
def test_fewer_steps_than_the_newest_checkpoint_has_are_refused(uninterrupted, tmp_path):
    """Otherwise the command would end with 75, and a sweep or Slurm would repeat it without end."""
    text, full_run = uninterrupted
    shutil.copytree(full_run, tmp_path / "run")
    before = contents(tmp_path / "run")
    result = train(text, tmp_path / "run", train__steps=40)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert (
        "train.steps=40 is less than the step of the run's newest checkpoint, 60; set train.steps to at least" in line
    )
    assert contents(tmp_path / "run") == before


def rows_after(step, workdir):
    """Return the train rows after `step`, without the fields that differ between any two runs."""
    rows = list(read_metrics(workdir / "metrics.jsonl"))
    kept = ("step", "loss", "grad_norm", "learning_rate", "lambda", "tokens")
    return [{k: row[k] for k in kept} for row in rows if row["split"] == "train" and row["step"] > step]


def final_state(workdir):
    config, mesh = read_config(workdir), one_device()
    with jax.set_mesh(mesh):
        return restore_state(Checkpoints(workdir).read(STEPS), jax.eval_shape(lambda: init_state(config)), mesh)


@pytest.mark.long
@pytest.mark.parametrize("of", ["checkpoint", "run"])
def test_a_branch_continues_as_its_source_and_resumes_without_it_bit_for_bit(uninterrupted, tmp_path, of):
    text, full_run = uninterrupted
    source, workdir = tmp_path / "source", tmp_path / "branch"
    shutil.copytree(full_run, source)
    shutil.rmtree(source / "checkpoints" / "60")
    path = source if of == "run" else source / "checkpoints" / "40"
    result = train(text, workdir, checkpoint__branch_from=path)
    assert result.returncode == 0, result.stderr
    assert f"branch of {source / 'checkpoints' / '40'}" in result.stdout
    assert "attempt 1, from step 40 to 60" in result.stdout
    assert rows_after(0, workdir) == rows_after(40, full_run)
    jax.tree.map(np.testing.assert_array_equal, final_state(workdir), final_state(full_run))
    shutil.rmtree(source)
    shutil.rmtree(workdir / "checkpoints" / "60")
    result = train(text, workdir, checkpoint__branch_from=path)
    assert "attempt 2, from step 40 to 60" in result.stdout, result.stderr
    assert rows_after(0, workdir) == rows_after(40, full_run)


@pytest.mark.long
def test_a_branch_may_have_another_schedule(uninterrupted, tmp_path):
    text, full_run = uninterrupted
    changes = {"optimizer__schedule": "wsd", "optimizer__decay_steps": 10, "optimizer__decay_shape": "linear"}
    source = full_run / "checkpoints" / "40"
    result = train(text, tmp_path / "branch", checkpoint__branch_from=source, train__steps=55, **changes)
    assert result.returncode == 0, result.stderr
    assert "changed since the checkpoint: optimizer.schedule: linear → wsd (safe)" in result.stdout
    rows = rows_after(0, tmp_path / "branch")
    assert [row["step"] for row in rows] == list(range(41, 56))
    # Quickstart's peak is 4e-3. The last update has a tenth of it, and the next one would have 0.
    expected = [4e-3 * min(1, (56 - row["step"]) / 10) for row in rows]
    assert [row["learning_rate"] for row in rows] == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data__seed": 5, "optimizer__b1": 0.8},
            "optimizer.b1: 0.9 → 0.8, data.seed: 0 → 5; restore what changed, or",
        ),
        ({"train__steps": 40}, "is of step 40, and train.steps=40 counts the steps from the start of that run"),
        ({"checkpoint__init_from": "x"}, "are both set; set only one of them"),
    ],
)
def test_branch_with_an_incompatible_config_is_rejected(uninterrupted, tmp_path, changes, message):
    text, full_run = uninterrupted
    source = full_run / "checkpoints" / "40"
    result = train(text, tmp_path / "branch", **{"checkpoint__branch_from": source} | changes)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert not (tmp_path / "branch" / "config.json").exists()


STUCK = """
import runpy, sys, threading
from difftx.training.checkpoint.protocol import Save

commit = Save._commit

def only_of_step_20(self, manifest):  # Any later save never comes to the manifest that makes it a checkpoint.
    if self._folder.name != "20":
        print("saving", flush=True)
        threading.Event().wait()
    commit(self, manifest)

Save._commit = only_of_step_20
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start_script(script, *arguments):
    """Start a Python script with one device, whose output the test reads."""
    words = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(words, cwd=ROOT, env=child_environment(1), stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_second_signal_ends_a_save_and_harms_no_checkpoint(uninterrupted, tmp_path):
    text, full_run = uninterrupted
    workdir = tmp_path / "stopped"
    process = start_script(STUCK, *command(text, workdir))
    wait_for_step(30, process, workdir)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert any(line == "saving\n" for line in process.stdout)
    before = contents(workdir / "checkpoints" / "20")
    while time.monotonic() - asked < 1.5 * REPEAT_SECONDS:  # An earlier signal would count as the same request.
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == -signal.SIGTERM
    process.stdout.close()
    assert steps_in(workdir / "checkpoints") == [20]
    assert contents(workdir / "checkpoints" / "20") == before
    result = train(text, workdir)
    assert "attempt 2, from step 20" in result.stdout, result.stderr
    assert train_losses(workdir)[0] == train_losses(full_run)[0]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_weights_and_stages_of_a_mixture_that_change_on_resume(tmp_path):
    """8 blocks of 256 rows have 1536 and 512 rows of the sources at 3:1, and 1024 of each at 1:1."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i} is {i * i}.\n" for i in range(4000)))

    def resume(steps, weights, stages, *flags):
        named = zip("ab", weights, strict=True)
        sources = tuple({"name": name, "path": str(tmp_path / f"{name}.txt"), "weight": w} for name, w in named)
        changes = {"train__global_batch_tokens": 8192, "train__steps": steps, "optimizer__schedule": "constant"}
        changes |= {"data__sources": sources, "data__stages": stages}
        return train(None, tmp_path / "run", *flags, **changes)

    first = resume(6, (3.0, 1.0), ())
    assert first.returncode == 0, first.stderr
    later = ({"from_tokens": 70_000, "weights": (0.5, 0.5)},)  # After 8 steps, which have 65,536 tokens.
    appended = resume(8, (3.0, 1.0), later)
    assert (appended.returncode, "data.stages" in appended.stdout, "not safe" in appended.stdout) == (0, True, False)
    assert resume(10, (1.0, 1.0), later).returncode == 2
    allowed = resume(10, (1.0, 1.0), later, "--allow_config_change")
    assert allowed.returncode == 0, allowed.stderr
