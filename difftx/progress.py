"""Show the progress of long commands: bars in a terminal, or a line every ten seconds in files and pipes."""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import rich.console
import rich.progress

from difftx.errors import printable

LINE_SECONDS = 10.0  # Time between two lines in files and pipes.
LINE = "{what}: {done:,} of {total:,}, {left} left"
Advance = Callable[..., None]  # advance(n, text=""): n more parts are finished. `text` is shown at the bar.


class Work:
    """Displays the progress of tasks, which may be nested. A context manager."""

    def __init__(self, *, enabled: bool = True, on_advance: Callable[[], None] = lambda: None, is_output: bool = False):
        """Create the display. If not `enabled`, it shows nothing. `on_advance` is called when a task advances.

        With `is_output`, write to standard output instead of standard error, and keep finished bars on the screen.
        """
        self._enabled, self._on_advance, self._is_output = enabled, on_advance, is_output
        self._console = rich.console.Console(stderr=not is_output, emoji=False)
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[text]}", markup=False),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not enabled or not self._console.is_terminal,
            transient=not is_output,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextlib.contextmanager
    def task(
        self, what: str, total: int, *, done: int = 0, label: str = "{what}", line: str = LINE
    ) -> Iterator[Advance]:
        """Show a task of `total` parts, and yield a function to call when parts are finished (`Advance`).

        `done` is the number of parts that are finished at the start. `label` formats the text before the bar, with the
        fields `what`, `done` and `total`. `line` formats the lines in files and pipes. It can also use `share` (0 to
        1), `text`, and the time left as `left` (a `timedelta`) or `seconds`.
        """
        description = label.format(what=what, done=done, total=total)
        bar = self._bars.add_task(description, total=total, completed=done, text="")
        before = done
        start = printed = time.monotonic()

        def advance(parts: int, text: str = "") -> None:
            nonlocal done, printed
            done += parts
            self._on_advance()
            if not self._enabled:
                return
            now = time.monotonic()
            seconds = (now - start) * (total - done) / max(done - before, 1)
            left = datetime.timedelta(seconds=round(seconds))
            fields = {"what": what, "done": done, "total": total, "share": done / max(total, 1), "text": text}
            self._bars.update(bar, completed=done, description=label.format(**fields), text=text)
            due = now - printed >= LINE_SECONDS if done < total else self._is_output
            if due and not self._console.is_terminal:
                printed = now
                self.note(line.format(**fields, left=left, seconds=seconds))

        try:
            yield advance
        finally:
            if not self._is_output:
                self._bars.remove_task(bar)

    @contextlib.contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Show that work of unknown duration is in progress. At the end of the block, print how long it took."""
        began = time.monotonic()
        bar = self._bars.add_task(what, total=None, text="")
        if not self._console.is_terminal:
            self.note(f"{what} …")
        yield
        self._bars.remove_task(bar)
        self.note(f"{what}: {time.monotonic() - began:.1f} s")

    def track[Item](self, items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
        """Yield the items, and show the progress as a task of `total` parts."""
        with self.task(what, total) as advance:
            for item in items:
                yield item
                advance(1)

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        if self._enabled and self._console.is_terminal:
            self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
        elif self._enabled:
            print(printable(text), file=self._console.file, flush=True)
