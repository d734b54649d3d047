"""`train.py` as one process, or as several processes that train together."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from conftest import ROOT, TINY, child_environment

from difftx.training.checkpoint.manifest import MANIFEST, is_note
from helpers.command_server import Command, commands

BARRIER_TIMEOUT_SECONDS = 8  # The heartbeats have the same timeout.
TRAIN_SLOWLY = ("tests/helpers/train_slowly.py",)  # This script runs train.py with slow steps.
JOB = os.getpid()  # Number of the Slurm job.


class Processes:
    """Processes of one run of `train.py`, with numbers from 0."""

    def __init__(
        self,
        text_file,
        workdir,
        logs,
        *,
        devices=4,
        count=2,
        start=(0, 1),
        flags=(),
        own_flags=None,
        script=("train.py",),
        before=(),
        environment=None,
        own_environment=None,
        slurm_step=None,
        **changes,
    ):
        """Start the processes.

        Args:
            text_file: Value of data.path.
            workdir: Folder of the run.
            logs: Folder for the output of the processes.
            devices: Number of CPU devices per process.
            count: Number of processes of the run.
            start: Numbers of the processes to start.
            flags: Flags of train.py for all processes.
            own_flags: Further flags of some processes, by number.
            script: Arguments of Python before the flags.
            before: Words in front of the command line.
            environment: Further variables of all processes.
            own_environment: Further variables of some processes, by number.
            slurm_step: Number of the step of a Slurm job whose tasks the processes are. None without Slurm.
            changes: Fields of the config, with __ for the dot.
        """
        overrides = TINY | {
            "data.path": str(text_file),
            "checkpoint.every_steps": "10",
            "eval.every_steps": "1000",
            "eval.loss_tokens": "512",
            "logging.trackers": "",
            "mesh.fsdp": "-1",
            "multihost.initialization_timeout_seconds": "60",
            "multihost.heartbeat_timeout_seconds": str(BARRIER_TIMEOUT_SECONDS),
            "multihost.barrier_timeout_seconds": str(BARRIER_TIMEOUT_SECONDS),
        }
        overrides |= {name.replace("__", "."): str(value) for name, value in changes.items()}
        flags = [*flags, *(f"--config.{name}={value}" for name, value in overrides.items())]
        self.metrics = workdir / "metrics.jsonl"
        self.logs = [logs / f"{process}.log" for process in range(count)]
        self.running: dict[int, subprocess.Popen | Command] = {}
        together = ["--coordinator", f"localhost:{free_port()}", "--processes", str(count)] if count > 1 else []
        together = together if slurm_step is None else ["--distributed"]
        for process in start[:count]:
            which = ["--process", str(process)] if count > 1 and slurm_step is None else []
            command = [*script, "--config=configs/quickstart.py", f"--workdir={workdir}", *together, *which, *flags]
            command += (own_flags or {}).get(process, ())
            slurm = {} if slurm_step is None else task_of_slurm(slurm_step, process, count)
            own = child_environment(devices) | slurm | (environment or {}) | (own_environment or {}).get(process, {})
            self.running[process] = _start(command, self.logs[process], own, tuple(before))

    def until_step(self, step):
        """Wait until a step is in metrics.jsonl."""
        self._until(lambda: newest_step(self.metrics) >= step)

    def until_checkpoint(self, step):
        """Wait until the checkpoint of a step is committed. Training continues while it is written."""
        manifest = self.metrics.parent / "checkpoints" / str(step) / MANIFEST
        self._until(lambda: manifest.exists() and not is_note(manifest.read_bytes()))

    def _until(self, condition):
        deadline = time.monotonic() + 240
        while not condition():
            for process, popen in self.running.items():
                assert popen.poll() is None, self.logs[process].read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait(self, process, timeout=240):
        """Wait for a process, and return its exit code and output."""
        code = self.running[process].wait(timeout)
        return code, self.logs[process].read_text()

    def kill(self):
        for popen in self.running.values():
            popen.kill()
            popen.wait()


def _start(
    command: Sequence[str], log: Path, environment: Mapping[str, str], before: tuple[str, ...]
) -> subprocess.Popen | Command:
    """Start a command that writes to the file `log`. `-c` requires a new interpreter."""
    log.write_text("")
    if command[0] != "-c":
        return commands(before).start(command, stdout=log, stderr=log, environment=environment)
    with log.open("w") as file:
        return subprocess.Popen(
            [*before, sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def newest_step(metrics: Path) -> int:
    """Return the last step with a training row in metrics.jsonl, or 0 if there is none."""
    text = metrics.read_text(errors="replace") if metrics.exists() else ""
    steps = re.findall(r'^\{"split": "train", "step": (\d+),', text, re.MULTILINE)
    return int(steps[-1]) if steps else 0


def task_of_slurm(step, process, count):
    """Return the environment of a task of a step of Slurm job `JOB`, on this machine."""
    task = {"JOB_ID": JOB, "STEP_ID": step, "STEP_NODELIST": "localhost", "NTASKS": count}
    task |= {"PROCID": process, "LOCALID": process}
    return {f"SLURM_{name}": str(value) for name, value in task.items()}


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
