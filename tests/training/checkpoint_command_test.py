"""python -m difftx checkpoint ls|verify|diff|prune on real checkpoints."""

import jax.numpy as jnp
import pytest
from conftest import replace
from helpers.training_checkpoints import LOADER, flip_a_bit, largest_file, names, put, state_at

from difftx.commands.checkpoint import main
from difftx.errors import UserError
from difftx.run_files import lock_workdir
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.run import write_run_files
from difftx.training.state import TrainState


@pytest.fixture
def workdir(config, tmp_path):
    """Return the workdir of a run with checkpoint.keep=2 that has checkpoints of steps 10, 20 and 30.

    The last checkpoint has another learning rate and another width.
    """
    c = config(checkpoint__keep=2)
    writer = Checkpointer(tmp_path, replace(c, "checkpoint", keep=9).checkpoint)
    for step in (10, 20):
        writer.save(state_at(step), LOADER, c)
    writer.save(state_at(30, size=4), LOADER, replace(c, "optimizer", learning_rate=0.5))
    writer.close()
    write_run_files(tmp_path, c)
    return tmp_path


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_ls_shows_each_checkpoint_and_its_state(workdir, capsys):
    (workdir / "checkpoints" / "20" / "manifest.json").unlink()
    for name in ("40/quarantined-ab.json", "50[red]\x1b]0;title\x07/quarantined-cd.json"):  # Not a name of difftx.
        put(workdir / "checkpoints" / name, b"")
    assert run("ls", "--workdir", workdir) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    states = {row[0]: row[-1] for row in rows if row}
    assert states == {
        "10": "sizes match",
        "20": "no manifest.json",
        "30": "sizes match",
        "40/quarantined-ab.json": "quarantined",
    }


def test_verify_reads_everything(workdir, capsys):
    assert run("verify", "--workdir", workdir) == 0
    assert capsys.readouterr().out.count("every checksum is right") == 3
    flip_a_bit(largest_file(workdir / "checkpoints" / "20"))
    with pytest.raises(UserError, match="1 of 3 checkpoints do not verify: 20"):
        run("verify", "--workdir", workdir)
    assert "is corrupt: its XXH3" in capsys.readouterr().out


def test_diff_names_fields_and_arrays(workdir, config, capsys):
    assert run("diff", "10", "20", "--workdir", workdir) == 0
    assert capsys.readouterr().out == "no difference in config, names, shapes and dtypes\n"
    assert run("diff", "10", workdir / "checkpoints" / "30", "--workdir", workdir) == 0
    assert capsys.readouterr().out.splitlines() == [
        "config optimizer.learning_rate: 0.004 → 0.5",
        "opt_state/mu: (3, 2) float32 → (4, 2) float32",
        "params/layer/w: (3, 2) float32 → (4, 2) float32",
    ]
    assert run("diff", "10", "20", "--values", "--workdir", workdir) == 0
    norm = (6 * 10**2) ** 0.5  # Six numbers changed from 10 to 20.
    line = f"params/layer/w: ‖difference‖ {norm:.4g}, ‖before‖ {norm:.4g}, ‖after‖ {2 * norm:.4g}\n"
    assert line in capsys.readouterr().out
    more = TrainState(jnp.int32(50), state_at(50).params | {"extra": jnp.zeros(2)}, {"mu": jnp.zeros((3, 2))})
    Checkpointer(workdir, replace(config(), "checkpoint", keep=9).checkpoint).save_and_wait(more, LOADER, config())
    assert run("diff", "50", "20", "--workdir", workdir) == 0
    assert f"params/extra: only in {workdir / 'checkpoints' / '50'}" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"'15': no such checkpoint; .* has the steps 10, 20, 30, 50"):
        run("diff", "10", "15", "--workdir", workdir)
    with pytest.raises(UserError, match=rf"^{workdir}: the folder of a run, .*; give {workdir}/checkpoints/STEP$"):
        run("diff", "10", workdir, "--workdir", workdir)


def test_prune_follows_the_retention_rule_and_needs_yes(workdir, capsys):
    folder = workdir / "checkpoints"
    put(folder / "40" / "quarantined-ab.json", b"")
    assert run("prune", "--workdir", workdir) == 0
    assert "would be deleted: 10 (" in capsys.readouterr().out
    assert names(folder) == ["10", "20", "30", "40"]
    assert run("prune", "--yes", "--workdir", workdir) == 0
    assert names(folder) == ["20", "30"]


def test_prune_deletes_nothing_while_a_training_runs(workdir, capsys):
    with lock_workdir(workdir, 60, wait_seconds=0):
        with pytest.raises(UserError, match=r"process \d+ on .* is at work there; stop it"):
            run("prune", "--keep=1", "--yes", "--workdir", workdir)
        assert run("prune", "--keep=1", "--workdir", workdir) == 0  # Without --yes, the command only prints names.
    assert names(workdir / "checkpoints") == ["10", "20", "30"]


def test_prune_never_deletes_the_last_valid_checkpoint(workdir, capsys):
    folder = workdir / "checkpoints"
    for step in ("20", "30"):
        flip_a_bit(largest_file(folder / step))
    assert run("prune", "--keep=1", "--yes", "--workdir", workdir) == 0
    assert "kept: 10" in capsys.readouterr().out
    assert names(folder) == ["10", "20", "30"]
    flip_a_bit(largest_file(folder / "10"))
    with pytest.raises(UserError, match="no checkpoint verifies, so none is deleted"):
        run("prune", "--keep=1", "--yes", "--workdir", workdir)
    assert names(folder) == ["10", "20", "30"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["ls"], "--workdir=nowhere: no checkpoints there"), (["prune", "--keep=0"], "--keep=0 must be positive")],
)
def test_mistakes_name_the_flag(arguments, message, workdir):
    with pytest.raises(UserError, match=message):
        run(*arguments, "--workdir", "nowhere" if arguments == ["ls"] else workdir)
