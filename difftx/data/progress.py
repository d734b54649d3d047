"""How far a long command is: a bar in a terminal, a line every ten seconds elsewhere."""

import time

import rich.console
import rich.progress

LINE_SECONDS = 10.0


class Progress:
    """Shows the share of the input that is done, MB/s of text, tokens/s and the time left. A context manager."""

    def __init__(self, total_bytes: int, done_bytes: int):
        """Start a display.

        Args:
            total_bytes: of the input, as stored.
            done_bytes: of it, by an earlier run.
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
        """Count a finished piece."""
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
        """Print a line, above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
