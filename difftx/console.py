"""Standard output and standard error of a command, for terminals that close, disks that fill and other encodings."""

import errno
import io
import os
import select
import signal
import sys
from typing import Any, TextIO


class Output(io.FileIO):
    """A file such as standard output. After a failed write, it discards everything.

    A failure ends the command, unless the file is standard error or `is_needed` is False.
    """

    is_needed = True  # Commands whose results are in files set this to False.

    def write(self, data: Any, /) -> int:
        """Write bytes. Raise an `OSError` with a file name, or `SystemExit` if the reader of a pipe has ended."""
        try:
            while (count := super().write(data)) is None:  # A pipe that does not block is full.
                select.select((), (self,), ())
            return count
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.fileno() != 2 and self.is_needed:
                if error.errno == errno.EPIPE:
                    raise SystemExit(1) from None
                raise OSError(error.errno, error.strerror, "standard output") from None
            if self.fileno() != 2:
                print(f"standard output: {error.strerror}; continuing without it", file=sys.stderr, flush=True)
            return len(data)


def protected(stream: TextIO) -> TextIO:
    """Return a stream that writes to the file of `stream` as an `Output`, with "?" for what the encoding lacks."""
    stream.flush()
    buffer = io.BufferedWriter(Output(stream.fileno(), "w", closefd=False))
    at_once = {name: getattr(stream, name) for name in ("line_buffering", "write_through")}
    return io.TextIOWrapper(buffer, stream.encoding, "replace", **at_once)


def prepare_streams() -> None:
    """Protect standard output and standard error, and make SIGHUP, the end of the terminal, act as SIGTERM."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # It is closed. Open a file, because the next one that is opened gets its number.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
        elif name != "stdin" and stream is getattr(sys, f"__{name}__"):  # Tests replace the streams.
            setattr(sys, name, protected(stream))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores the signal.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
