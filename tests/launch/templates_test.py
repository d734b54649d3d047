"""Job files that `difftx sweep --launcher` writes. The tests parse them, and run them with stubs of their tools."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml
from conftest import ROOT
from helpers.cases import marked

from difftx.commands import sweep, train
from difftx.errors import UserError
from difftx.launch.jobs import GPU_XLA_FLAGS, LAUNCHERS, TEMPLATES
from difftx.storage.paths import LIBRARIES

NAME = "diff-1.4b-seed0"
USER = 1000  # User id in the images.
# A text that would escape from simple quotes, in the names and settings of jobs.
HOSTILE = """ a'b "c" $HOME $(HOME) $$ $(touch pwned) `touch pwned` ; touch pwned # \\ %j {x: [y]} & | * é """.strip()
OUT, MOUNT = f"runs/{HOSTILE}", f"/mnt/{HOSTILE}"
DATA = f"{MOUNT}/data {HOSTILE}"
SETTINGS = {
    "slurm": ["nodes=2", "gpus=8", "cpus=12", "time=24:00:00"],
    "jobset": ["slices=2", "hosts=16", "chips=4", "accelerator=tpu-v5p-slice", "topology=4x4x4"],
    "jobset-gpu": ["nodes=4", "gpus=8", "accelerator=nvidia-h100-80gb"],
    "tpu-vm": ["tpu=pod", "zone=us-east5-a", "directory=difftx", "mount=/mnt/shared", "restarts=3"],
}
MESH = {"jobset": ["--config.mesh.slices=2", "--config.mesh.data=2"]}  # Launcher → flags for its settings.
for jobset in ("jobset", "jobset-gpu"):
    SETTINGS[jobset] += ["image=example.org/difftx:1", "restarts=3", "mount=/mnt/shared", "claim=shared"]
TEXTS = {name: f"{name}: {HOSTILE}" for name in ("image", "claim", "accelerator")} | {"time": HOSTILE, "mount": MOUNT}
TEXTS |= {"tpu": f"tpu {HOSTILE}", "zone": f"zone {HOSTILE}"}
TEXTS["directory"] = HOSTILE.replace(":", "")  # The directory becomes an entry of PATH.

# A program that records its arguments and exits with the next of the listed codes.
STUB = f"""#!{sys.executable}
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["STUBS"])
with (folder / (pathlib.Path(sys.argv[0]).name + ".calls")).open("a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
code, *rest = (folder / "codes").read_text().split()
(folder / "codes").write_text(" ".join(rest))
sys.exit(int(code))
"""


class Stubs:
    """Executables at the front of PATH that record their calls."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "bin").mkdir()

    def put(self, name, text=STUB, folder="bin"):
        path = self.folder / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def calls(self, name):
        return [json.loads(line) for line in (self.folder / f"{name}.calls").read_text().splitlines()]

    def end_with(self, codes):
        (self.folder / "codes").write_text(codes)


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    monkeypatch.setenv("STUBS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return Stubs(tmp_path)


@pytest.fixture
def write(tmp_path, monkeypatch, capsys):
    """Return a function: launcher → job file of the first run. It checks that the printed commands submit the files.

    No command in the names and settings may run.
    """
    folder = tmp_path / HOSTILE
    folder.mkdir()
    monkeypatch.chdir(folder)

    def write(launcher):
        grid = ["size=1.4b", "architecture=diff,transformer", "seed=0"]
        flags = [f"--config={ROOT}/configs/scaling.py", f"--out={OUT}", f"--config.data.path={DATA}"]
        flags += MESH.get(launcher, [])
        settings = dict(setting.split("=", 1) for setting in SETTINGS[launcher])
        given = [f"{name}={TEXTS.get(name, value)}" for name, value in settings.items()]
        assert sweep.main([*flags, "--grid", *grid, f"--launcher={launcher}", "--set", *given]) == 0
        commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
        files = sorted((folder / OUT / "jobs").iterdir())
        assert [file.stem for file in files] == [NAME, NAME.replace("diff", "transformer")]
        submit = shlex.split(LAUNCHERS[launcher].submit)
        assert commands == [[*submit, str(file.relative_to(folder))] for file in files]
        return files[0]

    yield write
    assert not list(tmp_path.rglob("pwned"))


def check_flags(flags, config, workdir):
    """Compare flags with their expected values, and check that train.py accepts them."""
    assert flags[:2] == [f"--config={config}:diff-1.4b", f"--workdir={workdir}"]
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train.main([*flags, "--print_config"]) == 0
    result = json.loads(printed.getvalue())
    assert (result["model"]["d_model"], result["data"]["path"]) == (2048, DATA)


def run_script(file):
    subprocess.run(["bash", "-n", file], check=True)
    return subprocess.run(["bash", file], timeout=60, check=False).returncode


def test_xla_knows_the_flags_of_jobs_on_gpus(stubs, write, monkeypatch):
    """A process with a flag that XLA does not know ends when it opens its devices."""
    job, report = write("slurm"), "import jax, os; jax.devices(); print(os.environ['XLA_FLAGS'])"
    monkeypatch.setenv("XLA_FLAGS", mine := "--xla_gpu_enable_latency_hiding_scheduler=false")
    stubs.put("srun", f"#!{sys.executable}\n{report}\n")
    found = subprocess.run(["bash", job], capture_output=True, text=True, check=True).stdout
    assert found.rstrip() == f"{GPU_XLA_FLAGS} {mine}"  # The last value of a flag counts.


@pytest.mark.parametrize(
    ("codes", "starts", "end"),
    marked([("75 75 0", 3, 0), ("2", 1, 2), ("1", 1, 1)], fast=[("75 75 0", 3, 0)], exhaustive=[("1", 1, 1)]),
)
def test_slurm_queues_the_job_again_after_75(codes, starts, end, stubs, write, tmp_path, monkeypatch):
    job = write("slurm")
    stubs.put("srun")
    stubs.put("scontrol", '#!/bin/sh\necho "$@" >> "$STUBS/requeued"\n')
    stubs.end_with(codes)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    requeued = tmp_path / "requeued"
    code = run_script(job)
    while requeued.exists() and len(stubs.calls("srun")) < 9:  # Restart a requeued job, as Slurm does.
        assert requeued.read_text() == "requeue 42\n"
        requeued.unlink()
        code = run_script(job)
    calls = stubs.calls("srun")
    assert (len(calls), code) == (starts, end)
    program = calls[0].index(sys.executable)
    assert calls[0][program + 1 : program + 4] == ["-m", "difftx", "train"]
    assert calls[0][-1] == "--distributed"
    check_flags(calls[0][program + 4 : -1], ROOT / "configs" / "scaling.py", f"{tmp_path}/{HOSTILE}/{OUT}/{NAME}")


def sbatch_options(lines):
    """Parse the lines with #SBATCH. In double quotes, Slurm and a shell treat backslashes and quotes alike."""
    words = [shlex.split(line.removeprefix("#SBATCH")) for line in lines if line.startswith("#SBATCH")]
    return {name: value for (word,) in words for name, _, value in [word.removeprefix("--").partition("=")]}


def test_the_slurm_script_requests_the_nodes_of_the_flags(write, tmp_path):
    lines = write("slurm").read_text().splitlines()
    assert sbatch_options(lines) == {
        "job-name": NAME,
        "output": f"{tmp_path}/{HOSTILE}/{OUT}/jobs/{NAME}".replace("%", "%%") + "-%j.out",
        "open-mode": "append",
        "nodes": "2",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "cpus-per-task": "12",
        "time": HOSTILE,
        "requeue": "",
        "signal": "TERM@120",
    }
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in lines[first_command:])  # sbatch ignores options after it.


def test_a_cancelled_slurm_job_is_not_queued_again(stubs, write, tmp_path):
    """`scancel` sends SIGTERM to the script and to the tasks, and the tasks exit with 75."""
    job = write("slurm")
    stubs.put("srun", "#!/bin/sh\nkill -TERM $PPID\nexit 75\n")
    stubs.put("scontrol", '#!/bin/sh\ntouch "$STUBS/requeued"\n')
    assert run_script(job) == 75
    assert not (tmp_path / "requeued").exists()


VENV = f"home/{TEXTS['directory']}/.venv/bin"
# Stub of `gcloud … ssh --command=…` that runs the command in a local shell instead of the worker's.
GCLOUD = f"""#!{sys.executable}
import os, subprocess, sys
command, = (a.removeprefix("--command=") for a in sys.argv if a.startswith("--command="))
named = [{TEXTS["tpu"]!r}, "--zone=" + {TEXTS["zone"]!r}]
assert sys.argv[1:8] == ["compute", "tpus", "tpu-vm", "ssh", *named, "--worker=all"], sys.argv
sys.exit(subprocess.run(["bash", "-c", command], cwd=os.environ["HOME"]).returncode)
"""


@pytest.mark.parametrize(
    ("codes", "starts", "end"),
    [("75 134 137 0", 4, 0), ("1 1 1 1", 4, 1), ("2", 1, 2), ("75 255", 2, 255)],  # restarts=3.
)
def test_tpu_vm_starts_again_as_a_jobset_does(codes, starts, end, stubs, write):
    job = write("tpu-vm")
    stubs.put("gcloud", GCLOUD)
    stubs.put("python", STUB, folder=VENV)
    stubs.end_with(codes)
    assert run_script(job) == end
    calls = stubs.calls("python")
    assert len(calls) == starts
    program, *flags, distributed = calls[0]
    assert (program, distributed) == ("train.py", "--distributed")
    check_flags(flags, "configs/scaling.py", f"{MOUNT}/{OUT}/{NAME}")


def test_tpu_vm_is_stopped_on_all_workers(stubs, write, tmp_path):
    job = write("tpu-vm")
    stubs.put("gcloud", GCLOUD)
    # `python` waits for SIGTERM and exits with 75. `pkill` records its pattern and signals only this process.
    stubs.put(
        "python",
        """#!/bin/bash
trap 'kill $!; exit 75' TERM
sleep 300 &
echo $$ > "$STUBS/pid"
tr '\\0' ' ' < /proc/$$/cmdline | sed 's|/bin/bash .*bin/python|python|' > "$STUBS/command_line"
touch "$STUBS/ready"
wait
""",
        folder=VENV,
    )
    stubs.put("pkill", '#!/bin/sh\nprintf "%s" "$3" > "$STUBS/pattern"\nkill -TERM $(cat "$STUBS/pid")\n')
    process = subprocess.Popen(["bash", str(job)])
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    pattern = (tmp_path / "pattern").read_text()
    assert re.search(pattern, (tmp_path / "command_line").read_text())
    assert not re.search(pattern, f"bash -c pkill -TERM -f '{pattern}'")  # The pattern does not match pkill itself.
    other = (tmp_path / "command_line").read_text().replace("seed0 ", "seed01 ")
    assert not re.search(pattern, other)


def outcome(job_set, exit_codes):
    """Return how often Kubernetes starts the pods if they end with these codes, and whether the JobSet succeeds.

    A Job fails with the reason PodFailurePolicy if a rule of its podFailurePolicy matches, else with
    BackoffLimitExceeded, because its backoffLimit is 0. A JobSet follows its first rule for the reason. Without such a
    rule, it recreates all jobs, at most maxRestarts times.
    """
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    policy = job_set["spec"]["failurePolicy"]
    assert job["backoffLimit"] == 0
    for starts, code in enumerate(exit_codes, 1):
        if code == 0:
            return starts, True
        rules = [rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
        assert all(rule["operator"] == "In" and rule["containerName"] == "train" for rule in rules)
        matched = any(code in rule["values"] for rule in rules)
        reason = "PodFailurePolicy" if matched else "BackoffLimitExceeded"
        actions = [rule["action"] for rule in policy["rules"] if reason in rule["onJobFailureReasons"]]
        if "FailJobSet" in actions or starts > policy["maxRestarts"]:
            return starts, False
    raise AssertionError("the pods would be started once more")


def kubernetes_expanded(text):
    """Expand variables like k8s.io/kubernetes/third_party/forked/golang/expansion. Only HOME is set."""
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda m: "$" if m[1] == "$" else ("7" if m[2] == "HOME" else m[0]), text)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["jobset", "jobset-gpu"])
def test_a_jobset_restarts_after_the_exit_codes_of_interruptions(launcher, stubs, write):
    job_set = yaml.safe_load(write(launcher).read_text())
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job_set["metadata"]["name"] == "diff-1-4b-seed0"  # Part of host names, so without dots.
    assert outcome(job_set, [75, 75, 0]) == (3, True)
    assert outcome(job_set, [137, 0]) == (2, True)
    assert outcome(job_set, [2]) == (1, False)
    assert outcome(job_set, [1, 1, 1, 1]) == (4, False)

    (group,) = job_set["spec"]["replicatedJobs"]
    job, pod = group["template"]["spec"], group["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120  # As docs/operations.md says.
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy requires this value.
    assert pod["securityContext"]["fsGroup"] == USER
    assert pod["securityContext"]["runAsNonRoot"]
    assert "cloud.google.com/gke-spot" not in pod["nodeSelector"]
    (container,) = pod["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["volumeMounts"][0]["mountPath"] == MOUNT
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == TEXTS["claim"]
    assert container["image"] == TEXTS["image"]
    assert TEXTS["accelerator"] in pod["nodeSelector"].values()
    counts = (group["replicas"], job["parallelism"], job["completions"])
    limits = container["resources"]["limits"]
    stubs.put("python")
    stubs.end_with("75")
    arguments = [kubernetes_expanded(text) for text in container["args"]]
    command = subprocess.run([*container["command"], *arguments], env=os.environ | {"JOB_COMPLETION_INDEX": "3"})
    assert command.returncode == 75
    ((program, *flags),) = stubs.calls("python")
    assert program == "train.py"
    if launcher == "jobset":
        assert (counts, limits) == ((2, 16, 16), {"google.com/tpu": 4})
        assert flags.pop() == "--distributed"
    else:
        assert (counts, limits) == ((1, 4, 4), {"nvidia.com/gpu": 8})
        assert container["env"] == [{"name": "XLA_FLAGS", "value": GPU_XLA_FLAGS}]
        # The host name that an indexed job of a JobSet gives its first pod.
        address = "--coordinator=diff-1-4b-seed0-slice-job-0-0.diff-1-4b-seed0:8476"
        assert flags[-3:] == [address, "--processes=4", "--process=3"]
        del flags[-3:]
    check_flags(flags, "configs/scaling.py", f"{MOUNT}/{OUT}/{NAME}")


def write_in_bucket(launcher, out, *more):
    """Return the job file of a run in a bucket."""
    settings = [setting for setting in SETTINGS[launcher] if setting.partition("=")[0] not in ("mount", "claim")]
    flags = [f"--config={ROOT}/configs/scaling.py", f"--out={out}", "--config.data.path=gs://bucket/store"]
    grid = ["--grid", "size=1.4b", "architecture=diff", "seed=0"]
    flags += [*MESH.get(launcher, []), *grid, f"--launcher={launcher}"]
    assert sweep.main([*flags, "--set", *settings, *more]) == 0
    (job,) = (ROOT.__class__("jobs") / out.replace("://", "/")).iterdir()
    return job


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_in_a_bucket_needs_no_volume_no_library_and_no_credentials(launcher, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(LIBRARIES, "gs", ("a_library_that_is_missing", "gcs"))
    secrets = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS")
    for name in secrets:
        monkeypatch.setenv(name, "a-secret-that-nothing-writes")
    monkeypatch.chdir(tmp_path)
    job = write_in_bucket(launcher, "gs://bucket/deep/scaling")
    assert capsys.readouterr().out == f"{LAUNCHERS[launcher].submit} jobs/gs/bucket/deep/scaling/{job.name}\n"
    text = job.read_text()
    assert f"--workdir=gs://bucket/deep/scaling/{NAME} --config.data.path=gs://bucket/store" in text
    assert "secret" not in text
    assert not re.search("shared( volume)?$|mnt|claim|{%|%}", text, re.MULTILINE)
    if job.suffix == ".yaml":
        pod = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}] if launcher == "jobset-gpu" else None
        assert pod.get("volumes") == volumes
        assert "fsGroup" not in pod["securityContext"]
        job = yaml.safe_load(write_in_bucket(launcher, "gs://bucket/scaling", "spot=true").read_text())
        pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
        assert {"key": "cloud.google.com/gke-spot", "operator": "Exists"} in pod["tolerations"]
    else:
        subprocess.run(["bash", "-n", job], check=True)


@pytest.mark.parametrize("extra", ["cuda", "tpu"])
def test_a_dockerfile_pins_its_base_and_runs_without_root(extra):
    lines = (TEMPLATES / f"{extra}.Dockerfile").read_text().splitlines()
    instructions = [line for line in lines if line and not line.startswith("#")]
    # A release of Python on a release of Debian.
    assert re.fullmatch(r"FROM python:3\.12\.\d+-slim-\w+", instructions[0])
    assert instructions[-1] == f"USER {USER}"
    assert any(line.startswith("RUN pip install") and "--constraint constraints.txt" in line for line in lines)
    copied = [name for line in instructions if line.startswith("COPY") for name in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"configs", "difftx", "train.py", "eval.py", "pyproject.toml", "requirements.txt"} <= set(copied)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--launcher=slurn"], "Did you mean 'slurm'"),
        (["--launcher=slurm"], "slurm: give --set cpus=… gpus=… nodes=… time=…"),
        (["--launcher=tpu-vm", "--set", "tpu=pod", "zone=z", "directory=d"], "give --set mount=… restarts=…"),
        (["--launcher=slurm", "--set", "node=2"], "asks for no such thing. Did you mean 'nodes'"),
        (["--launcher=slurm", "--set", "nodes"], "'nodes' is not understood"),
        (["--set", "nodes=2"], "requires --launcher"),
        (["--launcher=jobset", "--set", *SETTINGS["jobset"], "mount=m"], "'mount=m': given twice"),
        (["--launcher=jobset", *MESH["jobset"], "--set", *SETTINGS["jobset"]], "out: not below mount=/mnt/shared"),
        (
            ["--launcher=jobset", "--set", *(s.replace("chips=4", "chips=8") for s in SETTINGS["jobset"])],
            "hosts=16 chips=8 topology=4x4x4: 128 chips per slice, but the topology has 64",
        ),
        (["--launcher=jobset", "--set", *SETTINGS["jobset"]], "slices=2, but mesh.slices=1; give --config.mesh.sl"),
        (
            ["--launcher=jobset-gpu", "--config.data.path=/data/*.txt", "--set", *SETTINGS["jobset-gpu"]],
            r"run seed0: data.path=/data/\*.txt: the pods would not have it; give a path below mount=/mnt/shared",
        ),
        (["--launcher=slurm", "--set", *SETTINGS["slurm"], "spot=true"], "spot=…: slurm asks for no such thing"),
        (["--launcher=slurm", "--set", "nodes=2; rm"], "--set nodes=2; rm: not a count; write an integer"),
    ],
)
def test_mistakes_in_flags_are_named_before_a_file_is_written(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=message):
        sweep.main(["--config=configs/quickstart.py", "--grid", "seed=0", f"--out={tmp_path / 'out'}", *flags])
    assert not (tmp_path / "out").exists()


def test_a_job_elsewhere_needs_a_config_of_the_repository(tmp_path):
    config = tmp_path / "own.py"
    config.write_text((ROOT / "configs" / "quickstart.py").read_text())
    flags = ["--grid", "seed=0", "--out=out", "--launcher=tpu-vm", "--set", *SETTINGS["tpu-vm"]]
    with pytest.raises(UserError, match="a job elsewhere would not have it"):
        sweep.main([f"--config={config}", *flags])


def test_a_job_elsewhere_has_the_configs_of_difftx(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--grid", "seed=0", "--out=out", "--launcher=tpu-vm", "--set", *SETTINGS["tpu-vm"]]
    assert sweep.main(["--config=quickstart:diff", *flags]) == 0
    (job,) = (tmp_path / "out" / "jobs").iterdir()
    assert "python train.py --config=quickstart:diff " in job.read_text()


@pytest.mark.parametrize("launcher", ["jobset", "jobset-gpu"])
def test_a_job_of_a_run_whose_name_begins_with_a_digit_has_a_valid_name(launcher, tmp_path, monkeypatch):
    """JobSet refuses a name that is not a DNS label of RFC 1035."""
    monkeypatch.chdir(tmp_path)
    flags = [f"--config={ROOT}/configs/transfer.py", "--out=out", "--config.data.path=/mnt/shared/*.txt"]
    flags += [*MESH.get(launcher, []), "--grid", "task=0.1m", "arm=diff", f"--launcher={launcher}", "--set"]
    assert sweep.main([*flags, *SETTINGS[launcher]]) == 0
    (job,) = (tmp_path / "out" / "jobs").iterdir()
    assert job.stem == "0.1m-diff"
    assert "--workdir=/mnt/shared/out/0.1m-diff" in job.read_text()
    name = yaml.safe_load(job.read_text())["metadata"]["name"]
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert name.endswith("0-1m-diff")
