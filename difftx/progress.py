"""Progress displays for long commands: a bar in a terminal, and a line every ten seconds elsewhere."""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

import rich.console
import rich.progress

from difftx.errors import printable

LINE_SECONDS = 10.0

Item = TypeVar("Item")


class Work:
    """A context manager that displays nested tasks, each with the share done and the time left."""

    def __init__(self, *, enabled: bool = True, on_advance: Callable[[], None] = lambda: None):
        """Create a display, which shows nothing unless `enabled`. `on_advance` is called at every advance of a task."""
        self._on_advance = on_advance
        self._console = rich.console.Console(stderr=True)
        self._plain = enabled and not self._console.is_terminal
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not enabled or self._plain,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextlib.contextmanager
    def task(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a task of `total` parts; yield a function `advance(n)` for the block to call after n more parts."""
        bar, done = self._bars.add_task(what, total=total), 0
        start = printed = time.monotonic()

        def advance(parts: int) -> None:
            nonlocal done, printed
            done += parts
            self._on_advance()
            self._bars.update(bar, completed=done)
            now = time.monotonic()
            if self._plain and done < total and now - printed >= LINE_SECONDS:
                printed = now
                left = datetime.timedelta(seconds=round((now - start) * (total - done) / max(done, 1)))
                self._console.print(f"{what}: {done:,} of {total:,}, {left} left", markup=False, highlight=False)

        try:
            yield advance
        finally:
            self._bars.remove_task(bar)

    def track(self, items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
        """Yield `items`, of which there are `total`, and show their progress as a task."""
        with self.task(what, total) as advance:
            for item in items:
                yield item
                advance(1)


class Progress:
    """A context manager that displays the share of the input done, MB/s of text, tokens/s and the time left."""

    def __init__(self, total_bytes: int, done_bytes: int):
        """Create the display.

        Args:
            total_bytes: Size of the input as stored.
            done_bytes: Bytes of the input that an earlier run has finished.
        """
        self._console = rich.console.Console(stderr=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[rate]}"),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("tokenising", total=total_bytes, completed=done_bytes, rate="")
        self._total, self._before, self._input = total_bytes, done_bytes, 0
        self._text, self._tokens = 0, 0
        self._start = self._printed = time.monotonic()

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, *, input_bytes: int, text_bytes: int, tokens: int) -> None:
        """Count a finished unit."""
        self._input += input_bytes
        self._text += text_bytes
        self._tokens += tokens
        now = time.monotonic()
        seconds = max(now - self._start, 1e-9)
        rate = f"{self._text / seconds / 1e6:.1f} MB/s, {self._tokens / seconds:,.0f} tokens/s"
        self._bar.update(self._task, advance=input_bytes, rate=rate)
        if not self._console.is_terminal and now - self._printed >= LINE_SECONDS:
            self._printed = now
            done = self._before + self._input
            left = (self._total - done) * seconds / max(self._input, 1)
            self.say(f"{done / self._total:.0%} of {self._total / 1e6:,.1f} MB, {rate}, {left:,.0f} s left")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
