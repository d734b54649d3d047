"""Comparison of code, config and data between all processes, before the first step and before any file is written."""

import argparse
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.traverse_util

import difftx
from difftx.config import Config
from difftx.config.fields import values_of
from difftx.parallel import multihost
from difftx.registry import loaded_extensions
from difftx.training.checkpoint.manifest import package_versions
from difftx.training.run import Run

# Flags that may differ. For --config and --extension, the config's fields and the files' contents are compared instead.
OWN_FLAGS = ("distributed", "coordinator", "processes", "process", "config", "extension")
# Fields of `data` that may differ between hosts: `open_run` compares the contents.
OWN_DATA_FIELDS = ("path", "tokenizer", "cache_path")


def agree_on_command(config: Config, flags: argparse.Namespace) -> None:
    """Raise `UserError` in every process if the source code, packages, extensions, flags or config of one differ.

    Call this function as soon as the processes have joined, because a difference could make one process wait forever.
    """

    def fields() -> dict[str, Any]:
        own = {
            f"--{name}": os.path.abspath(value) if isinstance(value, Path) else value
            for name, value in vars(flags).items()
            if name not in OWN_FLAGS
        }
        packages = {f"package {name}": version for name, version in package_versions().items()}
        loaded = sorted((Path(extension.path).name, extension.sha256) for extension in loaded_extensions())
        extensions = {f"extension {number}, {name}": sha256 for number, (name, sha256) in enumerate(loaded, start=1)}
        raw = values_of(config)
        for group in (raw["data"], *raw["data"]["sources"]):
            for name in OWN_DATA_FIELDS:
                group.pop(name, None)
        return source_files() | packages | extensions | own | flax.traverse_util.flatten_dict(raw, sep=".")

    multihost.agree("the command", fields, dict, config.multihost.barrier_timeout_seconds)


def open_run(config: Config, workdir: Path, check: Callable[[Run], None] = lambda _: None) -> Run:
    """Open a run, check it, and compare its data with the data of the other processes.

    Raises:
        UserError: in any process, the run cannot be opened, fails `check`, or has different data.
        RunError: another process failed with another error, or did not respond in time.
    """

    def opened() -> Run:
        run = Run.open(config, workdir)
        check(run)
        return run

    def data_fields(run: Run) -> dict[str, Any]:
        signature = {f"data: {name}": value for name, value in run.data.signature.items()}
        return signature | {f"data: validation set {name}": rows.fingerprint for name, rows in run.data.valid.items()}

    return multihost.agree("the data", opened, data_fields, config.multihost.barrier_timeout_seconds)


def check_everywhere(run: Run, check: Callable[[Run], None]) -> None:
    """Check a run in every process, and raise `UserError` in every process if the check fails in any."""
    multihost.agree("the checks", lambda: check(run), lambda _: {}, run.config.multihost.barrier_timeout_seconds)


def source_files() -> dict[str, str]:
    """Return the SHA-256 of each source file of difftx, keyed by the path in messages."""
    folder = Path(difftx.__path__[0])
    return {
        f"difftx source {path.relative_to(folder).as_posix()}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.py"))
    }
