"""Errors with a one-line message for the user, and the exit codes of commands (docs/files.md)."""

import difflib
import errno
import importlib
import importlib.util
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from difftx.console import prepare_streams, restart_with_huge_pages

EXIT_FAILED = 1  # Also Python's exit code after an exception.
EXIT_BAD_INPUT = 2
EXIT_PREEMPTED = 75  # A signal stopped the run. The same command resumes it. EX_TEMPFAIL in sysexits.h.
MAX_MESSAGE_CHARACTERS = 1500  # Longer error messages are truncated.
# Control characters (except tab and newline), bidirectional controls, and surrogates, which UTF-8 cannot encode.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
SOURCE = Path(__file__).parents[1]  # The source tree, or site-packages if difftx was installed without -e.

# Operating system errors that the user can fix → what to do. Other errors may be temporary.
FIXES = {
    errno.ENOENT: "check the path",
    errno.EACCES: "change its permissions, or use another path",
    errno.ENOTDIR: "name a folder, or a path below one",
    errno.EISDIR: "name a file",
    errno.EROFS: "use a path on a file system that can be written",
    **dict.fromkeys((errno.EEXIST, errno.ENOTEMPTY), "delete it, or use another path"),
    **dict.fromkeys((errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL), "use another path"),
    **dict.fromkeys((errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP), "use another path"),
}
SPACE = (errno.ENOSPC, errno.EDQUOT)
# Errors that may go away without a fix. They are shown without a traceback, even if the error names no file.
TEMPORARY = (*SPACE, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)
_addresses: dict[str, str] = {}  # Local folder → address that messages show instead (`note_copy`).


class _OneLineError(Exception):
    """An error that is shown as one printable line of limited length, because it may quote untrusted files."""

    def __init__(self, message: str):
        line = printable(" ".join(message.splitlines()))
        super().__init__(line if len(line) <= MAX_MESSAGE_CHARACTERS else f"{line[:MAX_MESSAGE_CHARACTERS]} …")


class UserError(_OneLineError, ValueError):
    """A mistake in a config, a path or an input file. The message names the field or file, its value, and the fix."""


class RunError(_OneLineError, RuntimeError):
    """A failure that the user did not cause, such as a full disk. The message names the cause."""


class UnreadableError(RunError):
    """A file or folder could not be read, even after retries. Its contents may be intact and were not changed."""


def note_copy(folder: str, address: str) -> None:
    """Make messages show `address` in place of the local folder that holds a copy of its files."""
    _addresses[folder] = address


def printable(text: str) -> str:
    r"""Make a text safe to print to a terminal: escape control characters except \t and \n, for example as \x1b.

    Also replace local copies of folders by their addresses (`note_copy`).
    """
    for folder, address in _addresses.items():
        text = text.replace(folder, address)
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def read_error(error: BaseException, message: str) -> UserError | UnreadableError:
    """Convert the error of a failed read to an `UnreadableError` if the read may succeed later, else a `UserError`."""
    if isinstance(error, OSError) and error.errno in TEMPORARY:
        return UnreadableError(f"{message}; when that has passed, run the same command again")
    return UserError(message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint: " Did you mean 'X'?" if a known name is similar to `name`, or else a list of all known names.

    If the names are only a little similar, such as "export" and "report", the hint has both.
    """
    known = sorted(known)
    close = closest(name, known)
    guess = f" Did you mean {close!r}?" if close else ""
    return guess if closest(name, known, cutoff=0.7) else f"{guess} Known: {', '.join(known)}."


def closest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name that is most similar to `name`, or None if no known name is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)), None)


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml for this Python."""
    # Install from the source tree, because a package index may contain another project named difftx.
    source, where = (SOURCE, "") if (SOURCE / "pyproject.toml").is_file() else (".", " (in difftx's source tree)")
    return f"{shlex.quote(sys.executable)} -m pip install -e {shlex.quote(f'{source}[{extra}]')}{where}"


def require_extra(module: str, extra: str) -> None:
    """Raise `UserError` with the install command if an optional library is missing. Do not import the library."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{module} is not installed: {install_hint(extra)}")


def import_extra(module: str, extra: str) -> Any:
    """Import an optional library. If it is missing, raise `UserError` with the install command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{module} is not installed: {install_hint(extra)}") from error


def explained(error: BaseException) -> UserError | RunError | None:
    """Convert an exception to a `UserError` or `RunError` that explains it in one line. None: show a traceback."""
    if isinstance(error, UserError | RunError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("difftx"):
        return UserError(f"{sys.executable} has no module {error.name!r}: {_how_to_get(error.name)}")
    if not isinstance(error, OSError) or (error.filename is None and error.errno not in TEMPORARY):
        return None
    what = str(error.strerror) if error.filename is None else f"{error.filename}: {error.strerror}"
    if error.errno in FIXES:
        return UserError(f"{what}; {FIXES[error.errno]}")
    fix = "make room, then" if error.errno in SPACE else "when that has passed,"
    return RunError(f"{what}; {fix} run the same command again")


def _how_to_get(module: str) -> str:
    if module == "fcntl":
        return "difftx runs on Linux and macOS; on Windows, use the Windows Subsystem for Linux"
    requirements = SOURCE / "requirements.txt"
    if not requirements.is_file():
        return "install the wheel of difftx again, with its dependencies"
    return (
        f"run `make quickstart` in {SOURCE} and use its .venv/bin/python, or install the requirements: "
        f"{shlex.quote(sys.executable)} -m pip install -r {shlex.quote(str(requirements))}"
    )


def shown(value: Any) -> str:
    """Return the `repr` of a value for a message. Shorten a SHA-256 to its first digits."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else repr(value)


def run_command(main: Callable[[], int]) -> None:
    """Run a command's `main` and exit with its result. Print known errors as one line instead of a traceback."""
    restart_with_huge_pages()
    prepare_streams()
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()  # If this failed at exit, Python would print a traceback.
        if code == EXIT_PREEMPTED:  # Ignore further signals, which could change the exit code.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        sys.exit(code)
    except Exception as error:
        explanation = explained(error)
        if explanation is None:
            raise
        print(f"error: {explanation}", file=sys.stderr, flush=True)
        if isinstance(error, UserError):
            sys.exit(EXIT_BAD_INPUT)
        # Skip the exit handlers, because a save that is still in progress might print further errors there.
        sys.stdout.flush()
        os._exit(EXIT_BAD_INPUT if isinstance(explanation, UserError) else EXIT_FAILED)
