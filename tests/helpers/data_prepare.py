"""Calls of `difftx prepare` as a user makes them, and the contents of the stores that it writes."""

import itertools
import os
import sys

import numpy as np
from conftest import ROOT

from helpers.command_server import commands

PREPARE = ["difftx", "prepare", "--tokenizer=bytes"]
COMMAND = [sys.executable, "-m", *PREPARE]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def prepare(*flags):
    return commands().run([*PREPARE, *flags])


def prepared(out, *flags):
    result = prepare(f"--out={out}", *flags)
    assert result.returncode == 0, result.stderr
    return result


def refused(out, *flags):
    """Run a command that must fail, and return its one-line error."""
    result = prepare(f"--out={out}", *flags)
    assert result.returncode == 2, result.stderr
    assert not (out / "meta.json").exists()
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    return line


def tree(folder):
    """Return the content of every file in a folder, keyed by its path in the folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def texts_of(store):
    """Return the documents of a store of bytes."""
    tokens = store.slice(0, len(store))
    return [bytes(tokens[int(a) : int(b) - 1].astype(np.uint8)).decode() for a, b in itertools.pairwise(store.offsets)]
