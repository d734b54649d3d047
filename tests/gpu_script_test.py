"""benchmarks/gpu.sh with programs that only print their arguments, in place of programs that require a GPU."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, TINY

PROGRAMS = {
    "nvidia-smi": "echo NVIDIA TEST, 1.0, 1980 MHz",
    "compute-sanitizer": 'echo sanitizer "$@"',
    "ncu": 'echo ncu "$@"',
    # The sweep is interrupted once, and the tests of the kernels fail.
    "python": """echo python "$@"
case "$*" in
*sweep*) [[ -e $CALLS/swept ]] || { touch $CALLS/swept; exit 75; } ;;
*tests/device*) exit 1 ;;
esac""",
}
PIECES = {
    name: int(seconds)
    for name, seconds in re.findall(
        r"(\w+):(\d+)", re.search(r"^PIECES=\((.*)\)$", (ROOT / "benchmarks/gpu.sh").read_text(), re.MULTILINE)[1]
    )
}


@pytest.fixture
def gpu_sh(tmp_path):
    """Return a function that calls the script and returns its exit code and the records."""
    programs, records = tmp_path / "bin", tmp_path / "records"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)

    def call(*arguments):
        variables = {"PATH": f"{programs}:{os.environ['PATH']}", "OUT": str(records), "CALLS": str(tmp_path)}
        command = ["bash", "benchmarks/gpu.sh", *arguments]
        ended = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
        return ended.returncode, {path.stem.split("_gpu_")[1]: path.read_text() for path in records.glob("*")}

    return call


def test_all_runs_each_piece_once_and_continues_after_a_failure(gpu_sh):
    code, records = gpu_sh("all")
    assert code == 1  # The tests of the kernels failed.
    assert sorted(records) == sorted(PIECES)
    assert "NVIDIA TEST, 1.0" in records["doctor"]
    assert "SM clock" in records["kernels"]
    assert "python -m difftx doctor --config=configs/diff_3b.py:diff" in records["doctor"]
    assert "Exit code 0 after" in records["doctor"]
    assert "Exit code 1 after" in records["tests"]
    assert "python benchmarks/kernels.py" in records["kernels"]
    assert "sanitizer --tool racecheck" in records["racecheck"]
    assert "ncu --clock-control none" in records["ncu"]
    assert gpu_sh("all")[0] == 0  # Each piece has a record of this commit.


def test_three_calls_suffice():
    """Count the calls as the script does, if each piece takes all of its time."""
    left, calls = dict(PIECES), 0
    while left:
        calls, free = calls + 1, 580
        for name, seconds in list(left.items()):
            if seconds <= free:
                free -= left.pop(name)
    assert calls == 3
    assert max(PIECES.values()) < 580


@pytest.mark.long
def test_the_flags_of_doctor_suffice_for_a_training(gpu_sh, tmp_path):
    """Run doctor with a tiny model, on the CPU and without a network.

    Except for the sizes and --workdir, the flags are those of the call on a GPU.
    """
    sizes = [f"--config.{name}={value}" for name, value in TINY.items() if not name.startswith("mesh.")]
    (tmp_path / "bin" / "python").write_text(
        "#!/usr/bin/env bash\n"
        f"JAX_PLATFORMS=cpu TIKTOKEN_CACHE_DIR={tmp_path} https_proxy=http://localhost:9 "
        f'exec {shlex.join([sys.executable])} "$@" --workdir={tmp_path / "run"} {shlex.join(sizes)}\n'
    )
    code, records = gpu_sh("doctor")
    assert code == 0, records
    assert "tokens per second" in records["doctor"]
    assert "Training can start here." in records["doctor"]


def test_one_piece_with_arguments(gpu_sh):
    code, records = gpu_sh("small", "size=10m", "seed=0")
    assert (code, records) == (75, {})
    code, records = gpu_sh("small", "size=10m", "seed=0")
    assert code == 0
    assert "--grid size=10m seed=0 --out=runs/small" in records["small"]


def test_an_unknown_piece_is_refused(gpu_sh):
    code, records = gpu_sh("kernel")
    assert (code, records) == (2, {})
