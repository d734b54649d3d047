"""The trace of train steps and the profile of device memory that train.py writes."""

import gzip
import json
import types

import jax
import pytest
from conftest import ROOT, TINY, child_environment
from helpers.command_server import commands
from helpers.training_runs import train_losses

from difftx.config.recipes import load_config
from difftx.errors import UserError
from difftx.training.fit import fit
from difftx.training.profile import out_of_memory

QUICKSTART = f"{ROOT}/configs/quickstart.py:diff"
SHORT = TINY | {"eval.loss_tokens": "256", "logging.trackers": "", "eval.suites": "loss"}


def train(workdir, text_file, *more, code=0, **changes):
    fields = SHORT | {"data.path": text_file} | {name.replace("__", "."): value for name, value in changes.items()}
    flags = [*more, *(f"--config.{name}={value}" for name, value in fields.items())]
    command = [str(ROOT / "train.py"), f"--config={QUICKSTART}", f"--workdir={workdir}", *flags]
    ended = commands().run(command, environment=child_environment(1), folder=workdir.parent)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stderr


def only(folder, pattern):
    (path,) = folder.rglob(pattern)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("profiled", "traced"), [("3,2", ["3", "4"]), pytest.param("6,1", ["6"], marks=pytest.mark.exhaustive)]
)
def test_a_trace_has_the_events_of_the_chosen_steps(text_file, tmp_path, profiled, traced):
    train(tmp_path / "plain", text_file)
    train(tmp_path / "traced", text_file, logging__profile_steps=profiled)
    assert train_losses(tmp_path / "traced")[0] == train_losses(tmp_path / "plain")[0]
    assert not (tmp_path / "plain" / "profile").exists()
    session = tmp_path / "traced" / "profile" / "plugins" / "profile"  # xprof reads this folder.

    with gzip.open(only(session, "perfetto_trace.json.gz")) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if event.get("name") == "train"]
    assert [event["args"]["step_num"] for event in steps] == traced
    # Each step executes the compiled program. Its operations, up to the last one of the update, are events too.
    operations = [event for event in events if event.get("args", {}).get("hlo_module") == "jit_step"]
    runs = {event["args"]["run_id"] for event in operations}
    assert len(runs) == len(traced)
    assert len(operations) > 50 * len(runs)

    planes = jax.profiler.ProfileData.from_file(str(only(session, "*.xplane.pb"))).planes
    found = [event.name for plane in planes for line in plane.lines for event in line.events]
    assert found.count("train") == len(traced)


@pytest.mark.long
def test_a_stop_in_the_window_writes_the_trace_so_far(text_file, tmp_path):
    """Two bad steps, whose loss is not finite, end the run at step 3, within the traced window of steps 2 to 6."""
    changes = {"optimizer__learning_rate": 1e30, "guards__on_bad_steps": "stop", "guards__max_skipped": 2}
    train(tmp_path / "run", text_file, code=1, logging__profile_steps="2,5", optimizer__clip_norm="none", **changes)
    with gzip.open(only(tmp_path / "run", "perfetto_trace.json.gz")) as file:
        steps = [event for event in json.load(file)["traceEvents"] if event.get("name") == "train"]
    assert 1 <= len(steps) < 5


GREEDY = """
import jax.numpy as jnp
from jax import lax
from difftx.model.architectures import ARCHITECTURES
from difftx.model.attention import Attention

@ARCHITECTURES.register("greedy")
class Greedy(Attention):
    def output(self, heads, x, constants):
        terabyte = jnp.sin(lax.stop_gradient(x[0, 0, 0]) * lax.broadcasted_iota(jnp.float32, (2**19, 2**19), 1))
        return super().output(heads, x, constants) + jnp.sort(terabyte)[0, 0]
"""


@pytest.mark.long
def test_out_of_memory_names_the_profile_of_memory(text_file, tmp_path):
    (tmp_path / "greedy.py").write_text(GREEDY)
    workdir, flags = tmp_path / "run", [f"--extension={tmp_path / 'greedy.py'}"]
    error = train(workdir, text_file, *flags, code=1, model__architecture="greedy", model__head_norm="none")
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: RESOURCE_EXHAUSTED: ")
    path = workdir / "device_memory-0.prof"
    assert f" {path} lists the arrays in the devices' memory; raise train.accumulation" in line
    assert "Traceback" not in error
    assert b"buffer" in gzip.decompress(path.read_bytes())  # A gzipped protocol buffer of pprof.


def test_a_cpu_without_memory_is_explained(tmp_path):
    error = jax.errors.JaxRuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 7 bytes.")
    run = types.SimpleNamespace(workdir=tmp_path)
    assert "Out of memory allocating 7 bytes. " in str(out_of_memory(run, error))
    assert out_of_memory(run, jax.errors.JaxRuntimeError("INTERNAL: other")) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("3", r"logging\.profile_steps=\(3,\): write the first step, from 1, and the number of steps, such as 10,3"),
        ("0,2", r"logging\.profile_steps=\(0, 2\): write the first step"),
        ("550,2", r"logging\.profile_steps=\(550, 2\) ends after train\.steps=550; use an earlier first step"),
    ],
)
def test_mistakes_name_field_value_and_fix(value, message):
    with pytest.raises(UserError, match=message):
        fit(load_config(QUICKSTART, {"logging.profile_steps": value}))
