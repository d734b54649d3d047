"""A mistake of the user's, and how a command ends: the exit codes of docs/design.md §6."""

import difflib
import errno
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

EXIT_FAILED = 1  # What Python itself ends with after an exception.
EXIT_BAD_INPUT = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: a checkpoint was saved, run the same command again to continue
LONGEST_MESSAGE = 1500


class UserError(ValueError):
    """A wrong config, path or input file. The message is one line: field or file, value, fix."""

    def __init__(self, message: str):
        """Take the message; a value in it may have come from anywhere, with line breaks or without end."""
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]} …")


class RunError(RuntimeError):
    """A run that cannot go on through no mistake of the user's. The message is one line: what, how often, why."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean X?' for the closest known name, or the known names if none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."


def shown(value: Any) -> str:
    """Return a value as a message has it: a SHA-256 by its first digits."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else repr(value)


def run_command(main: Callable[[], int]) -> None:
    """Run a command's `main`: a `UserError` becomes one line and exit code 2, a `RunError` or a full disk one and 1."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except RunError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = f"{error.filename}: " if error.filename else ""
        _fail(f"{what}{error.strerror}; make room, then run the same command again")


def _fail(line: str) -> None:
    """End at once: a save that is still under way would bury the line under its own errors."""
    print(f"error: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_FAILED)
