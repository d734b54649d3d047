"""Progress of a sweep's runs: read from their directories, shown as a table or as lines."""

import dataclasses
import datetime
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import rich.console
import rich.live
import rich.markup
import rich.table

from difftx.errors import printable
from difftx.launch.grid import SweepPoint
from difftx.training.checkpoint.manifest import why_invalid
from difftx.training.metrics import read_newest_metrics

State = Literal["pending", "running", "done", "failed", "stopped"]
PLAIN_LINE_SECONDS = 60.0
PLAIN_WIDTH = 160  # Width of a table in a file or a pipe, in characters; an error message fits.


@dataclasses.dataclass
class RunStatus:
    """State and progress of one run of a sweep."""

    point: SweepPoint
    workdir: Path
    state: State = "pending"
    exit_code: int | None = None  # Exit code of the last process; -N: killed by signal N.
    error: str = ""
    step: int = 0  # Newest step in metrics.jsonl.
    loss: float | None = None  # Training loss at that step, in nats per token.
    tokens_per_second: float | None = None  # Median over the newest attempt's rows.

    @property
    def steps(self) -> int:
        return self.point.config.train.steps

    @property
    def last_checkpoint(self) -> Path:
        """Folder of the last step's checkpoint, which a finished run has."""
        return self.workdir / "checkpoints" / str(self.steps)

    def refresh(self) -> None:
        """Update step, loss and tokens/s from the newest rows of metrics.jsonl."""
        rows = [row for row in read_newest_metrics(self.workdir / "metrics.jsonl") if row["split"] == "train"]
        if rows:
            self.step, self.loss = rows[-1]["step"], rows[-1]["loss"]
            attempt = [row for row in rows if row["attempt"] == rows[-1]["attempt"]]
            self.tokens_per_second = statistics.median(row["tokens_per_second"] for row in attempt)

    def is_finished(self) -> bool:
        """Return whether metrics.jsonl has the last step and its checkpoint's files have the recorded sizes."""
        return self.step == self.steps and why_invalid(self.last_checkpoint, step=self.steps, content=False) is None

    def cells(self) -> list[str]:
        """Return the run's row of the table: name, state, step, loss, tokens/s, time left, error."""
        rate = self.tokens_per_second
        left = ""
        if rate and self.state == "running":
            seconds = (self.steps - self.step) * self.point.config.train.global_batch_tokens / rate
            left = str(datetime.timedelta(seconds=round(seconds)))
        return [
            self.point.name,
            self.state if self.state != "failed" else f"failed ({self.exit_code})",
            f"{self.step}/{self.steps}",
            "" if self.loss is None else f"{self.loss:.4f}",
            "" if rate is None else f"{rate:,.0f}",
            left,
            printable(self.error),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the run's entry in sweep.json."""
        return {
            "name": self.point.name,
            "flags": self.point.flags(self.workdir),
            "steps": self.steps,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("point", "workdir")},
        }


class View:
    """Display of a sweep: a live table in a terminal.

    Elsewhere, a line is printed for each change of state and once per minute, and a table at the end.
    """

    def __init__(self, statuses: Sequence[RunStatus]):
        self._statuses = statuses
        self._printed = time.monotonic()
        terminal = sys.stdout.isatty()
        self._console = rich.console.Console(width=None if terminal else PLAIN_WIDTH)
        # No refresh thread, because the sweep starts processes.
        self._live = rich.live.Live(console=self._console, auto_refresh=False) if terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
        else:
            self._console.print(self._table())

    def update(self, status: RunStatus, changed: bool = False) -> None:
        """Show a run's current numbers; `changed`: its state has changed, so a line is printed in any case."""
        now = time.monotonic()
        if self._live:
            self._live.update(self._table(), refresh=True)
        elif changed or now - self._printed > PLAIN_LINE_SECONDS:
            name, state, steps, loss, rate, left, error = status.cells()
            numbers = [f"loss {loss}"] * bool(loss) + [f"{rate} tokens/s"] * bool(rate) + [f"{left} left"] * bool(left)
            print("  ".join([name, state, steps, *numbers, *[error] * bool(error)]), flush=True)
            self._printed = now

    def _table(self) -> rich.table.Table:
        table = rich.table.Table()
        for title in ("run", "state"):
            table.add_column(title, no_wrap=True)
        for title in ("step", "loss", "tokens/s", "left"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("error", overflow="fold")
        for status in self._statuses:
            table.add_row(*(rich.markup.escape(cell) for cell in status.cells()))
        return table
