import errno
import subprocess
import sys

import pytest
from conftest import ROOT

from difftx.errors import RunError, UserError, printable, run_command

HOSTILE = "\x1b]0;title\x07\x9b31m\x7f\x00\r\x0b\u202e\u2066\u200f\udcff"

FULL = """
import threading, time
from difftx.errors import run_command
def main():
    threading.Thread(target=time.sleep, args=[600]).start()  # As a save that is under way.
    raise OSError({number}, "No space left on device", {filename!r})
run_command(main)
"""


@pytest.mark.parametrize(("filename", "shown"), [("run/config.json", "run/config.json: "), (None, "")])
def test_a_full_disk_is_one_line_and_the_end(filename, shown):
    script = FULL.format(number=errno.ENOSPC, filename=filename)
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr == f"error: {shown}No space left on device; make room, then run the same command again\n"


def test_other_errors_of_the_system_keep_their_traceback():
    def main():
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        run_command(main)


def test_what_steers_a_terminal_is_escaped_and_nothing_else():
    escaped = printable(HOSTILE)
    assert escaped == r"\x1b]0;title\x07\x9b31m\x7f\x00\r\x0b\u202e\u2066\u200f\udcff"
    assert escaped.isprintable()
    plain = "a\tb\nnaïve \U0001f468\u200d\U0001f469 日本語 עברית \\x1b"
    assert printable(plain) == plain


@pytest.mark.parametrize("kind", [UserError, RunError])
def test_messages_are_one_printable_line(kind):
    assert str(kind(f"a{HOSTILE}\nb")).isprintable()
    assert len(str(kind("x" * 10**6))) < 2000
