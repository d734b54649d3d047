"""Train the runs of a sweep on this machine, one process after another, and show their progress."""

import dataclasses
import datetime
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import rich.console
import rich.live
import rich.markup
import rich.table

from difftx.data.loader import signature_changes
from difftx.data.sources import signature_of_stores
from difftx.errors import EXIT_PREEMPTED, UnreadableError, UserError, printable
from difftx.files import appended, make_folder, write_atomically
from difftx.launch.grid import SweepPoint
from difftx.registry import changed_extensions
from difftx.run_files import pulled
from difftx.storage.paths import AnyPath, is_bucket
from difftx.training.checkpoint.manifest import read_manifest, why_invalid
from difftx.training.checkpoint.restoring import config_of
from difftx.training.metrics import read_newest_metrics
from difftx.training.resume import changed_fields

State = Literal["pending", "running", "done", "failed", "stopped"]
TETHERED = Path(__file__).with_name("tethered.py")
POLL_SECONDS = 0.5
BUCKET_REFRESH_SECONDS = 60.0  # Refresh rarely: each refresh costs requests, and metrics change every few minutes.
PLAIN_LINE_SECONDS = 60.0
PLAIN_WIDTH = 160  # Table width in characters if the output is a file or a pipe. Error messages fit.
# Matches the start of a log line that states the reason for a failure. JAX may print a note after that line.
REASON = re.compile(r"(error|[\w.]*(Error|Exception|Exit|Interrupt))\b")


@dataclasses.dataclass
class RunStatus:
    """The state and progress of one run in a sweep."""

    point: SweepPoint
    workdir: AnyPath
    state: State = "pending"
    exit_code: int | None = None  # Exit code of the last process, or -N if signal N killed it.
    error: str = ""
    step: int = 0  # Newest step in metrics.jsonl.
    train_loss: float | None = None  # Training loss at `step`, in nats per token.
    valid_loss: float | None = None  # Newest result of the suite "loss" during training, in nats per token.
    tokens_per_second: float | None = None  # Median over the newest attempt's rows.

    @property
    def steps(self) -> int:
        return self.point.config.train.steps

    @property
    def last_checkpoint(self) -> AnyPath:
        """Folder of the checkpoint at the last step. It exists if the run is finished."""
        return self.workdir / "checkpoints" / str(self.steps)

    def refresh(self) -> None:
        """Update step, losses and tokens/s from the newest rows of metrics.jsonl."""
        try:
            newest = read_newest_metrics(pulled(self.workdir) / "metrics.jsonl")
        except UnreadableError:  # The bucket is not reachable now. Try again at the next refresh.
            return
        for row in newest:
            if row.get("suite") == "loss" and isinstance(loss := row.get("loss"), int | float):
                self.valid_loss = loss
        if rows := [row for row in newest if row["split"] == "train"]:
            self.step, self.train_loss = rows[-1]["step"], rows[-1]["loss"]
            attempt = [row for row in rows if row["attempt"] == rows[-1]["attempt"]]
            self.tokens_per_second = statistics.median(row["tokens_per_second"] for row in attempt)

    def is_finished(self) -> bool:
        """Return whether metrics.jsonl contains the last step and the last checkpoint is complete (by file sizes)."""
        return self.step == self.steps and why_invalid(self.last_checkpoint, step=self.steps, content=False) is None

    def require_unchanged(self) -> None:
        """Raise `UserError` if a finished run was trained with other settings or stores.

        Text files are not compared. Changed fields of `eval` are allowed, but existing results are not computed again.
        """
        manifest = read_manifest(self.last_checkpoint)
        changes = [
            f"extension {change}" for change in changed_extensions(manifest.extensions, str(self.last_checkpoint))
        ]
        if not changes:  # Do not build the config with a changed extension, which may reject it.
            fields = changed_fields(config_of(manifest), self.point.config)
            changes = [str(change) for change in fields if not change.is_neutral]
            stores = signature_of_stores(self.point.config.data)
            stores = {name: value for name, value in stores.items() if name in manifest.data}
            changes += signature_changes({name: manifest.data[name] for name in stores}, stores)
        if changes:
            raise UserError(f"{self.workdir} is finished, but with another {changes[0]}; use another --out")

    def cells(self) -> list[str]:
        """Return the run's table row: name, state, step, losses, tokens/s, time left, error."""
        rate = self.tokens_per_second
        left = ""
        if rate and self.state == "running":
            seconds = (self.steps - self.step) * self.point.config.train.global_batch_tokens / rate
            left = str(datetime.timedelta(seconds=round(seconds)))
        return [
            self.point.name,
            self.state if self.state != "failed" else f"failed ({self.exit_code})",
            f"{self.step}/{self.steps}",
            *("" if loss is None else f"{loss:.4f}" for loss in (self.train_loss, self.valid_loss)),
            "" if rate is None else f"{rate:,.0f}",
            left,
            printable(self.error),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the run's entry for sweep.json."""
        return {
            "name": self.point.name,
            "flags": self.point.flags(self.workdir),
            "steps": self.steps,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("point", "workdir")},
        }


class Sweep:
    """Trains runs one after another, each in its own process, and keeps `sweep.json` up to date.

    A terminal shows a live table of the runs. A file or pipe gets a line at each change of state and every minute, and
    the table at the end.
    """

    def __init__(self, points: Sequence[SweepPoint], out: AnyPath, description: Mapping[str, Any]):
        """Read the state of the runs that already exist in `out`. `description` is written first in `sweep.json`."""
        self._statuses = [RunStatus(point, out / point.name) for point in points]
        for status in self._statuses:
            status.refresh()
            # The sweep skips finished runs, so check their settings here. `difftx train` checks runs that it resumes.
            if status.is_finished():
                status.require_unchanged()
        make_folder(out)
        self._out, self._description = out, description
        # Without automatic refresh, because its thread would be unsafe while the sweep starts processes.
        console = rich.console.Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        self._live = rich.live.Live(self._table(), console=console, auto_refresh=False)
        self._printed = time.monotonic()
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Train the unfinished runs. Return 0 if all runs are finished, 1 if one failed, or 75 after a signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        with self._live:
            for status in self._statuses:
                status.refresh()
                if status.is_finished():
                    self._set_state(status, "done")
                elif not self._stopping:
                    self._train(status)
        if not sys.stdout.isatty():
            print()  # In a file or a pipe, rich does not end the table's last line.
        states = {status.state for status in self._statuses}
        print(f"details: {self._out / 'sweep.json'}, and train.log in each run's folder", flush=True)
        if states & {"stopped", "pending"}:
            print("stopped by a signal; run the same command again to continue", flush=True)
            return EXIT_PREEMPTED
        return int("failed" in states)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Send SIGTERM to the current run, which saves a checkpoint and ends. A second signal ends it immediately."""
        self._stopping = True
        if self._process:
            self._process.terminate()

    def _train(self, status: RunStatus) -> None:
        self._set_state(status, "running")
        code, error = EXIT_PREEMPTED, ""
        # If something other than this sweep stopped the run with a signal, resume it.
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
        """Run `difftx train` until it ends. Return its exit code and the reason for a failure."""
        command = [sys.executable, "-m", "difftx", "train", *status.point.flags(status.workdir)]
        make_folder(status.workdir)
        with appended(status.workdir / "train.log") as path:
            with path.open("ab") as log:
                log.write(f"$ {shlex.join(command)}\n".encode())
                log.flush()
                begin = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(TETHERED), str(os.getpid()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Only the sweep receives Ctrl-C, and forwards it.
                )
            if self._stopping:  # The signal arrived before the process had started.
                self._process.terminate()
            refreshed = time.monotonic()
            while (code := self._process.poll()) is None:
                time.sleep(POLL_SECONDS)
                if not is_bucket(status.workdir) or time.monotonic() - refreshed > BUCKET_REFRESH_SECONDS:
                    status.refresh()
                    refreshed = time.monotonic()
                self._show(status)
            log_text = path.read_bytes()[begin:].decode(errors="replace")
        return code, f"killed by {signal.Signals(-code).name}" if code < 0 else find_reason(log_text)

    def _set_state(self, status: RunStatus, state: State) -> None:
        status.state = state
        self._show(status, is_new_state=True)
        content = {**self._description, "runs": [s.as_json() for s in self._statuses]}
        write_atomically(self._out / "sweep.json", json.dumps(content, indent=2) + "\n")

    def _show(self, status: RunStatus, *, is_new_state: bool = False) -> None:
        self._live.update(self._table(), refresh=True)
        now = time.monotonic()
        if not sys.stdout.isatty() and (is_new_state or now - self._printed > PLAIN_LINE_SECONDS):
            name, state, steps, train, valid, rate, left, error = status.cells()
            losses = train and f"train loss {train}", valid and f"valid loss {valid}"
            numbers = *losses, rate and f"{rate} tokens/s", left and f"{left} left"
            print(*filter(None, (name, state, steps, *numbers, error)), sep="  ", flush=True)
            self._printed = now

    def _table(self) -> rich.table.Table:
        table = rich.table.Table()
        for title in ("run", "state"):
            table.add_column(title, no_wrap=True)
        for title in ("step", "train loss\n(one batch)", "valid loss", "tokens/s", "left"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("error", overflow="fold")
        for status in self._statuses:
            table.add_row(*map(rich.markup.escape, status.cells()))
        return table


def find_reason(log: str) -> str:
    """Find the reason for a failure in a process's output: the last line with an error, or the last line of all."""
    lines = log.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if REASON.match(line)), lines[-1])
