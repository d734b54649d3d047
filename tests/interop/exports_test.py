"""train.py with `checkpoint.export_every_steps`."""

import jax
import numpy as np
import pytest
from conftest import TINY
from helpers.command_server import commands
from helpers.interop_folders import export, import_, parameters, tensors_of

from difftx.data.sources import load_sources
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.interop import exports
from difftx.training import loop
from difftx.training.run import Run

STEPS = {"train.steps": "8", "checkpoint.every_steps": "2", "checkpoint.export_every_steps": "4"}


def train(text_file, workdir, **changes):
    fields = TINY | STEPS | {"data.path": str(text_file), "logging.every_steps": "1", "logging.tensorboard": "false"}
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


def test_an_export_that_a_killed_process_has_not_finished_is_made_at_the_next_start(
    config, text_file, tmp_path, mesh_of, monkeypatch
):
    c = config(
        data__path=text_file,
        train__steps=4,
        optimizer__warmup_steps=0,
        checkpoint__every_steps=2,
        checkpoint__export_every_steps=2,
        eval__suites="",
        logging__tensorboard="false",
    )
    tokenizer = load_tokenizer(c.data.tokenizer)
    write_export, written, killed = exports.write_export, [], set()

    def write_or_end(checkpoint, *args):
        step = str(checkpoint.manifest.step)
        if step not in killed:
            killed.add(step)
            raise Killed
        written.append(step)
        return write_export(checkpoint, *args)

    def start():
        run = Run(c, tmp_path / "run", mesh_of(), tokenizer, load_sources(c.data, tokenizer))
        return loop.train(run, lambda *_: {}, exports)

    monkeypatch.setattr(exports, "write_export", write_or_end)
    for _ in range(2):  # The second start exports step 2, and ends in the export of the last step.
        with pytest.raises(Killed):
            start()
    assert written == ["2"]
    assert start() == 0  # The run already has its last step.
    assert start() == 0  # Nothing is missing.
    assert written == ["2", "4"]
    record = tmp_path / "run" / "exports" / "4" / exports.RECORD
    of_checkpoint = record.read_text()
    record.write_text('{"weights": "discarded/4"}')  # As after a rewind that a killed process trained again.
    assert start() == 0
    assert written == ["2", "4", "4"]
    assert record.read_text() == of_checkpoint
    for step in written:
        assert f"step {step} of 4" in (tmp_path / "run" / "exports" / step / "README.md").read_text()


def test_mistakes_are_found_before_training(text_file, tmp_path, config):
    result = train(text_file, tmp_path / "run", model__window="8")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "model.window=8 cannot be converted: a DifftxForCausalLM would have None" in result.stderr
    with pytest.raises(UserError, match=r"export_every_steps=3 must be a multiple of checkpoint\.every_steps=2"):
        config(checkpoint__every_steps=2, checkpoint__export_every_steps=3)
