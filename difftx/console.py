"""The process of a command: huge pages, and streams for terminals that close, disks that fill and other encodings."""

import errno
import io
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

# XLA's CPU backend allocates the temporary buffers of a step at each step. With pages of 4 KiB, the kernel prepares
# tens of thousands of pages each time, which takes a third of a step of the quickstart. Linux prepares 2 MiB at a time
# if a process asks for it. glibc (2.35 and later) asks if this variable says so when the process starts.
VARIABLE, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # Such as "always [madvise] never".


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


def restart_with_huge_pages() -> None:
    """Replace this process by the same command with huge pages, where Linux grants them on request.

    The new process keeps the same process id. Call this before the process does any work. If the user has set
    GLIBC_TUNABLES, to any value, this function does nothing.
    """
    try:
        on_request = "[madvise]" in SETTING.read_text()
    except OSError:  # This is not Linux, or a kernel without huge pages.
        return
    if not on_request or VARIABLE in os.environ or not sys.executable:
        return
    os.environ[VARIABLE] = HUGE_PAGES
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
