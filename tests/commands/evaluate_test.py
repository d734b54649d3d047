"""Flags --workdir, --suite, --step and --again of eval.py, on real checkpoints."""

import argparse
import dataclasses
import json
import shutil
import sys
import types
from pathlib import Path

import jax
import pytest
from conftest import ROOT, TINY, replace
from helpers.report_runs import save_run, write_result

from difftx.commands.evaluate import chosen_steps, run_suites, show_result
from difftx.commands.flags import Parser
from difftx.config.recipes import load_config
from difftx.errors import UNPRINTABLE, UserError
from difftx.evals import SUITES, loss
from difftx.evals import run as evals
from difftx.evals.result import Number
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import read_manifest
from difftx.training.run import Run
from difftx.training.state import init_state

ALONE = argparse.Namespace(distributed=False, coordinator=None, processes=None, process=None)
STEPS = (3, 6, 9, 12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a run with checkpoints, which tests must not change."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    changes = {"data.path": str(folder / "text.txt"), "eval.loss_tokens": "500", "eval.position_documents": "3"}
    config = load_config(f"{ROOT}/configs/quickstart.py:diff", TINY | changes | {"mesh.fsdp": "8"})
    return save_run(config, folder / "run", STEPS)


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved.workdir, tmp_path / "run")
    return dataclasses.replace(saved, workdir=tmp_path / "run")


def evaluate(run, *suites, step=None, again=False, flags=()):
    overrides = Parser("difftx eval", None, "eval", "mesh", "model.attention_implementation").overrides(flags)
    run_suites(Checkpoints(run.workdir), suites, overrides, steps=step, again=again, trusted=False, show=show_result)


def results(run, suite):
    files = sorted((run.workdir / "evals" / suite).glob("*.json"), key=lambda path: int(path.stem))
    return {int(path.stem): json.loads(path.read_text()) for path in files}


def replace_loss(monkeypatch, evaluate):
    """Replace the function that computes the suite loss."""
    monkeypatch.setitem(SUITES._entries, "loss", dataclasses.replace(loss.SUITE, evaluate=evaluate))


@pytest.mark.long
def test_a_range_is_evaluated_once(run, capsys, monkeypatch):
    """Evaluate steps repeatedly, also on another mesh and with another field. Only missing results are computed."""
    passes = []
    replace_loss(monkeypatch, lambda evaluation: passes.append(1) or loss.evaluate(evaluation))
    evaluate(run, "loss", step="6:12:3")
    first = results(run, "loss")
    assert list(first) == [6, 9, 12]
    assert len({result["numbers"]["loss"] for result in first.values()}) == 3
    assert "skipped" not in capsys.readouterr().out
    evaluate(run, "loss", step="all")
    assert len(passes) == 4
    assert capsys.readouterr().out.count("was made with the same settings; --again evaluates the suite again") == 3
    assert results(run, "loss").items() >= first.items()
    flags = ["--mesh.fsdp=4", "--mesh.tensor=2"]
    evaluate(run, "loss", step="6", flags=flags)  # The result is valid for every mesh.
    assert len(passes) == 4
    evaluate(run, "loss", step="6", again=True, flags=flags)
    assert len(passes) == 5
    on_another_mesh = results(run, "loss")[6]["numbers"]["loss"]
    assert on_another_mesh == pytest.approx(first[6]["numbers"]["loss"], rel=1e-6)
    evaluate(run, "loss", step="6", flags=["--eval.loss_tokens=64"])
    assert results(run, "loss")[6]["details"]["sets"]["valid"]["tokens"] == 64
    with jax.set_mesh(run.mesh):  # A result of the training loop has the same settings.
        params = jax.jit(lambda: init_state(run.config).params)()
    weights = read_manifest(run.workdir / "checkpoints" / "3").weights
    evals.evaluate(run, params, 3, ["loss"], weights=weights)
    capsys.readouterr()
    evaluate(run, "loss", step="3")
    assert "skipped" in capsys.readouterr().out


def test_moved_data_is_found_at_the_path_in_config_json(run, tmp_path):
    """Evaluate an old checkpoint whose data has moved. Other data at that path, as of a later stage, is not used."""
    evaluate(run, "loss", step="3")
    before = results(run, "loss")[3]
    text = Path(run.config.data.path)
    (tmp_path / "moved.txt").write_bytes(text.read_bytes())
    text.rename(tmp_path / "gone.txt")
    try:
        moved = dataclasses.replace(run, config=replace(run.config, "data", path=str(tmp_path / "moved.txt")))
        moved.write_files()
        evaluate(run, "loss", step="3", again=True)
        assert results(run, "loss")[3] == before
    finally:
        (tmp_path / "gone.txt").rename(text)
    (tmp_path / "moved.txt").write_text("".join(f"{i} and {i} is {2 * i}.\n" for i in range(8000)))
    evaluate(run, "loss", step="3", again=True)
    assert results(run, "loss")[3] == before


def test_steps_of_other_data_at_the_same_path_are_refused(run, tmp_path):
    """Only step 9 was trained on the present text. All steps have equal configs."""
    text, original = tmp_path / "text.txt", Path(run.config.data.path).read_text()
    config, edited = replace(run.config, "data", path=str(text)), original.replace("squared", "to the power of two")
    for step, content in ((6, original), (9, edited), (12, original)):
        text.write_text(content)
        mixed = save_run(config, tmp_path / "mixed", [step])
    text.write_text(edited)
    message = r"checkpoints/6: the data changed since the training: source train \w+… → \w+…; restore the data, or"
    with pytest.raises(UserError, match=message):
        evaluate(mixed, "loss", step="6")
    evaluate(mixed, "loss", step="9")
    assert list(results(mixed, "loss")) == [9]


def test_charts_are_drawn_next_to_the_result(run, monkeypatch, capsys):
    """After an evaluation in the training loop, there are no charts yet. A second command draws them."""
    folder, drawn = run.workdir / "evals" / "position" / "12", []

    def draw_chart(chart, folder):
        drawn.append((chart["name"], folder))
        return [folder / "file.png"]

    monkeypatch.setitem(sys.modules, "difftx.report.charts", types.SimpleNamespace(draw_chart=draw_chart))
    evaluate(run, "position")
    assert str(folder / "file.png") in capsys.readouterr().out
    evaluate(run, "position")
    assert drawn == [("loss_by_position", folder)] * 2
    folder.mkdir()
    (folder / "file.png").touch()
    evaluate(run, "position")
    assert len(drawn) == 2


def test_generated_text_cannot_control_the_terminal(tmp_path, capsys):
    hostile = "a\tb\nc\x1b]0;t\x07 \x9b31m \u202e [red]"
    samples = [{"prompt": hostile, "completion": hostile}]
    write_result(tmp_path, "sample", 3, {}, details={"samples": samples})
    show_result(types.SimpleNamespace(workdir=tmp_path, files=tmp_path), "sample", 3, "params", fresh=True)
    printed = capsys.readouterr().out
    assert not UNPRINTABLE.search(printed)
    assert printed.count(r"c\x1b]0;t\x07 \x9b31m \u202e [red]") == 2


def test_numbers_are_printed_as_a_table_with_units(tmp_path, capsys):
    """If the suite states the values of guessing, print them too. Wrap names that are wider than the terminal."""
    long = "a_very_long_name_of_a_task_" * 5 + "accuracy"
    numbers = {"loss": Number(2.0654906797921285, "nats per token", "lower", chance=5.575949), long: 0.5}
    write_result(tmp_path, "loss", 3, numbers)
    show_result(types.SimpleNamespace(workdir=tmp_path, files=tmp_path), "loss", 3, "params", fresh=True)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("Validation loss (suite loss): ")
    rows = [line.split() for line in lines]
    assert ["number", "value", "by", "guessing", "unit", "better"] in rows
    assert ["loss", "2.0655", "5.5759", "nats", "per", "token", "lower"] in rows
    assert max(map(len, lines)) <= 120
    assert long in "".join(line.split()[0] for line in lines if "a_" in line or "accuracy" in line)


def test_mistakes_are_rejected_with_a_fix(run, tmp_path):
    for step, message in [
        ("5", "--step=5: no such checkpoint; there are 3, 6, 9, 12"),
        ("13:99", "--step=13:99: no such checkpoint; there are 3, 6, 9, 12"),
        ("6:3", "no such checkpoint"),
    ]:
        with pytest.raises(UserError, match=message):
            evaluate(run, "loss", step=step)
    for flags, message in [
        (["--mesh.fsdp=3"], r"mesh\.fsdp=3.* do not multiply to the 8 devices here.* --mesh\.data=1 --mesh\.fsdp=-1"),
        (["--mesh.fspd=1"], "Did you mean 'fsdp'"),
    ]:
        with pytest.raises(UserError, match=message):
            evaluate(run, "loss", flags=flags)
    empty = Run.open(run.config, tmp_path / "empty")
    empty.workdir.mkdir()
    empty.write_files()
    for step in (None, "all", "3"):
        with pytest.raises(UserError, match="no checkpoint there yet"):
            evaluate(empty, "loss", step=step)
    assert not (run.workdir / "evals").exists()


@pytest.mark.parametrize(
    ("text", "steps"),
    [("all", [3, 6, 9, 12]), ("6", [6]), ("3:9", [3, 6, 9]), ("0:100:6", [6, 12]), ("3:12:6", [3, 9]), ("9:9", [9])],
)
def test_a_step_range_chooses_among_the_saved_steps(text, steps):
    assert chosen_steps(text, STEPS) == steps


@pytest.mark.parametrize("text", ["", "x", "3:", ":9", "3:9:0", "3:9:x", "-3", "3:9:2:1", "3.5", "ALL"])
def test_invalid_step_is_rejected(text):
    with pytest.raises(UserError, match="write N, A:B, A:B:K or all"):
        chosen_steps(text, STEPS)
