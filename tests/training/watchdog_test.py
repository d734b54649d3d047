"""The watchdog of a training, on a clock that advances only while the training waits for something slow."""

import math
import time
from types import SimpleNamespace

import pytest
from helpers.buckets import in_ci_with
from helpers.report_runs import save_run

from difftx import files
from difftx.data.sources import load_sources
from difftx.data.tokenizers import load_tokenizer
from difftx.interop import exports
from difftx.parallel import heartbeat, multihost
from difftx.parallel.heartbeat import Monitor
from difftx.training import loop, resume
from difftx.training.checkpoint import manifest, weights
from difftx.training.run import Run

POLL_SECONDS = 0.15  # Three times the period in which a monitor with a limit of one second looks at the clock.


class Clock:
    """A clock that stands still unless a test advances it. Each advance waits until the monitor has looked at it."""

    def __init__(self):
        self.now = self.slept = 0.0

    def advance(self, seconds):
        self.now += seconds
        self.slept += seconds
        time.sleep(POLL_SECONDS)

    def delayed(self, seconds, function):
        """Return `function`, with a delay before each call."""

        def slow(*args, **kwargs):
            self.advance(seconds)
            return function(*args, **kwargs)

        return slow


class SlowFile:
    """A file whose reads take 0.4 seconds each."""

    def __init__(self, file, clock):
        self._file, self.read = file, clock.delayed(0.4, file.read)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    return clock


@pytest.fixture
def aborts(monkeypatch):
    """Return the reasons for which a monitor would have ended the process."""
    reasons = []
    monkeypatch.setattr(heartbeat, "_abort", reasons.append)
    return reasons


def test_a_restart_may_take_longer_than_a_step(config, mesh_of, text_file, tmp_path, monkeypatch, clock, aborts):
    """The limit of a step is one second. Reading each file of the checkpoint, the restore, … take almost as long."""

    def run(steps):
        c = config(
            data__path=text_file,
            train__steps=steps,
            optimizer__schedule="constant",  # So that the program is that of guards_test.py, and compiled once.
            checkpoint__every_steps=3,
            eval__every_steps=100,
            eval__suites="",
            logging__trackers="",
            multihost__watchdog_seconds=1,
        )
        tokenizer = load_tokenizer(c.data.tokenizer)
        return Run(c, tmp_path / "run", mesh_of(), tokenizer, load_sources(c.data, tokenizer))

    def evaluate(*_):
        return {}

    assert loop.train(run(3), evaluate) == 0
    assert clock.slept == 0
    monkeypatch.setattr(manifest, "THREADS", 1)
    monkeypatch.setattr(manifest, "open_file", lambda path: SlowFile(path.open("rb"), clock))
    monkeypatch.setattr(resume, "restore_state", clock.delayed(0.5, resume.restore_state))
    monkeypatch.setattr(loop.Training, "_compile", clock.delayed(0.8, loop.Training._compile))
    monkeypatch.setattr(loop.Training, "_take_step", clock.delayed(0.8, loop.Training._take_step))
    assert loop.train(run(5), evaluate) == 0
    assert clock.slept > 5
    assert aborts == []


@pytest.mark.long
def test_an_export_may_take_longer_than_a_step(config, text_file, tmp_path, monkeypatch, clock, aborts):
    """The limit of a step is one second. Each array of a layer takes 0.4 seconds."""
    c = config(data__path=text_file, model__num_layers=1, mesh__fsdp=8, multihost__watchdog_seconds=1)
    run = save_run(c, tmp_path / "run", [2])
    monkeypatch.setattr(weights, "read_part", clock.delayed(0.4, weights.read_part))
    with Monitor(c.multihost) as monitor:
        monitor.beat(2)
        assert exports.write(run, 2).startswith(f"{run.workdir / 'exports' / '2'}: model.safetensors of step 2")
    assert clock.slept > 3
    assert aborts == []


@in_ci_with("gs")
def test_an_upload_of_an_export_may_take_longer_than_a_step(config, text_file, monkeypatch, clock, aborts, bucket):
    """The limit of a step is one second. Each file takes 0.6 seconds."""
    c = config(data__path=text_file, model__num_layers=1, mesh__fsdp=8, multihost__watchdog_seconds=1)
    run = save_run(c, bucket.folder(), [2])
    monkeypatch.setattr(files, "upload", clock.delayed(0.6, files.upload))
    with Monitor(c.multihost) as monitor:
        monitor.beat(2)
        assert exports.write(run, 2).startswith(f"{run.workdir / 'exports' / '2'}: model.safetensors of step 2")
    assert clock.slept > 3
    assert aborts == []


def test_a_process_that_waits_for_the_primary_process_is_not_stuck(config, monkeypatch, clock, aborts):
    """The primary process may verify a checkpoint for hours, and the wait has a limit of its own."""

    def wait(name, milliseconds):
        assert milliseconds == 3_600_000
        clock.advance(3000)

    notices = lambda name: [(f"{name}/0", '{"value": 300}'), (f"{name}/1", '{"value": null}')]  # noqa: E731
    client = SimpleNamespace(key_value_set=lambda *_: None, wait_at_barrier=wait, key_value_dir_get=notices)
    state = SimpleNamespace(num_processes=2, process_id=1)
    monkeypatch.setattr(multihost, "distributed", SimpleNamespace(global_state=state))
    monkeypatch.setattr(multihost, "service", lambda: client)
    with Monitor(config(multihost__watchdog_seconds=1).multihost) as monitor:
        monitor.beat(7)
        assert multihost.decide_on_primary(lambda: math.nan, 3600) == 300
        clock.advance(0.9)
        assert aborts == []
        clock.advance(0.2)  # The watchdog counts again after the wait.
    assert aborts[0].startswith("no step finished for 1 s after step 7")
