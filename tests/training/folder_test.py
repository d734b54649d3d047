"""Training in a run directory that is moved, deleted or replaced."""

import shutil
import signal

import pytest
from helpers.processes import TRAIN_SLOWLY, Processes
from helpers.training_runs import train_losses

from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import read_manifest, steps_in
from difftx.training.run import read_run_manifest

GONE = {"deleted": lambda workdir, path: shutil.rmtree(workdir), "moved": lambda workdir, path: workdir.rename(path)}


@pytest.mark.long
@pytest.mark.parametrize("how", GONE)
def test_a_training_that_has_lost_its_folder_stops_and_does_not_save_into_the_next_run(tmp_path, text_file, how):
    workdir, runs = tmp_path / "exp", []

    def start(name, **changes):
        (tmp_path / name).mkdir()
        settings = {"count": 1, "devices": 1, "checkpoint__keep": 9} | changes
        runs.append(Processes(text_file, workdir, tmp_path / name, script=TRAIN_SLOWLY, **settings))
        return runs[-1]

    try:
        forgotten = start("forgotten", train__steps=1000)
        forgotten.until_checkpoint(10)
        forgotten.running[0].send_signal(signal.SIGSTOP)
        GONE[how](workdir, tmp_path / "moved")
        after = start("after", train__steps=1000, train__seed=1)
        after.until_checkpoint(20)
        forgotten.running[0].send_signal(signal.SIGCONT)
        code, log = forgotten.wait(0)
        assert code == 2, log
        errors = [line for line in log.splitlines() if line.startswith("error: ")]
        assert [f"{workdir}: this folder was moved, deleted" in line for line in errors] == [True], log
        assert log.splitlines()[-1] == errors[0]
        assert "Traceback" not in log
        after.until_checkpoint(40)
        after.kill()
        own = read_run_manifest(workdir)["run_id"]
        assert {
            read_manifest(workdir / "checkpoints" / str(step)).run_id for step in steps_in(workdir / "checkpoints")
        } == {own}
        newest = Checkpoints(workdir).newest()
        resumed = start("resumed", train__steps=newest + 3, train__seed=1)
        code, log = resumed.wait(0)
        assert (code, f"from step {newest} to" in log) == (0, True), log
        assert len(train_losses(workdir)[0]) == newest + 3
        assert read_run_manifest(workdir)["run_id"] == own
        assert read_run_manifest(workdir)["has_saved"]
    finally:
        for run in runs:
            run.kill()
