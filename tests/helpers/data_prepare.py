"""Calls of `difftx prepare` as a user makes them, and the contents of the stores that it writes."""

import concurrent.futures
import contextlib
import io
import itertools
import os
import subprocess
import sys
from unittest import mock

import numpy as np
from conftest import ROOT

from difftx.commands.prepare import main
from difftx.errors import EXIT_BAD_INPUT, UserError

PREPARE = ["difftx", "prepare", "--tokenizer=bytes"]
COMMAND = [sys.executable, "-m", *PREPARE]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def prepare(*flags):
    """Run the command in this process, with threads in place of its workers, whose start takes most of the time."""

    def threads(count, *_, **__):
        return concurrent.futures.ThreadPoolExecutor(count)

    out, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch("concurrent.futures.ProcessPoolExecutor", threads),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = main([*PREPARE[2:], *map(str, flags)])
        except UserError as error:  # `run_command` prints it so.
            code = EXIT_BAD_INPUT
            print(f"error: {error}", file=errors)
    return subprocess.CompletedProcess(flags, code, out.getvalue(), errors.getvalue())


def prepared(out, *flags):
    result = prepare(f"--out={out}", *flags)
    assert result.returncode == 0, result.stderr
    return result


def refused(out, *flags):
    """Run a command that must fail, and return its one-line error."""
    result = prepare(f"--out={out}", *flags)
    assert result.returncode == EXIT_BAD_INPUT, result.stderr
    assert not (out / "meta.json").exists()
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def tree(folder):
    """Return the content of every file in a folder, keyed by its path in the folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def texts_of(store):
    """Return the documents of a store of bytes."""
    tokens = store.slice(0, len(store))
    return [bytes(tokens[int(a) : int(b) - 1].astype(np.uint8)).decode() for a, b in itertools.pairwise(store.offsets)]
