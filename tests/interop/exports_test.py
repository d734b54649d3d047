"""train.py with `checkpoint.export_every_steps`."""

import shutil

import jax
import numpy as np
import pytest
from conftest import TINY
from helpers.command_server import commands
from helpers.interop_folders import export, import_, parameters, tensors_of
from helpers.report_runs import save_run

from difftx.errors import UserError
from difftx.interop import exports

STEPS = {"train.steps": "8", "checkpoint.every_steps": "2", "checkpoint.export_every_steps": "4"}


def train(text_file, workdir, **changes):
    fields = TINY | STEPS | {"data.path": str(text_file), "logging.every_steps": "1", "logging.trackers": ""}
    fields |= {name.replace("__", "."): value for name, value in changes.items()}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    return commands().run(["train.py", "--config=configs/quickstart.py:diff", f"--workdir={workdir}", *flags])


@pytest.mark.long
def test_exports_are_the_checkpoints_of_their_steps(text_file, tmp_path, mesh_of):
    workdir = tmp_path / "run"
    result = train(text_file, workdir, checkpoint__keep="9")
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (workdir / "exports").iterdir()) == ["4", "8"]
    for step in (4, 8):
        by_command = export(workdir, tmp_path / f"{step}", f"--step={step}")
        now, expected = tensors_of(workdir / "exports" / str(step)), tensors_of(by_command)
        assert now.keys() == expected.keys()
        assert all(np.array_equal(now[name], expected[name]) for name in now)
        card = (workdir / "exports" / str(step) / "README.md").read_text()
        assert f"step {step} of 8" in card
        assert "| training loss | " in card
    # A process that is killed after the save of step 8 leaves no export. The next start makes it.
    shutil.rmtree(workdir / "exports" / "8")
    assert train(text_file, workdir, checkpoint__keep="9").returncode == 0
    back = import_(workdir / "exports" / "8", tmp_path / "back")
    jax.tree.map(np.testing.assert_array_equal, parameters(back, mesh_of())[1], parameters(workdir, mesh_of())[1])


@pytest.mark.long
def test_an_export_that_fails_does_not_end_the_training(text_file, tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "exports").write_text("not a folder")
    result = train(text_file, workdir)
    assert result.returncode == 0, result.stderr
    assert "step 4  not exported: " in result.stdout


class Killed(BaseException):
    """The end of a process, in place of a signal."""


def end(*_):
    raise Killed


def test_an_export_counts_if_it_is_complete_and_has_the_weights_of_its_checkpoint(
    config, text_file, tmp_path, monkeypatch
):
    run = save_run(config(data__path=text_file, mesh__fsdp=8), tmp_path / "run", [2])
    monkeypatch.setattr(exports, "write_export", end)
    with pytest.raises(Killed):
        exports.write(run, 2)
    monkeypatch.undo()
    assert not exports.exists(run, 2)
    folder = run.workdir / "exports" / "2"
    for _ in range(2):
        assert exports.write(run, 2).startswith(f"{folder}: model.safetensors of step 2, diff: 2 layers")
        assert exports.exists(run, 2)
        assert "step 2 of 6" in (folder / "README.md").read_text()
        (folder / exports.RECORD).write_text('{"weights": "discarded/2"}')  # As after a rewind, which is trained again.
        assert not exports.exists(run, 2)


@pytest.mark.long
def test_mistakes_are_found_before_training(text_file, tmp_path):
    result = train(text_file, tmp_path / "run", model__window="8")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "model.window=8 cannot be converted: a DifftxForCausalLM would have None" in result.stderr


def test_an_export_is_one_of_a_checkpoint(config):
    with pytest.raises(UserError, match=r"export_every_steps=3 must be a multiple of checkpoint\.every_steps=2"):
        config(checkpoint__every_steps=2, checkpoint__export_every_steps=3)
