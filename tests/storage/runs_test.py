"""Commands of users on runs in buckets: train, resume after a kill, evaluate, report and export."""

import pytest
from conftest import child_environment, write_text
from helpers.bucket_runs import run_of, start, train, wait_until
from helpers.buckets import in_ci_with
from helpers.command_server import commands

from difftx.files import list_folder, read_file, write_atomically
from difftx.json_files import read_json
from difftx.report.runs import match_runs
from difftx.storage import objects
from difftx.training.checkpoint.manifest import steps_in


@pytest.fixture(scope="session")
def local_run(tmp_path_factory):
    """Return an uninterrupted run on a local disk, and its text file."""
    folder = tmp_path_factory.mktemp("unbroken")
    text = write_text(folder / "text.txt")
    done = train(text, folder / "run")
    assert done.returncode == 0, done.stderr
    return folder / "run", text


def run(*command):
    done = commands().run(["difftx", *command], environment=child_environment(1))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs():
    """Return the finished runs in buckets, by store."""
    return {}


@pytest.fixture
def trained(bucket, local_run, runs, tmp_path):
    """Return a run that was killed after its first checkpoint, and resumed."""
    if bucket.scheme not in runs:
        runs[bucket.scheme] = kill_and_resume(bucket.folder(), local_run[1], tmp_path / "log")
    return runs[bucket.scheme]


def kill_and_resume(workdir, text, log):
    process = start(text, workdir, log)
    assert wait_until(lambda: steps_in(workdir / "checkpoints"), process, log), log.read_text()
    process.kill()
    process.wait()
    done = train(text, workdir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 2, from step" in done.stdout
    return workdir


def test_a_run_that_was_killed_is_resumed_bit_for_bit(trained, local_run):
    workdir, local = trained, local_run[0]
    assert run_of(workdir) == run_of(local)
    names = objects.describe_below(workdir)
    assert {name.partition("/")[0] for name in names} == {
        *("config.json", "manifest.json", ".lock", "metrics.jsonl"),
        *("checkpoints", "evals", "tensorboard"),
    }
    assert read_json(workdir / "config.json") == read_json(local / "config.json")
    numbers = [read_json(path / "evals" / "loss" / "24.json")["numbers"] for path in (workdir, local)]
    assert numbers[0] == numbers[1]


@in_ci_with("gs")
def test_every_command_accepts_a_run_in_a_bucket(trained, local_run, tmp_path):
    workdir, (local, text) = trained, local_run
    run("eval", f"--workdir={workdir}", "--suite=loss,sample", "--step=20:24:4")
    assert list_folder(workdir / "evals" / "sample") == {"20.json": False, "24.json": False}
    assert "skipped" in run("eval", f"--workdir={workdir}", "--suite=loss", "--step=24")
    assert "report.html" in run("report", f"--workdir={workdir},{local}")
    assert b"<html" in read_file(workdir / "report.html")
    assert "curves.png" in run("eval", f"--curves={workdir.parent}/*{workdir.name[-6:]}", f"--out={workdir}/figures")
    assert [row.name for row in match_runs(str(workdir), "curves")] == [workdir.name]
    flags = ["--new_tokens=8", "--temperature=0", "--prompt=line 1"]
    assert run("generate", f"--workdir={workdir}", *flags) == run("generate", f"--workdir={local}", *flags)
    write_atomically(workdir / "prompts.jsonl", '{"prompt": "line 1", "seed": 0}\n')
    file_of_prompts = (f"--prompts={workdir}/prompts.jsonl", *flags[:2])
    assert run("generate", f"--workdir={local}", *file_of_prompts).count("completion") == 1
    listed = run("checkpoint", "ls", f"--workdir={workdir}")
    assert listed.count("sizes match") == len(steps_in(workdir / "checkpoints"))
    assert "every checksum is right" in run("checkpoint", "verify", f"--workdir={workdir}")
    both = ("checkpoint", "diff", "24", str(local / "checkpoints" / "24"), f"--workdir={workdir}", "--values")
    assert "no difference" in run(*both)

    export = ("convert", "--from=difftx", "--to=hf")
    run(*export, f"--input={workdir}", f"--out={workdir}/export")
    run(*export, f"--input={local}", f"--out={tmp_path}/export")
    assert objects.describe_below(workdir / "export").keys() == {path.name for path in (tmp_path / "export").iterdir()}
    weights = "model.safetensors"
    assert read_file(workdir / "export" / weights) == (tmp_path / "export" / weights).read_bytes()
    run("convert", "--from=hf", "--to=difftx", f"--input={workdir}/export", f"--out={workdir}/imported",
        "--config=configs/quickstart.py", f"--config.data.path={text}")  # fmt: skip
    imported = run("generate", f"--workdir={workdir}/imported", *flags)
    assert imported == run("generate", f"--workdir={local}", *flags)
    started = train(text, workdir / "second", checkpoint__init_from=workdir, train__steps=4)
    assert f"parameters from {workdir}/checkpoints/24" in started.stdout, started.stdout + started.stderr
