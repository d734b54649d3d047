"""Two real processes train one model, and are stopped, killed or frozen."""

import os
import re
import resource
import shutil
import signal
import time

import numpy as np
import pytest
from helpers.interop_folders import export, tensors_of
from helpers.processes import JOB, TRAIN_SLOWLY, newest_step
from helpers.training_checkpoints import largest_file

from difftx.training.checkpoint.manifest import quarantined_in, read_manifest, steps_in, why_invalid
from difftx.training.metrics import read_metrics

pytestmark = pytest.mark.long


def rows(metrics):
    return [row for row in read_metrics(metrics) if row["split"] == "train"]


def test_two_processes_train_as_one_and_stop_together(started):
    """A SIGTERM to one process stops both after the same step. One process of eight devices then resumes the run."""
    options = {"train__steps": 40, "mesh__data": 2, "devices": 4}
    single = started("single", count=1, **(options | {"devices": 8}))
    assert single.wait(0)[0] == 0, single.logs[0].read_text()
    two = started("two", script=TRAIN_SLOWLY, **options)
    two.until_step(12)
    two.running[1].send_signal(signal.SIGTERM)
    codes_and_texts = [two.wait(process) for process in (0, 1)]
    assert [code for code, _ in codes_and_texts] == [75, 75], codes_and_texts
    steps = sorted(int(p.name) for p in (two.metrics.parent / "checkpoints").iterdir())
    assert steps[-1] == rows(two.metrics)[-1]["step"] >= 12
    assert "stopped by a signal" in codes_and_texts[0][1]
    assert "step" not in codes_and_texts[1][1].replace("[Gloo]", "")  # Only the primary process reports.
    rest = started("two", count=1, **(options | {"devices": 8}))
    assert rest.wait(0)[0] == 0, rest.logs[0].read_text()
    assert [row["step"] for row in rows(two.metrics)] == list(range(1, 41))
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        both = [[row[name] for row in rows(group.metrics)] for group in (single, two)]
        np.testing.assert_allclose(*both, rtol=tolerance)


def test_the_clock_of_the_primary_process_decides_on_rolling_checkpoints(started):
    """The other clock is 90 s ahead after a second. Alone, that process would save after each step."""
    options = {"train__steps": 60, "checkpoint__every_steps": 1000, "checkpoint__every_minutes": 1 / 60}
    two = started(script=TRAIN_SLOWLY, devices=2, own_environment={1: {"CLOCK_RATE": "90"}}, **options)
    found = set()
    while two.running[0].poll() is None:
        found.add(frozenset(steps_in(two.metrics.parent / "checkpoints")))
        time.sleep(0.01)
    codes_and_texts = [two.wait(process) for process in (0, 1)]
    assert [code for code, _ in codes_and_texts] == [0, 0], codes_and_texts
    steps = frozenset.union(*found)
    assert 2 <= len(steps) <= 20  # A period has about 20 steps.
    assert max(map(len, found)) == 2
    manifest = read_manifest(two.metrics.parent / "checkpoints" / "60")
    assert why_invalid(manifest.folder, content=True) is None


def test_two_processes_rewind_and_stop_together(started):
    """An absurd learning rate makes steps bad after the first updates, and again after the rewind."""
    two = started(
        train__steps=100_000, devices=2, optimizer__learning_rate=1e38, guards__max_skipped=3, guards__max_rewinds=1
    )
    codes_and_texts = [two.wait(process) for process in (0, 1)]
    assert [code for code, _ in codes_and_texts] == [1, 1], codes_and_texts
    lead, other = (text for _, text in codes_and_texts)
    assert re.search(
        r"steps \d+ to \d+: 3 updates skipped, .*; rewinding to step 0; training continues with example \d+", lead
    )
    assert len(re.findall(r"^error: steps .*; stopped, rewound before: 1", lead, re.MULTILINE)) == 1
    assert "Traceback" not in lead + other
    assert re.findall(r'"split": "(rewind|stop)"', two.metrics.read_text()) == ["rewind", "stop"]


def test_two_processes_export_the_same_tensors_as_one_process(started, tmp_path):
    options = {"train__steps": 4, "checkpoint__every_steps": 2, "checkpoint__export_every_steps": 4}
    two = started("two", mesh__data=2, devices=4, **options)
    codes_and_texts = [two.wait(process) for process in (0, 1)]
    assert [code for code, _ in codes_and_texts] == [0, 0], codes_and_texts
    workdir = two.metrics.parent
    assert [path.name for path in (workdir / "exports").iterdir()] == ["4"]
    now, expected = tensors_of(workdir / "exports" / "4"), tensors_of(export(workdir, tmp_path / "by_command"))
    assert now.keys() == expected.keys()
    assert all(np.array_equal(now[name], expected[name]) for name in now)


def test_two_processes_quarantine_a_corrupt_checkpoint_and_resume_from_the_one_before(started):
    options = {"train__steps": 20, "mesh__data": 2}
    one = started(count=1, devices=4, **options)
    assert one.wait(0)[0] == 0, one.logs[0].read_text()
    folder, before = one.metrics.parent / "checkpoints", rows(one.metrics)
    file = largest_file(folder / "20")
    os.truncate(file, file.stat().st_size - 1)
    two = started(devices=2, **options)
    for process in (0, 1):
        code, text = two.wait(process)
        assert code == 0, text
        assert ("its manifest is now quarantined-" in text) == (process == 0)
    assert [path.parent.name for path in quarantined_in(folder)] == ["20"]
    assert why_invalid(folder / "20", step=20, content=True) is None
    np.testing.assert_allclose(*([row["loss"] for row in both] for both in (before, rows(two.metrics))), rtol=1e-5)
    assert {row["attempt"] for row in rows(two.metrics) if row["step"] > 10} == {2}


def test_killed_run_resumes_with_other_processes_and_devices(started):
    """Resume 2 × 2 devices as 1 × 4, bit for bit, and as 1 × 2 with twice the microbatches, up to rounding.

    Before and after, all sums are over two devices. In a sum over four devices along one axis, gloo, between processes,
    adds in another order than XLA within one process, which makes a difference of 5e-7.
    """
    options = {"train__steps": 20, "checkpoint__every_steps": 6, "mesh__fsdp": 2, "mesh__tensor": 2}
    single = started("single", count=1, devices=4, **options)
    assert single.wait(0)[0] == 0, single.logs[0].read_text()
    two = started("two", devices=2, script=TRAIN_SLOWLY, **options)
    two.until_checkpoint(6)
    two.kill()
    shutil.copytree(two.metrics.parent, two.metrics.parent.with_name("half"))
    rest = started("two", count=1, devices=4, **options)
    assert rest.wait(0)[0] == 0, rest.logs[0].read_text()
    half = started("half", count=1, devices=2, **(options | {"mesh__tensor": 1, "train__accumulation": 2}))
    assert half.wait(0)[0] == 0, half.logs[0].read_text()
    for group, tolerance in ((two, 0.0), (half, 1e-5)):
        assert [row["step"] for row in rows(group.metrics)] == list(range(1, 21))
        assert {row["attempt"] for row in rows(group.metrics)} == {1, 2}
        losses = [[row["loss"] for row in rows(each.metrics)] for each in (group, single)]
        np.testing.assert_allclose(*losses, rtol=tolerance, atol=0)


def test_save_that_fails_in_one_process_fails_in_both_and_is_retried(started):
    """Process 1 cannot write arrays for a while. Both report it after the timeout of barriers, not after 20 minutes."""
    two = started(train__steps=12, devices=2, checkpoint__every_steps=3, mesh__fsdp=4, script=TRAIN_SLOWLY)
    two.until_step(1)
    # The limit is less than the 160 kB of its arrays, and more than its log, which has the tracebacks of failures.
    limit = resource.prlimit(two.running[1].pid, resource.RLIMIT_FSIZE, (100_000, -1))
    deadline = time.monotonic() + 240
    while not all("was not saved, failure 1 of 3" in log.read_text() for log in two.logs):
        assert all(popen.poll() is None for popen in two.running.values()), [log.read_text() for log in two.logs]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    resource.prlimit(two.running[1].pid, resource.RLIMIT_FSIZE, limit)
    for process in (0, 1):
        code, text = two.wait(process)
        assert code == 0, text
    folder = two.metrics.parent / "checkpoints"
    steps = sorted(int(path.name) for path in folder.iterdir())
    assert steps[-1] == 12
    assert all(why_invalid(folder / str(step), step=step, content=True) is None for step in steps)


@pytest.mark.parametrize(
    ("process", "sent", "named"),
    [
        (1, signal.SIGKILL, r"process 1 of 2 \(.*pid {pid} at step \d+\)"),
        (1, signal.SIGSTOP, r"process 1 of 2 \(.*pid {pid} at step \d+\)"),
        (0, signal.SIGSTOP, "process 0, the coordinator at .*,"),
    ],
)
def test_a_killed_or_frozen_process_is_named_within_the_heartbeats_timeout(started, process, sent, named):
    two = started(train__steps=100_000, devices=2)
    two.until_step(3)
    two.running[process].send_signal(sent)
    code, text = two.wait(1 - process, timeout=60)
    assert code == 1
    named = named.format(pid=two.running[process].pid)
    assert re.search(rf"process {1 - process} stops: {named} has been silent for \d+ s; stacks of all threads", text)
    assert "difftx/training/loop.py" in text  # The main thread hung in this file.


def test_processes_of_other_commands_cannot_end_a_training(started):
    """Two of them have the coordinator's address in a copied script, others are a second step of the Slurm job."""
    first = started("first", slurm_step=0, train__steps=100_000, devices=2, script=TRAIN_SLOWLY)
    first.until_step(2)
    address = f"--coordinator=localhost:{61440 + JOB % 4096}"
    own = [address, "--processes=2", "--config.multihost.initialization_timeout_seconds=2"]
    strays = [started(f"stray{i}", count=1, flags=[*own, f"--process={i}"]) for i in (0, 1)]
    for stray, why in zip(strays, ("Address already in use", "another job runs there"), strict=True):
        code, text = stray.wait(0)
        assert (code, why in text) == (2, True), text
    second = started("second", slurm_step=1, train__steps=3, devices=2)
    assert [second.wait(process)[0] for process in (0, 1)] == [0, 0], second.logs[0].read_text()
    first.until_step(newest_step(first.metrics) + 2)
    first.running[0].send_signal(signal.SIGTERM)
    assert [first.wait(process)[0] for process in (0, 1)] == [75, 75], first.logs[0].read_text()
