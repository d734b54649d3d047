"""`difftx sweep` as a user calls it: real processes, stopped, killed and restarted, and mistakes in a grid."""

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT
from helpers.data_prepare import prepared
from helpers.training_checkpoints import largest_file
from helpers.training_runs import all_metrics

from difftx import registry
from difftx.commands import sweep
from difftx.data.sources import load_sources
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.launch import runner
from difftx.launch.grid import make_points, parse_grid
from difftx.launch.runner import RunStatus, find_reason
from difftx.registry import Extension
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.checkpoint.manifest import quarantined_in, why_invalid
from difftx.training.metrics import NEWEST_BYTES
from difftx.training.state import TrainState

STEPS = 800  # Steps of a run. They take about a second, so that a test can stop it.
CONFIG = f"""
from ml_collections import ConfigDict

from difftx.configs import quickstart

ARG = "{{architecture}}-{{size}}"
WIDTHS = {{"s": 16, "m": 32}}


def get_config(arg: str) -> ConfigDict:
    architecture, _, size = arg.partition("-")
    c = quickstart.get_config(architecture)
    c.model.d_model = 16
    c.model.num_layers = 1
    c.model.num_heads = {{"diff": 1, "transformer": 2}}[architecture]
    c.model.mlp_dim = WIDTHS[size]
    c.data.path = "TEXT"
    c.data.sequence_length = 16
    c.train.global_batch_tokens = 64
    c.train.steps = {STEPS}
    c.mesh.fsdp = 1
    c.checkpoint.every_steps = 10_000
    c.eval.suites = ()
    c.logging.trackers = ()
    return c
"""


@pytest.fixture(scope="module", autouse=True)
def fast_compilation(tmp_path_factory):
    """Use one device, no expensive passes of LLVM, and a cache. The tests do not check what the processes compute."""
    jax.devices()  # This process reads XLA_FLAGS now, so that it keeps the eight devices that other tests expect.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(3000)))
    path = folder / "tiny.py"
    path.write_text(CONFIG.replace("TEXT", str(text)))
    return path


class Sweep:
    """A sweep in a process of its own."""

    def __init__(self, config_file, out, *flags):
        command = [sys.executable, "-m", "difftx", "sweep", f"--config={config_file}", f"--out={out}", *flags]
        self.out = out
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=pipe, start_new_session=True)

    def wait_for_step(self, run, step):
        """Wait until the run has reported this step; return the process that trains it."""
        metrics = self.out / run / "metrics.jsonl"
        until(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text(), self.process)
        return int((self.out / run / ".lock").read_text().split()[1])

    def end(self):
        stdout, stderr = self.process.communicate(timeout=300)
        return self.process.returncode, stdout, stderr


def until(condition, process=None):
    deadline = time.monotonic() + 300
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def states(out):
    return {run["name"]: run["state"] for run in json.loads((out / "sweep.json").read_text())["runs"]}


def attempts(out, run):
    """Check that no step is missing or duplicated, and return the attempts that wrote the steps."""
    steps = [row for row in all_metrics(out / run) if row["split"] == "train"]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    return sorted({row["attempt"] for row in steps})


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl and /proc")
def test_a_sweep_survives_preemption_stop_and_kill(config_file, tmp_path):
    """Preempt a run, stop the sweep, restart it, kill it and restart it. It ends with four finished runs."""
    out = tmp_path / "runs"
    flags = ["--grid", "size=s,m", "architecture=diff,transformer"]
    names = ["diff-s", "transformer-s", "diff-m", "transformer-m"]

    first = Sweep(config_file, out, *flags)
    os.kill(first.wait_for_step("diff-s", 20), signal.SIGTERM)  # Like a preemption that the sweep does not notice.
    child = first.wait_for_step("transformer-s", 20)
    assert os.getpgid(child) == child  # Otherwise, a terminal would signal the run too.
    first.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = first.end()
    assert code == 75, stderr
    assert list(states(out).items()) == list(zip(names, ["done", "stopped", "pending", "pending"], strict=True))
    assert "run the same command again to continue" in stdout

    second = Sweep(config_file, out, *flags)
    orphan = second.wait_for_step("diff-m", 20)
    second.process.kill()
    second.end()
    until(lambda: not is_alive(orphan))
    assert "stopped by a signal at step" in (out / "diff-m" / "train.log").read_text()

    code, stdout, stderr = Sweep(config_file, out, *flags).end()
    assert code == 0, stdout + stderr
    assert set(states(out).values()) == {"done"}
    again = ("diff-s", "transformer-s", "diff-m")
    assert {run: attempts(out, run) for run in names} == {run: [1, 2] if run in again else [1] for run in names}

    # Run the command again in a terminal. It trains nothing and draws the table.
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*")}
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "difftx", "sweep", f"--config={config_file}", f"--out={out}", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=slave)
    os.close(slave)
    shown = b""
    while chunk := read(master):
        shown += chunk
    assert process.wait(timeout=60) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*")} == before
    assert all(text in shown.decode() for text in ["┃", *names, f"{STEPS}/{STEPS}"])

    # A finished run is skipped only if its config is the requested one.
    code, _, stderr = Sweep(config_file, out, *flags, "--config.optimizer.b1=0.8").end()
    assert code == 2
    assert "diff-s is finished, but with another optimizer.b1: 0.9 → 0.8" in stderr


def finish(point, workdir, signature=None):
    """Write the last row of a run's metrics and its last checkpoint, of which the sweep compares sizes only."""
    workdir.mkdir(parents=True, exist_ok=True)
    row = {"split": "train", "attempt": 1, "loss": 1.0, "tokens": 1, "tokens_per_second": 10.0, "step_seconds": 1.0}
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row | {"step": STEPS}) + "\n")
    with contextlib.closing(Checkpointer(workdir, point.config.checkpoint)) as writer:
        ones = {"layer": jnp.ones((300, 2))}
        loader = {"examples": 0, "tokens": 0, "signature": signature or {}}
        writer.save(TrainState(jnp.int32(STEPS), ones, {"mu": ones}), loader, point.config)


def read(master):
    try:
        return os.read(master, 65_536)
    except OSError:  # The other side has closed the terminal.
        return b""


@pytest.mark.long
def test_a_failing_run_is_reported_and_the_others_continue(config_file, tmp_path):
    flags = ["--grid", "optimizer.learning_rate=1e38,1e-3", "architecture=diff", "size=s"]
    short = ("--config.train.steps=50", "--config.optimizer.warmup_steps=40")
    code, stdout, _ = Sweep(config_file, tmp_path, *flags, *short).end()
    assert code == 1
    failed, done = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert (failed["name"], failed["state"], failed["exit_code"]) == ("diff-s-learning_rate1e38", "failed", 1)
    assert failed["error"].startswith("error: steps 2 to 11: 10 updates skipped, loss or gradient not finite; stopped")
    assert (done["name"], done["state"], done["step"]) == ("diff-s-learning_rate1e-3", "done", 50)
    table = stdout[stdout.index("┏") :]
    row = next(line for line in table.splitlines() if "1e38" in line)
    assert "failed (1)" in row
    assert "error: steps 2 to 11" in row


@pytest.mark.long
def test_a_run_with_a_corrupt_last_checkpoint_is_trained_again(config_file, tmp_path):
    flags = ["--grid", "architecture=diff", "size=s", "--config.train.steps=100", "--config.checkpoint.every_steps=50"]
    flags.append("--config.optimizer.warmup_steps=40")
    assert Sweep(config_file, tmp_path, *flags).end()[0] == 0
    last = tmp_path / "diff-s" / "checkpoints" / "100"
    array = largest_file(last)
    array.write_bytes(array.read_bytes()[:-1])
    code, stdout, stderr = Sweep(config_file, tmp_path, *flags).end()
    assert code == 0, stdout + stderr
    assert why_invalid(last, step=100, content=True) is None
    assert [path.parent for path in quarantined_in(last.parent)] == [last]
    assert "attempt 2, from step 50 to 100" in (tmp_path / "diff-s" / "train.log").read_text()


def test_the_reason_of_a_failure_is_found():
    """After an error in JAX, the last lines of a log are a note of JAX, not the error."""
    assert find_reason("step 3\nerror: data.path is not set\n") == "error: data.path is not set"
    jax_note = "--------------------\nFor simplicity, JAX has removed its internal frames from the traceback\n"
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\n'
    assert find_reason(f"{trace}jax.errors.JaxRuntimeError: out of memory\n{jax_note}").startswith("jax.errors.Jax")
    assert find_reason("Segmentation fault\n") == "Segmentation fault"
    assert find_reason("") == ""


def test_a_run_is_finished_when_its_last_step_is_saved(config_file, tmp_path):
    (point,) = make_points(f"{config_file}:diff-s", {"seed": ["0"]}, {})
    status = RunStatus(point, tmp_path)

    def finished():
        status.refresh()
        return status.is_finished()

    (tmp_path / "checkpoints" / "400").mkdir(parents=True)
    assert not finished()
    metrics, last = tmp_path / "metrics.jsonl", tmp_path / "checkpoints" / str(STEPS)
    row = {"split": "train", "attempt": 1, "loss": 1.0, "tokens": 1, "tokens_per_second": 10.0, "step_seconds": 1.0}
    metrics.write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(1, STEPS)))
    assert metrics.stat().st_size > NEWEST_BYTES  # The last NEWEST_BYTES begin within a line.
    last.mkdir()
    assert not finished()  # A folder alone is not a checkpoint.
    last.rmdir()
    finish(point, tmp_path)
    with metrics.open("a") as file:
        for suite, loss in (("loss", 2.5), ("loss", 2.25), ("recall", 9.0)):
            numbers = {"split": "valid", "step": STEPS, "attempt": 1, "suite": suite, "loss": loss}
            file.write(json.dumps(numbers) + "\n")
    assert finished()
    assert status.cells()[2:5] == [f"{STEPS}/{STEPS}", "1.0000", "2.2500"]
    array = largest_file(last)
    content = array.read_bytes()
    array.write_bytes(content[:-1])
    assert not finished()
    array.write_bytes(content)
    metrics.write_text(json.dumps(row | {"step": STEPS - 1}) + "\n" + '{"split": "tra')
    assert not finished()


def test_a_finished_run_of_other_data_or_extensions_is_not_skipped(config_file, tmp_path, monkeypatch):
    """The config is the same in all cases. Only the contents of the store or of the extension differ."""
    known, store = tmp_path / "mine.py", tmp_path / "store"

    def prepare(power):
        (tmp_path / "text.txt").write_text(
            "".join(f"{i} to the power of {power} is {i**power}.\n" for i in range(9000))
        )
        prepared(store, f"--input={tmp_path / 'text.txt'}", "--valid_fraction=0.2")

    def load_extension(digit):
        monkeypatch.setattr(registry, "_extensions", {known: Extension(str(known), digit * 64)})

    prepare(2)
    load_extension("0")
    monkeypatch.setattr("difftx.config.Config.used_extensions", [Extension(str(known), "0" * 64)])
    data = {"data.path": str(store), "data.tokenizer": "bytes"}
    if_long = {"data.upsampling.longer_than_tokens": "40", "data.upsampling.share": "0.5"}
    sweeps = []
    for number, overrides in enumerate([data, data | if_long]):
        (point,) = make_points(f"{config_file}:diff-s", {"seed": ["0"]}, overrides)
        out = tmp_path / f"runs{number}"
        finish(point, out / point.name, load_sources(point.config.data, load_tokenizer("bytes")).signature)
        sweeps.append(([point], out, {}))
        runner.Sweep(*sweeps[-1])  # Nothing differs.
    load_extension("1")
    changed = r"another extension .*mine.py, or a module that it imports \(SHA-256 0{12}… → 1{12}…\); use another"
    for arguments in sweeps:
        with pytest.raises(UserError, match=f"finished, but with {changed}"):
            runner.Sweep(*arguments)
    load_extension("0")
    shutil.rmtree(store)
    prepare(3)
    for arguments in sweeps:
        with pytest.raises(UserError, match=r"with another source train [0-9a-f]{12}… → [0-9a-f]{12}…; use another"):
            runner.Sweep(*arguments)


def test_points_of_the_scaling_sweep():
    grid = parse_grid(["size=830m,1.4b", "architecture=diff,transformer", "seed=0,1"])
    points = make_points("configs/scaling.py", grid, {"train.steps": "500"})
    assert [point.name for point in points[:3]] == ["diff-830m-seed0", "diff-830m-seed1", "transformer-830m-seed0"]
    assert len({point.name for point in points}) == 8
    for point in points:
        architecture, size, seed = point.name.split("-")
        assert point.config.model.architecture == architecture
        assert point.config.model.d_model == {"830m": 1536, "1.4b": 2048}[size]
        assert (point.config.train.seed, point.config.data.seed) == (int(seed[4:]),) * 2
        assert point.config.train.steps == 500
    flags = ["--config=configs/scaling.py:diff-830m", "--workdir=w", "--config.train.steps=500"]
    assert points[0].flags("w") == [*flags, "--config.train.seed=0", "--config.data.seed=0"]


def test_a_grid_of_fields_keeps_the_argument_of_the_config():
    grid = parse_grid(["optimizer.learning_rate=1e-4,2e-4", "model.lambda_init=none,0.8"])
    points = make_points("configs/diff_3b.py:diff", grid, {})
    assert points[0].name == "diff-learning_rate1e-4-lambda_initnone"
    assert points[3].config.optimizer.learning_rate == 2e-4
    assert points[3].config.model.lambda_init == 0.8


def test_a_grid_may_name_the_fields_of_an_architecture():
    points = make_points("configs/quickstart.py:top_k", parse_grid(["model.top_k.k=4,8"]), {})
    assert [point.config.model.own.k for point in points] == [4, 8]


@pytest.mark.parametrize(
    ("config", "grid", "message"),
    [
        ("scaling.py", ["size=830m", "architecture=dif"], "run dif-830m: .*Did you mean 'diff'"),
        ("scaling.py", ["size=83m", "architecture=diff"], "run diff-83m: .*Did you mean '830m'"),
        ("scaling.py", ["arch=diff"], "Did you mean 'architecture'"),
        ("scaling.py", ["lr=1"], "Did you mean 'optimizer.learning_rate'"),
        ("scaling.py", ["sizes=830m"], "sizes=…: no such name. Did you mean 'size'"),
        ("scaling.py", ["optimizer.learningrate=1"], "Did you mean 'optimizer.learning_rate'"),
        ("scaling.py", ["size=830m"], "give architecture=… too"),
        ("scaling.py:diff-830m", ["size=830m", "architecture=diff"], "leave :diff-830m out"),
        ("scaling.py", ["size"], "'size' is not understood"),
        ("scaling.py", ["size=,"], "'size=,' is not understood"),
        ("scaling.py", ["seed=0,0"], "a value is given twice"),
        ("scaling.py", ["seed=0", "seed=1"], "seed is given twice"),
        ("scaling.py", ["seed=0", "train.seed=1"], "train.seed is set twice"),
        ("scaling.py", ["train.steps=10"], "train.steps is set twice"),
        ("scaling.py", ["seed=x"], "run seedx: train.seed='x': expected an integer"),
        ("scaling.py", ["train.seed=0", "data.seed=0,1", "data.path=a b,a_b"], "would be named"),
    ],
)
def test_a_mistake_in_the_grid_is_one_line(config, grid, message, tmp_path):
    arguments = [f"--config=configs/{config}", f"--out={tmp_path / 'out'}", "--config.train.steps=500", "--grid", *grid]
    with pytest.raises(UserError, match=message):
        sweep.main(arguments)
    assert not (tmp_path / "out").exists()


def test_models_of_unequal_size_are_named_before_they_train(tmp_path, capsys):
    flags = ["--config=quickstart:diff", f"--out={tmp_path / 'jobs'}", "--launcher=slurm", "--set"]
    settings = ["cpus=1", "gpus=1", "nodes=1", "time=1"]
    assert sweep.main([*flags, *settings, "--grid", "model.architecture=diff,transformer"]) == 0
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert warning.startswith("diff-architecturetransformer: warning  the model is not matched with a Transformer of 4")
