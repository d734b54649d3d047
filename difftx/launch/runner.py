"""Training of a sweep's points on this machine, one process after another."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from difftx.errors import EXIT_PREEMPTED, UserError
from difftx.files import write_atomically
from difftx.launch.grid import SweepPoint
from difftx.launch.status import RunStatus, State, View
from difftx.training.checkpoint.checkpointer import config_of
from difftx.training.resume import changed_fields

TRAIN = Path(__file__).parents[2] / "train.py"
TETHERED = Path(__file__).with_name("tethered.py")
POLL_SECONDS = 0.5
# Beginning of a log line that names the reason of a failure. JAX may print a note after it, so it is not always the
# last line.
REASON = re.compile(r"(error|[\w.]*(Error|Exception|Exit|Interrupt))\b")


class Sweep:
    """A sweep that trains its runs one after another, each in its own process, and keeps `sweep.json` up to date."""

    def __init__(self, points: Sequence[SweepPoint], out: Path, description: Mapping[str, Any]):
        """Read the state of the runs that already exist in `out`; `sweep.json` also gets the fields of `description`.

        Raises:
            UserError: A finished run has other settings than its point, or train.py is not installed.
        """
        if not TRAIN.is_file():
            raise UserError(f"{TRAIN}: no such file; a sweep runs from difftx's source tree (pip install -e .)")
        self._statuses = [RunStatus(point, out / point.name) for point in points]
        for status in self._statuses:
            status.refresh()
            _refuse_other_settings(status)
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._description = out, description
        self._view = View(self._statuses)
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Train the unfinished runs.

        Returns:
            Exit code: 0 if all runs are finished, 1 if a run failed, 75 if a signal stopped the sweep.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        with self._view:
            for status in self._statuses:
                status.refresh()
                if status.is_finished():
                    self._set_state(status, "done")
                elif not self._stopping:
                    self._train(status)
        states = {status.state for status in self._statuses}
        print(f"details: {self._out / 'sweep.json'}, and train.log in each run's folder", flush=True)
        if states & {"stopped", "pending"}:
            print("stopped by a signal; run the same command again to continue", flush=True)
            return EXIT_PREEMPTED
        return int("failed" in states)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal as SIGTERM: the run saves and ends after the first, and ends immediately after another."""
        self._stopping = True
        if self._process:
            self._process.terminate()

    def _train(self, status: RunStatus) -> None:
        self._set_state(status, "running")
        code, error = EXIT_PREEMPTED, ""
        # Train again if another process sent the signal that stopped the run.
        while code == EXIT_PREEMPTED and not self._stopping:
            code, error = self._run_process(status)
        status.refresh()
        status.exit_code = code
        if code == 0:
            self._set_state(status, "done")
        elif self._stopping and code in (EXIT_PREEMPTED, -signal.SIGTERM):
            self._set_state(status, "stopped")
        else:
            status.error = error
            self._set_state(status, "failed")

    def _run_process(self, status: RunStatus) -> tuple[int, str]:
        """Run train.py until it ends; return its exit code and the line of output that gives the reason."""
        command = [sys.executable, str(TRAIN), *status.point.flags(status.workdir)]
        status.workdir.mkdir(parents=True, exist_ok=True)
        path = status.workdir / "train.log"
        with path.open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            begin = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(TETHERED), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # The sweep alone receives the terminal's Ctrl-C, and forwards it.
            )
        if self._stopping:  # The signal arrived before the process existed.
            self._process.terminate()
        while True:
            try:
                code = self._process.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                status.refresh()
                self._view.update(status)
        log_text = path.read_bytes()[begin:].decode(errors="replace")
        return code, f"killed by {signal.Signals(-code).name}" if code < 0 else find_reason(log_text)

    def _set_state(self, status: RunStatus, state: State) -> None:
        status.state = state
        self._view.update(status, changed=True)
        content = {**self._description, "runs": [s.as_json() for s in self._statuses]}
        write_atomically(self._out / "sweep.json", json.dumps(content, indent=2) + "\n")


def find_reason(log: str) -> str:
    """Return the line of a failed process's output that gives the reason: the last error, or else the last line."""
    lines = log.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if REASON.match(line)), lines[-1])


def _refuse_other_settings(status: RunStatus) -> None:
    """Raise `UserError` if a finished run, which the sweep would skip, was trained with other settings than its point.

    Unfinished runs need no check: train.py compares settings when it resumes them.
    """
    if not status.is_finished():
        return
    for change in changed_fields(config_of(status.last_checkpoint), status.point.config):
        if not change.is_neutral:
            raise UserError(f"{status.workdir} is finished, but with another {change}; use another --out")
