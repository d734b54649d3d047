"""The start of several processes, barriers, and runs without progress."""

import argparse
import subprocess
import sys

import pytest
from conftest import ROOT

from difftx.config import MultihostConfig
from difftx.errors import UserError
from difftx.parallel import multihost

CONFIG = MultihostConfig(
    initialization_timeout_seconds=5, heartbeat_timeout_seconds=5, barrier_timeout_seconds=5, watchdog_seconds=5
)


def flags(*arguments):
    parser = argparse.ArgumentParser()
    multihost.add_flags(parser)
    return parser.parse_args(arguments)


BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
STEP = BATCH | {"SLURM_STEP_NODELIST": "a,b"}


@pytest.mark.parametrize(
    ("environment", "given", "message"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, [], "one of a TPU pod of 4 processes, .*: add --distributed"),
        (STEP, [], "one of a Slurm job of 2 processes, .*: add --distributed"),
        # A batch script runs once, and Slurm sets most of the variables of its steps for it too.
        (BATCH, [], "one of a Slurm job of 2 processes, .*: write srun before the command, add --distributed"),
        (BATCH, ["--distributed"], "write srun before the command, or omit --distributed"),
        ({}, ["--distributed"], "neither srun, mpirun, GKE nor a TPU pod .*; give --coordinator=HOST:PORT"),
        ({}, ["--process=0"], "give all three"),
        ({}, ["--coordinator=host", "--processes=2", "--process=0"], "--coordinator=host .*: give HOST:PORT"),
    ],
)
def test_a_process_that_cannot_join_is_told_how(monkeypatch, environment, given, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        multihost.start(flags(*given), CONFIG)


def test_start_and_barrier_do_nothing_for_a_single_process():
    multihost.start(flags(), CONFIG)
    multihost.barrier("alone", 1)
    assert multihost.is_primary()


def test_run_without_progress_ends_and_prints_its_stacks():
    program = (
        "import time; from difftx.config import MultihostConfig; from difftx.parallel.heartbeat import Monitor\n"
        "config = MultihostConfig(initialization_timeout_seconds=5, heartbeat_timeout_seconds=5,"
        " barrier_timeout_seconds=2, watchdog_seconds=1)\n"
        "def stuck_in_here():\n    time.sleep(60)\n"
        "with Monitor(config) as monitor:\n    monitor.beat(7)\n    stuck_in_here()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "no step finished for 1 s after step 7 (multihost.watchdog_seconds=1)" in result.stderr
    assert "in stuck_in_here" in result.stderr


BARRIER = """
import argparse, sys, time, jax
from difftx.config import MultihostConfig
from difftx.errors import RunError
from difftx.parallel import multihost
parser = argparse.ArgumentParser(); multihost.add_flags(parser); flags = parser.parse_args()
multihost.start(flags, MultihostConfig(initialization_timeout_seconds=60, heartbeat_timeout_seconds=20,
    barrier_timeout_seconds=60, watchdog_seconds=60))
multihost.barrier("all come", 60)
try:
    if flags.process != 2:
        multihost.barrier("one stays away", 1)
except RunError as error:
    print(error, flush=True)
"""


@pytest.mark.long
def test_barrier_names_the_absent_processes():
    from helpers.processes import free_port

    together = ["--coordinator", f"localhost:{free_port()}", "--processes=3"]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", BARRIER, *together, f"--process={process}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(3)
    ]
    texts = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    for text in texts[:2]:
        assert "barrier 'one stays away': process 2 of 3 did not come within 1 s" in text
    assert "barrier" not in texts[2]
