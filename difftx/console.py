"""Prepare the process of a command: huge pages, and output streams that survive closed terminals and full disks."""

import errno
import io
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

# XLA's CPU backend allocates its temporary buffers again in each step. With pages of 4 KiB, the kernel then prepares
# tens of thousands of pages, which takes a third of a step of the quickstart. Huge pages of 2 MiB avoid this. glibc
# (2.35 and later) requests them if this variable is set when the process starts.
VARIABLE, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # Contains, for example, "always [madvise] never".


class Output(io.FileIO):
    """A file such as standard output that discards all further output after a failed write.

    A failed write ends the command, unless the file is standard error or `is_needed` is False.
    """

    is_needed = True  # Commands that write their results to files set this to False.

    def write(self, data: Any, /) -> int:
        """Write bytes. Raise `OSError` with the file's name, or `SystemExit` if the reader of a pipe has ended."""
        try:
            while (count := super().write(data)) is None:  # None: a non-blocking pipe is full.
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
    """Wrap the file of `stream` in an `Output`. Characters that the encoding lacks are written as "?"."""
    stream.flush()
    buffer = io.BufferedWriter(Output(stream.fileno(), "w", closefd=False))
    at_once = {name: getattr(stream, name) for name in ("line_buffering", "write_through")}
    return io.TextIOWrapper(buffer, stream.encoding, "replace", **at_once)


def prepare_streams() -> None:
    """Protect standard output and standard error, and handle SIGHUP (the terminal was closed) like SIGTERM."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # Closed. Occupy its file descriptor, so that no other file gets it.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
        elif name != "stdin" and stream is getattr(sys, f"__{name}__"):  # Tests replace the streams.
            setattr(sys, name, protected(stream))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # Under nohup, the signal stays ignored.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def restart_with_huge_pages() -> None:
    """Restart this command with huge pages, if Linux provides them on request (madvise).

    The process id stays the same. Call this before the process does any work. If the user has set GLIBC_TUNABLES, do
    nothing.
    """
    try:
        on_request = "[madvise]" in SETTING.read_text()
    except OSError:  # Not Linux, or its kernel has no huge pages.
        return
    if not on_request or VARIABLE in os.environ or not sys.executable:
        return
    os.environ[VARIABLE] = HUGE_PAGES
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
