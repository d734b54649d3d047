"""Stages after pre-training: longer rows with a larger rotary base, and fine-tuning on prompts and responses.

The tests run configs/diff_3b.py, configs/long_context.py and configs/math.py with toy sizes in processes.
"""

import json
import shutil
import signal

import jax
import numpy as np
import pytest
from conftest import TINY, child_environment
from helpers.command_server import commands
from helpers.evals_params import one_device
from helpers.training_runs import stop_after, train_losses

from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.restoring import restore_state
from difftx.training.run import read_config
from difftx.training.state import init_state

pytestmark = pytest.mark.long

TOY = TINY | {
    "model.vocab_size": "264",
    "model.compute_dtype": "float32",
    "data.tokenizer": "bytes",
    "checkpoint.every_steps": "10",
    "eval.every_steps": "1000",
    "eval.loss_tokens": "2048",
    "logging.every_steps": "1",
    "logging.trackers": "",
}


def command(config, workdir, **changes):
    fields = TOY | {name.replace("__", "."): str(value) for name, value in changes.items()}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["train.py", f"--config=configs/{config}", f"--workdir={workdir}", *flags]


def run_process(command):
    result = commands().run(command, environment=child_environment(1), timeout=600)
    assert result.returncode == 0, result.stderr
    return result


# ── Interruption of either stage ──

STEPS = 60
EXTENDED = {
    "train__steps": STEPS,
    "data__sequence_length": 64,
    "data__upsampling__longer_than_tokens": 32,
    "model__rope_theta": 640_000,
}
TUNED = {"train__steps": STEPS, "model__rope_theta": 640_000}  # configs/math.py sets packing and document masks.


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a folder with texts of many lengths, a store of prompts and responses, and a pre-trained run."""
    folder, rng = tmp_path_factory.mktemp("sources"), np.random.default_rng(0)
    (folder / "texts").mkdir()
    for i in range(200):
        (folder / "texts" / f"{i:03}.txt").write_text(f"{i} squared is {i * i}. " * int(rng.integers(1, 12)))
    pairs = [{"problem": f"{i:03d} reversed is ", "solution": f"{i:03d}"[::-1] + ".\n"} for i in range(1000)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    flags = ["--prompt_field=problem", "--text_field=solution", "--tokenizer=bytes", "--valid_fraction=0.1"]
    prepare = ["difftx", "prepare", f"--input={folder / 'pairs.jsonl'}", f"--out={folder / 'pairs'}", *flags]
    run_process(prepare)
    run_process(command("diff_3b.py:diff", folder / "base", data__path=folder / "texts" / "*.txt"))
    return folder


@pytest.mark.parametrize(
    ("config", "data", "changes"),
    [
        ("long_context.py:diff", "texts/*.txt", EXTENDED),
        pytest.param("math.py:diff-stage2", "pairs", TUNED, marks=pytest.mark.exhaustive),
    ],
    ids=["extension", "fine-tuning"],
)
def test_interrupted_stage_resumes_bit_for_bit(sources, tmp_path, config, data, changes):
    """Kill the run, and then stop it by a signal. After the kill, it resumes without the weights it started from."""
    base, full_run, workdir = tmp_path / "base", tmp_path / "full_run", tmp_path / "stopped"
    shutil.copytree(sources / "base", base)
    shared = {"data__path": sources / data, "data__cache_path": tmp_path / "cache", "checkpoint__init_from": base}
    result = run_process(command(config, full_run, **changes, **shared))
    assert f"parameters from {base / 'checkpoints' / '6'}" in result.stdout

    again = command(config, workdir, **changes, **shared)
    # A save waits for the previous one, so the checkpoint of step 10 is complete after step 25.
    assert stop_after(25, signal.SIGKILL, again, workdir) == -signal.SIGKILL
    shutil.rmtree(base)
    assert 10 <= newest(workdir) < 40
    assert stop_after(45, signal.SIGTERM, again, workdir) == 75
    saved = newest(workdir)
    assert 45 <= saved < STEPS
    result = run_process(again)
    assert f"attempt 3, from step {saved}" in result.stdout
    assert "parameters from" not in result.stdout

    assert train_losses(workdir)[0] == train_losses(full_run)[0]
    assert len(train_losses(full_run)[0]) == STEPS
    stopped, uninterrupted = (final_state(folder) for folder in (workdir, full_run))
    jax.tree.map(np.testing.assert_array_equal, stopped, uninterrupted)


def newest(workdir):
    return max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def final_state(workdir):
    config = read_config(workdir)
    mesh = one_device()
    with jax.set_mesh(mesh):
        return restore_state(Checkpoints(workdir).read(STEPS), jax.eval_shape(lambda: init_state(config)), mesh)
