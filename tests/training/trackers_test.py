"""Trackers beside a training, which none of their faults may end.

The packages are the real ones. That of Weights & Biases (W&B) talks to a server of these tests.
"""

import errno
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, child_environment
from helpers.processes import TRAIN_SLOWLY, newest_step
from helpers.training_runs import wait_for_step
from helpers.wandb_server import KEY, WandbServer

from difftx.config import LoggingConfig
from difftx.errors import UserError
from difftx.files import UNLOCKED
from difftx.training import trackers
from difftx.training.metrics import MetricsWriter, read_metrics
from difftx.training.trackers import TRACKERS, Attempt, Trackers, check_trackers

STEPS = 200
SPEED = {"tokens": 256, "tokens_per_second": 1e3, "step_seconds": 0.25}


def test_an_error_of_a_tracker_ends_only_this_tracker(capsys):
    calls = []

    class Recorder:
        def __init__(self, name, fails=""):
            self.name, self.fails = name, fails
            self._record("start")

        def _record(self, method, *arguments):
            calls.append((self.name, method, *arguments))
            if method == self.fails:
                raise ConnectionResetError(f"no \x1b\n{method}")

        def log(self, *arguments):
            self._record("log", *arguments)

        def close(self):
            self._record("close")

    names = {"a": "start", "b": "log", "c": "close", "d": ""}
    running = Trackers({name: lambda name=name, fails=fails: Recorder(name, fails) for name, fails in names.items()})
    for step in (1, 2):
        running.call("log", step, {})
    running.call("close")
    assert [call[1:] for call in calls if call[0] == "d"] == [("start",), ("log", 1, {}), ("log", 2, {}), ("close",)]
    assert [call[1:] for call in calls if call[0] == "b"] == [("start",), ("log", 1, {}), ("close",)]
    rest = "it gets no further numbers of this attempt, which metrics.jsonl has"
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: no \\x1b {fails}; {rest}" for name, fails in list(names.items())[:3]
    ]


def attempt_of(folder, **fields):
    settings = {"address": str(folder), "run_id": "0" * 32, "config": {}, "is_continuous": True, "history": lambda: []}
    return Attempt(folder=folder, owner=UNLOCKED, **settings | fields)


@pytest.mark.parametrize("fault", ["a file in place of the folder", "full disk"])
def test_metrics_continue_without_tensorboard(fault, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fault == "full disk":
        monkeypatch.setattr(trackers.RecordWriter, "flush", full)
    else:
        (tmp_path / "tensorboard").touch()
    writer = MetricsWriter(tmp_path, LoggingConfig(trackers=("tensorboard",)), 0)
    for step in (1, 2):
        writer.write("goodput", step, {"wall_seconds": 1.0})
    writer.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert re.fullmatch(r"tensorboard: .*; it gets no further numbers.*\n", capsys.readouterr().out)


def test_tensorboard_reads_the_attempts_in_order_after_the_clock_stepped_back(tmp_path, monkeypatch):
    """TensorBoard itself shows the points of the later attempt from its first step on."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for attempt, (clock, start) in enumerate([(1e9, 0), (1e9 - 3600, 3), (1e9 - 7200, 5)], start=1):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda clock=clock: clock)
            writer = TRACKERS["tensorboard"](attempt_of(tmp_path, number=attempt, start_step=start), "")
            for step in range(start + 1, start + 4):
                writer.log(step, {"loss": step + attempt / 10})
            writer.close()
    shown = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    expected = [1.1, 2.1, 3.1, 4.2, 5.2, 6.3, 7.3, 8.3]
    assert [(point.step, round(point.value, 3)) for point in shown] == list(enumerate(expected, start=1))


def steps_in_trackio():
    """Return the steps of the losses of each run, read from Trackio's database."""
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    runs = storage.get_runs("p")
    return {run: [row["step"] for row in storage.get_logs("p", run) if "train/loss" in row] for run in runs}


def steps_in_mlflow(folder):
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    return {
        run.data.tags["difftx"]: [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
        for run in runs
    }


@pytest.mark.long
@pytest.mark.parametrize("package", ["wandb", "trackio", "mlflow"])
def test_one_run_has_all_attempts_until_rows_are_cut(package, tmp_path, monkeypatch, capsys):
    """Attempts 2 and 3 continue after the last row. Attempt 4 begins before it."""
    if importlib.util.find_spec(package) is None:  # Trackio reads its variables when it is imported.
        pytest.skip(f"no {package}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 120)  # A busy machine imports a package in more than 10 s.
    with WandbServer() as server:
        local = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "TRACKIO_DIR": f"{tmp_path}/trackio"}
        for name, value in (local | server.environment(tmp_path)).items():
            monkeypatch.setenv(name, value)
        config = LoggingConfig(trackers=(f"{package}:p",))
        for start, stop in [(0, 3), (3, 5), (5, 8), (6, 9), (9, 11)]:
            fields = {"run_id": "a" * 32, "run_config": {"model": {"d_model": 8}, "train": {"steps": 11}}}
            writer = MetricsWriter(tmp_path / "run", config, start, **fields)
            writer.write("goodput", start, {"wall_seconds": 1.0})
            for step in range(start + 1, stop + 1):
                writer.write("train", step, SPEED | {"loss": 1 / step})
            writer.close()
        if package == "wandb":
            found = {run: server.steps(run) for run in server.runs}
        elif package == "trackio":
            found = steps_in_trackio()
        else:
            found = steps_in_mlflow(tmp_path)
    assert capsys.readouterr().out == ""
    assert {name.rpartition("-")[2]: steps for name, steps in found.items()} == {
        "1": list(range(1, 9)),
        "4": list(range(1, 12)),
    }
    assert json.loads((tmp_path / "run/trackers.json").read_text()) == {"series": 4}


@pytest.mark.parametrize(
    ("tracker", "expected"),
    [
        ("wandbb:p", "'wandbb': no such tracker. Did you mean 'wandb'?"),
        ("tensorboard:p", "TensorBoard has no projects; write tensorboard"),
        ("mlflow", "mlflow is not installed: "),
    ],
)
def test_a_tracker_that_cannot_start_is_found_before_training(tracker, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError) as error:
        check_trackers([tracker])
    assert str(error.value).startswith(f"logging.trackers={tracker!r}: {expected}")


@pytest.fixture
def server():
    pytest.importorskip("wandb")
    with WandbServer() as server:
        yield server


@pytest.fixture
def begin(server, text_file, tmp_path):
    """Return a function that starts a training with W&B, and returns its process and its workdir."""

    def begin(workdir, **environment):
        fields = TINY | {"data.path": text_file, "train.steps": STEPS, "logging.every_steps": 1}
        fields |= {"logging.trackers": "wandb:p", "checkpoint.every_steps": 1000}
        flags = ["--config=quickstart:diff", f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in fields.items())]
        return subprocess.Popen(
            [sys.executable, *TRAIN_SLOWLY, *flags],
            cwd=ROOT,
            env=child_environment(1) | server.environment(tmp_path) | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


def descendants(pid):
    """Return the process ids and command lines of a process's children, and of theirs."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            line = (stat.parent / "cmdline").read_text()
        except OSError:  # It has ended.
            continue
        if parent == pid:
            found |= {int(stat.parent.name): line} | descendants(int(stat.parent.name))
    return found


def wandb_core(process):
    """Wait for the service process of the package, and return its id."""
    while not (found := [pid for pid, line in descendants(process.pid).items() if "wandb-core" in line]):
        assert process.poll() is None
        time.sleep(0.1)
    return found[0]


@pytest.mark.long
def test_a_signal_to_all_processes_saves_and_the_next_attempt_continues_the_same_run(server, begin, tmp_path):
    workdir = tmp_path / "some/runs;,#?"
    process = begin(workdir)
    wandb_core(process)
    wait_for_step(5, process, workdir)
    for pid in [process.pid, *descendants(process.pid)]:
        os.kill(pid, signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert len(list((workdir / "checkpoints").iterdir())) == 1
    process = begin(workdir)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, "wandb:p" in out) == (0, False), out + err
    (name,) = server.runs
    assert name.endswith("-1")
    assert server.steps(name) == list(range(1, STEPS + 1))
    sent = {row["_step"]: row["train/loss"] for row in server.rows[name] if "train/loss" in row}
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if row["split"] == "train"]
    assert sent == {row["step"]: row["loss"] for row in rows}
    run = server.runs[name]
    assert (run["displayName"], run["groupName"]) == ("some-runs;,#?", "some-runs;,#?")
    config = {name: entry["value"] for name, entry in json.loads(run["config"]).items() if name != "_wandb"}
    assert config == json.loads((workdir / "config.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "who", "expected"),
    [
        (signal.SIGKILL, "wandb-core", r"wandb:p: Connection lost; .*"),
        (signal.SIGKILL, "tracker_process", r"wandb:p: its process was killed by SIGKILL; .*"),
        (signal.SIGSTOP, "tracker_process", r"wandb:p: not all numbers were sent within 10 s; `wandb sync` .*"),
    ],
)
def test_training_continues_without_the_processes_of_wandb(begin, tmp_path, sent, who, expected):
    process = begin(tmp_path / "run")
    wandb_core(process)
    wait_for_step(5, process, tmp_path / "run")
    pid = next(pid for pid, line in descendants(process.pid).items() if who in line)
    os.kill(pid, sent)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert newest_step(tmp_path / "run/metrics.jsonl") == STEPS
    lines = [line for line in out.splitlines() if line.startswith("wandb:p: ")]
    assert len(lines) == 1
    assert re.fullmatch(expected, lines[0])


@pytest.mark.long
def test_training_ends_during_an_outage(begin, tmp_path):
    process = begin(tmp_path / "run", WANDB_BASE_URL="http://127.0.0.1:9")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert [line for line in out.splitlines() if line.startswith("wandb:p: not all numbers were sent")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("project", "variables", "expected"),
    [
        ("p", {"WANDB_API_KEY": ""}, "No API key configured"),
        ("p", {"WANDB_API_KEY": "short"}, "WANDB_API_KEY invalid"),
        ("a:b", {}, "Invalid project name 'a:b'"),
        ("p", {}, None),
        ("p", {"WANDB_API_KEY": "", "WANDB_MODE": "offline"}, None),
    ],
)
def test_mistakes_are_found_before_training(project, variables, expected, tmp_path, monkeypatch):
    """No server is there, so the check does not depend on one."""
    pytest.importorskip("wandb")
    environment = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY, "HOME": str(tmp_path)} | variables
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if expected is None:
        check_trackers([f"wandb:{project}"])
        return
    with pytest.raises(UserError, match=rf"^logging\.trackers='wandb:{project}': .*{expected}.*; or remove"):
        check_trackers([f"wandb:{project}"])
