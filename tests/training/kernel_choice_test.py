"""The measured choice of attention kernels, with fake kernels in real processes (tests/helpers/fake_kernels.py)."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from conftest import ROOT, TINY, child_environment, write_text
from helpers.processes import Processes

from difftx.config import Config
from difftx.config.recipes import load_config
from difftx.errors import UnreadableError
from difftx.kernels import api
from difftx.model.architectures import heads_of
from difftx.training import kernel_choice, kernel_measurement, run
from difftx.training.checkpoint.manifest import package_versions
from difftx.training.kernel_choice import combined
from difftx.training.run import fit_to_devices
from difftx.training.workload import attention_workload

FAKES = {"ours": "right", "tardy": "slow", "bad": "wrong", "broken": "raises", "dead": "crashes", "stuck": "hangs"}
REASONS = {
    "bad": r"WrongResultError: the gradient of k is off by [\d.]+%",
    "broken": "RuntimeError: INTERNAL: no such instruction",
    "dead": "the process that measured it crashed",
    "stuck": r"it did not finish within \d+ s",
}

ABOUT_KERNELS = re.compile("^kernels |^changed since the run began|is not used:")


class Machine:
    """A machine with a fake GPU, on which train.py runs to a step."""

    def __init__(self, tmp_path):
        self.text, self.workdir, self.logs = tmp_path / "text.txt", tmp_path / "run", tmp_path
        self.measured = tmp_path / "measured"
        write_text(self.text)

    def train(self, steps, fakes=FAKES, gpu="1 × Fake", **options):
        """Train, and return the lines that name kernels, and the names of the measured kernels."""
        code, text = self.end(fakes, train__steps=steps, FAKES_GPU=gpu, **options)
        assert code == 0, text
        return [line for line in text.splitlines() if ABOUT_KERNELS.search(line)], self.measured.read_text().split()

    def end(self, fakes, **options):
        """Train, by default with a fake TPU in place of the GPU, and return the exit code and the output."""
        self.measured.write_text("")
        changes = {"train__steps": 2, "optimizer__warmup_steps": 1, "model__attention_implementation": "auto"}
        variables = {"FAKES": json.dumps(fakes), "FAKES_LOG": str(self.measured)}
        for name, value in options.items():
            (variables if name.isupper() else changes)[name] = value
        script = ("tests/helpers/fake_kernels.py",)
        options = {"devices": 1, "count": 1, "script": script, "environment": variables} | changes
        processes = Processes(self.text, self.workdir, self.logs, **options)
        try:
            return processes.wait(0)
        finally:
            processes.kill()

    @property
    def manifest(self):
        return json.loads((self.workdir / "manifest.json").read_text())


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.long
def test_failing_kernels_are_not_used_and_the_ranking_is_reused(machine):
    # The deadlines leave time on a busy machine. Only the kernel that hangs takes all of its time.
    said, measured = machine.train(2, FAKES_KERNEL_SECONDS="20", FAKES_DEADLINE_SECONDS="300")
    assert measured == list(FAKES)  # Each kernel once, although a new child process starts after each of four failures.
    first, *others = said
    assert re.fullmatch(r"kernels  diff_attention: (ours|xla) [\d.]+ ms, (ours|xla) [\d.]+ ms, tardy [\d.]+ ms", first)
    assert len(others) == len(REASONS)
    for name, reason in REASONS.items():
        assert any(re.fullmatch(f" +{name} is not used: {reason}", line) for line in others), others
    ranking = machine.manifest["kernels"]["diff_attention"]
    fastest = next(iter(ranking["milliseconds"]))
    assert machine.manifest["attention_kernel"] == fastest
    assert ranking["milliseconds"]["tardy"] > 50 > ranking["milliseconds"][fastest]

    # A resumed run uses the recorded ranking.
    resumed, measured = machine.train(3)
    assert (resumed, measured) == (said, [])
    # On another device, it measures again and reports the change.
    elsewhere, measured = machine.train(4, {"tardy": "slow"}, gpu="1 × Other")
    assert measured == ["tardy"]
    change = f"changed since the run began: attention kernel {fastest} → xla, for other devices (safe)"
    assert elsewhere[0] == change
    assert machine.manifest["kernels"]["diff_attention"]["conditions"]["devices"] == "1 × Other"


def test_unreadable_record_does_not_count_as_missing(monkeypatch, tmp_path):
    def unreadable(path):
        raise UnreadableError(f"{path} cannot be read")

    assert run.recorded_rankings(tmp_path) == {}
    (tmp_path / "manifest.json").write_text("not JSON")
    assert run.recorded_rankings(tmp_path) == {}
    monkeypatch.setattr(run, "read_file", unreadable)
    with pytest.raises(UnreadableError):
        run.recorded_rankings(tmp_path)


@pytest.mark.long
def test_kernels_that_were_not_tried_in_time_are_named(machine):
    fakes = {"stuck": "hangs", "ours": "right"}
    said, measured = machine.train(2, fakes, FAKES_DEADLINE_SECONDS="15", FAKES_KERNEL_SECONDS="30")
    assert measured == ["stuck"]
    assert said[0] == "kernels  diff_attention: no measured kernel passed the comparison"
    assert re.fullmatch(r" +stuck is not used: it did not finish within \d+ s", said[1])
    assert said[2:] == ["         ours is not used: not tried within 15 s"]
    assert machine.manifest["attention_kernel"] == "xla"


@pytest.mark.long
def test_eval_uses_the_ranking_of_the_run(machine):
    fakes = {"ours": "right", "other": "right"}
    machine.train(2, fakes)
    manifest = machine.manifest
    manifest["kernels"]["diff_attention"]["milliseconds"] = {"other": 1.0, "ours": 2.0, "xla": 3.0}
    (machine.workdir / "manifest.json").write_text(json.dumps(manifest))
    machine.measured.write_text("")
    variables = {"FAKES": json.dumps(fakes), "FAKES_LOG": str(machine.measured), "FAKES_GPU": "1 × Fake"}
    ended = subprocess.run(
        [
            sys.executable,
            "tests/helpers/fake_kernels.py",
            f"--workdir={machine.workdir}",
            "--suite=loss",
            "--eval.loss_tokens=256",
        ],
        cwd=ROOT,
        env=child_environment(1) | variables | {"FAKES_SCRIPT": "eval"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "kernels  diff_attention: other 1.00 ms, ours 2.00 ms, xla 3.00 ms" in ended.stdout.splitlines()
    assert set(re.findall("^traced (.*)", ended.stdout, re.MULTILINE)) == {"other"}
    assert machine.measured.read_text() == ""


@pytest.mark.long
def test_a_kernel_that_hangs_on_a_tpu_ends_the_process_with_advice(machine):
    code, text = machine.end({"stuck": "hangs", "ours": "right"}, FAKES_DEADLINE_SECONDS="10", FAKES_KERNEL_SECONDS="5")
    assert code == 1, text
    assert (
        "error: attention kernel 'stuck' did not finish before the deadline of 10 s; name another one, such as "
        "model.attention_implementation=xla, or set train.kernel_choice=fixed" in text.splitlines()
    )
    assert "Traceback" not in text
    assert not machine.workdir.exists()


def test_kernels_that_a_tpu_cannot_finish_by_the_deadline_are_not_tried(monkeypatch):
    clock = iter([0.0, 30.0, 40.0, 50.0])  # The start, and before each kernel.
    workload = SimpleNamespace(candidates=lambda: ["first", "second", "xla"])
    monkeypatch.setattr(kernel_measurement, "attention_workload", lambda *_: workload)
    monkeypatch.setattr(
        kernel_measurement, "_outcome", lambda workload, name: 1.0 if name == "first" else "it is wrong"
    )
    monkeypatch.setattr(kernel_measurement.time, "monotonic", clock.__next__)
    found = kernel_measurement._measured_here(load_config("configs/quickstart.py:diff", TINY))
    assert found == {"first": 1.0, "second": "not tried within 60 s"}


def test_worst_of_several_measurements():
    first, second = ({"a": 1.0, "b": 2.0, "c": 3.0}, {}), ({"b": 5.0, "c": 3.5}, {"a": "it is wrong"})
    times, rejected = combined({0: first, 1: second})
    assert (list(times.items()), rejected) == ([("c", 3.5), ("b", 5.0)], {"a": "process 1: it is wrong"})
    assert combined({1: second}) == second  # Another process could not measure.


@pytest.fixture
def start(monkeypatch, tmp_path, capsys):
    """A function that chooses the kernels of a run, records them, and returns the kernel and the lines that it printed.

    The first measurement finds "a" to be the fastest kernel, and the second one "xla".
    """
    monkeypatch.setattr(api, "_rankings", {})
    monkeypatch.setattr(kernel_measurement, "gpu_identity", lambda: "GPU")
    times = iter([{"a": 1.0, "xla": 2.0}, {"xla": 2.0, "a": 3.0}])
    monkeypatch.setattr(kernel_measurement, "measured", lambda config: (next(times), {}))

    def start(config):
        kernel_choice.choose([config], run.recorded_rankings(tmp_path))
        record = {name: dataclasses.asdict(ranking) for name, ranking in api.rankings().items()}
        (tmp_path / "manifest.json").write_text(json.dumps({"kernels": record}))
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
        return next(iter(api.rankings()["diff_attention"].milliseconds)), said

    return start


AUTO = TINY | {"model.attention_implementation": "auto"}


def source_changed(monkeypatch, tmp_path):
    changed = shutil.copytree(kernel_choice.KERNELS, tmp_path / "kernels")
    (changed / "xla.py").write_text((changed / "xla.py").read_text() + "x = 1\n")
    monkeypatch.setattr(kernel_choice, "KERNELS", changed)


def package_changed(name):
    def change(monkeypatch, tmp_path):
        monkeypatch.setattr(kernel_choice, "package_versions", lambda: package_versions() | {name: "9.99"})

    return change


def nothing_changed(monkeypatch, tmp_path):
    return None


@pytest.mark.parametrize(
    ("changes", "change", "differs"),
    [
        ({}, nothing_changed, None),
        ({"train.steps": "7"}, package_changed("grain"), None),
        ({"train.accumulation": "2"}, nothing_changed, "shapes"),
        ({}, package_changed("jax"), "versions"),
        ({}, package_changed("nvidia-cudnn-cu13"), "versions"),
        # Otherwise the corrected code of a rejected kernel, or a broken one, would never be measured.
        ({}, source_changed, "kernel source files"),
    ],
)
def test_a_recorded_ranking_holds_for_its_conditions(changes, change, differs, start, monkeypatch, tmp_path):
    assert start(load_config("configs/quickstart.py:diff", AUTO)) == ("a", [])
    change(monkeypatch, tmp_path)
    resumed, said = start(load_config("configs/quickstart.py:diff", AUTO | changes))
    line = f"changed since the run began: attention kernel a → xla, for other {differs} (safe)"
    assert (resumed, said) == (("a", []) if differs is None else ("xla", [line]))
    assert start(load_config("configs/quickstart.py:diff", AUTO | changes)) == (resumed, [])


def test_a_ranking_of_a_preset_holds_for_the_config_that_the_run_records(start):
    """`difftx eval` reads this config, in which the preset has set the mesh, remat and accumulation."""
    config = load_config("configs/quickstart.py:diff", AUTO | {"mesh.preset": "auto"})
    assert start(config) == ("a", [])
    fitted = fit_to_devices(config)
    assert fitted != config
    assert start(fitted) == ("a", [])


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("diff", {}, ("diff_attention", 8, 2, 2)),
        ("transformer", {"mesh.fsdp": "4"}, ("attention", 2, 2, 2)),
        ("diff", {"mesh.data": "2", "mesh.tensor": "2", "train.accumulation": "2"}, ("diff_attention", 2, 1, 1)),
        ("diff", {"mesh.context": "2", "mesh.context_method": "zigzag"}, ("diff_attention", 8, 2, 2)),
        ("diff", {"mesh.context": "2"}, ("diff_attention", 8, 1, 1)),
    ],
)
def test_the_shapes_on_one_device(architecture, changes, expected):
    config: Config = load_config(f"configs/quickstart.py:{architecture}", TINY | changes)
    mesh = config.mesh
    workload = attention_workload(config, "cpu", mesh.data * mesh.fsdp * mesh.context * mesh.tensor)
    assert (workload.function, workload.batch, workload.heads, workload.kv_heads) == expected
    assert (workload.tokens, workload.width) == (32, heads_of(config.model).d_head)
    assert workload.call().q.shape[-1] == heads_of(config.model).d_head
    assert jax.numpy.dtype(workload.dtype) == config.model.compute_dtype
