"""`difftx doctor` in its own processes, and parts of it in this process."""

import argparse
import dataclasses
import json
import re
import sys

import pytest
from conftest import ROOT, TINY, child_environment, write_text
from helpers.command_server import commands

from difftx import kernels
from difftx.commands import examination
from difftx.config.recipes import load_config
from difftx.json_files import schema_error
from difftx.kernels import api
from difftx.launch import health
from difftx.parallel import multihost
from difftx.storage import objects
from difftx.training import kernel_measurement
from difftx.training.workload import kernel_function

SCHEMA = {
    "software": {str: str},
    "devices": {
        "kind": str,
        "count": int,
        "processes": int,
        "driver": str,
        "memory_share": object,  # A number on GPUs, and null elsewhere.
        "memory_bytes": int,
        "dtype": str,
        "matmul_flops": float,
        "memory_bandwidth": float,
    },
    "collectives": {str: float},
    "kernels": [{"function": str, "name": str, "correct": bool, "milliseconds": float, "ratio_to_floor": float}],
    "storage": {"folder": str, "write": float, "read": float, "free_bytes": int},
    "problems": [str],
    "advice": [str],
    "ok": bool,
}


@pytest.fixture
def doctor(tmp_path):
    """Run the command with a tiny config on 2 devices, and return its result."""
    text = tmp_path / "text.txt"
    write_text(text)
    fields = TINY | {"data.path": str(text), "mesh.fsdp": "2"}

    def run(*flags, **changes):
        changed = fields | {name.replace("__", "."): str(value) for name, value in changes.items()}
        config = [
            "--config=configs/quickstart.py:diff",
            *(f"--config.{name}={value}" for name, value in changed.items()),
        ]
        command = ["difftx", "doctor", f"--workdir={tmp_path / 'run'}", *config, *flags]
        return commands().run(command, environment=child_environment(2), folder=ROOT)

    return run


@pytest.mark.long
def test_json_is_one_object_with_the_documented_fields(doctor):
    result = doctor("--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert schema_error(found, SCHEMA) is None, schema_error(found, SCHEMA)
    assert found["ok"]
    assert found["problems"] == []
    assert [(row["function"], row["name"], row["correct"]) for row in found["kernels"]] == [
        ("attention", "xla", True),
        ("diff_attention", "xla", True),
    ]
    assert list(found["collectives"]) == ["fsdp"]
    assert found["config"]["mesh"] == {"data": 1, "fsdp": 2, "context": 1, "tensor": 1}
    assert found["config"]["kernel"] == "xla"
    assert found["config"]["tokens_per_second"] > 0


@pytest.mark.long
def test_the_page_fits_100_columns(doctor):
    result = doctor()
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) == 100
    for text in ("all-gather over fsdp", "diff_attention: xla", "tokens per second", "Training can start here."):
        assert text in result.stdout


@pytest.mark.long
def test_problems_that_prevent_a_training_give_exit_code_1(doctor):
    result = doctor("--json", "--workdir=/proc/run", mesh__fsdp=3)
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert not found["ok"]
    for problem in ("these sizes do not multiply to the 2 devices here", "No file can be created there"):
        assert any(problem in line for line in found["problems"]), found["problems"]


@pytest.mark.long
def test_the_kernel_of_a_config_is_the_fastest_of_its_own_function(text_file, tmp_path, monkeypatch):
    """The Transformer's kernel is faster than both kernels of the differential model, which cannot use it."""
    xla = kernels.BACKENDS["diff_attention"]["xla"]
    monkeypatch.setitem(kernels.BACKENDS["diff_attention"], "other", dataclasses.replace(xla, name="other"))
    monkeypatch.setattr(api, "_rankings", {})
    times = {"diff_attention": {"other": 3.0, "xla": 4.0}, "attention": {"xla": 1.0}}
    monkeypatch.setattr(kernel_measurement, "measured", lambda config: (times[kernel_function(config)], {}))
    parser = argparse.ArgumentParser()
    multihost.add_flags(parser)
    options = argparse.Namespace(**vars(parser.parse_args([])), workdir=tmp_path / "run", config="quickstart:diff")
    changes = {"data.path": str(text_file), "train.global_batch_tokens": "512", "mesh.fsdp": "-1"}

    def found(**more):
        api._rankings.clear()
        overrides = TINY | changes | {name.replace("__", "."): value for name, value in more.items()}
        return examination.examine(options, load_config("quickstart:diff", {n: str(v) for n, v in overrides.items()}))

    measured = found(model__attention_implementation="auto")
    assert measured.problems == []
    assert measured.config["kernel"] == "other"
    assert found(model__attention_implementation="auto", train__kernel_choice="fixed").config["kernel"] == "xla"
    times["diff_attention"] = {}
    assert found().problems == ["no kernel of diff_attention gives right results on this device"]


@pytest.fixture
def examined(text_file, tmp_path):
    """Return a function from changes of the config and findings on the machine to the findings on the config."""

    def examine(changes, *, storage, kind="cpu", matmul_flops=1e12):
        config = load_config("quickstart:diff", TINY | {"data.path": str(text_file), "mesh.fsdp": "-1"} | changes)
        found = examination.Findings(devices={"kind": kind, "matmul_flops": matmul_flops}, storage=storage)
        options = argparse.Namespace(workdir=tmp_path / "run", config="quickstart:diff")
        with found.part():
            examination._examine_config(options, config, found)
        return found

    return examine


def test_speeds_and_credentials_of_a_bucket(bucket, monkeypatch):
    monkeypatch.setattr(health, "FILE_BYTES", 2**20)
    folder = bucket.folder()
    found = examination._storage(folder)
    assert schema_error(found, {"folder": str, "write": float, "read": float, "latency_seconds": float}) is None
    assert objects.describe_below(folder) == {}
    bucket.plan(kinds=["403"])
    findings = examination.Findings()
    with findings.part():
        examination._storage(folder)
    (problem,) = findings.problems
    assert "the credentials of this process may not" in problem


@pytest.mark.parametrize(
    ("changes", "storage", "problem"),
    [
        ({}, {"write": 1e9, "free_bytes": 10**9}, None),
        (  # The run saves after steps 2, 4 and 6.
            {"checkpoint.every_steps": "2", "checkpoint.keep": "2"},
            {"write": 1e9, "free_bytes": 10**5},
            r"3 checkpoints of \d+ KiB exceed the 97.7 KiB that are free in /here; make room",
        ),
        ({}, {"write": 100.0}, None),  # The space in a bucket is not limited.
    ],
)
def test_space_of_checkpoints(changes, storage, problem, examined):
    lines = examined(changes, storage={"folder": "/here"} | storage).problems
    assert len(lines) == (problem is not None), lines
    assert all(re.match(problem, line) for line in lines), lines


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data.path": "/nowhere/text.txt"}, "data.path='/nowhere/text.txt': "),
        ({"model.mlp_dim": "1000000000"}, "of this machine; use a smaller model"),
        ({"model.vocab_size": "128"}, "model.vocab_size=128 is less than the 257 tokens"),
        ({"eval.suites": "exact_match"}, "suite 'exact_match': "),
        ({"checkpoint.export_every_steps": "1000", "model.window": "8"}, "model.window=8 cannot be converted: "),
        ({"logging.trackers": "wandb:mine"}, "logging.trackers='wandb:mine': wandb is not installed"),
    ],
)
def test_a_config_that_training_refuses_is_a_problem(changes, problem, examined, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    (line,) = examined(changes, storage={"write": 1e9}).problems
    assert problem in line
