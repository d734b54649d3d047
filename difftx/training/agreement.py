"""What all processes of a run must have in common, compared before the first step and before anything is written."""

import argparse
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import difftx
from difftx.config import Config
from difftx.config.fields import values_of
from difftx.parallel import multihost
from difftx.registry import loaded_extensions
from difftx.training.manifest import package_versions
from difftx.training.run import Run

# Each process has its own address and number. The config's fields and the extensions' contents are compared instead of
# the files that they come from.
OWN_FLAGS = ("distributed", "coordinator", "processes", "process", "config", "extension")
# Hosts may keep copies of the data, the tokenizer and the cache at different places: `open_run` compares the contents.
OWN_DATA_FIELDS = ("path", "tokenizer", "cache_path")


def agree_on_command(config: Config, flags: argparse.Namespace) -> None:
    """Compare difftx, the packages, the extensions, the command's flags and the config with the other processes.

    Called as soon as the processes have joined: other fields could make one process wait or fail where others do not.

    Raises:
        UserError: one differs; in every process.
    """

    def fields() -> dict[str, Any]:
        own = {f"--{name}": _as_json(value) for name, value in vars(flags).items() if name not in OWN_FLAGS}
        packages = {f"package {name}": version for name, version in package_versions().items()}
        loaded = sorted((Path(extension.path).name, extension.sha256) for extension in loaded_extensions())
        extensions = {f"extension {number}, {name}": sha256 for number, (name, sha256) in enumerate(loaded, start=1)}
        return source_files() | packages | extensions | own | config_fields(config)

    multihost.agree("the command", fields, lambda found: found, config.multihost.barrier_timeout_seconds)


def open_run(config: Config, workdir: Path, check: Callable[[Run], None] = lambda _: None) -> Run:
    """Open a run, check it, and compare its data with that of the other processes.

    Raises:
        UserError: the run cannot be opened, does not pass `check`, or has other data, in any process.
        RunError: another process failed otherwise, or did not come in time.
    """

    def opened() -> Run:
        run = Run.open(config, workdir)
        check(run)
        return run

    return multihost.agree("the data", opened, data_fields, config.multihost.barrier_timeout_seconds)


def check_everywhere(run: Run, check: Callable[[Run], None]) -> None:
    """Check a run in every process; all of them end if it does not pass in one.

    Raises:
        UserError: the run does not pass `check`, in any process.
    """
    multihost.agree("the checks", lambda: check(run), lambda _: {}, run.config.multihost.barrier_timeout_seconds)


def source_files() -> dict[str, str]:
    """Return the SHA-256 of each of difftx's source files, by its path."""
    folder = Path(difftx.__path__[0])
    return {
        f"difftx source {path.relative_to(folder).as_posix()}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.py"))
    }


def config_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a config that must be equal in all processes, by their full names."""
    raw = values_of(config)
    for group in (raw["data"], *raw["data"]["sources"]):
        for name in OWN_DATA_FIELDS:
            group.pop(name, None)
    return _flat(raw, "")


def data_fields(run: Run) -> dict[str, Any]:
    """Return what the rows of a run's data, to train and to validate on, are made of."""
    signature = {f"data: {name}": value for name, value in run.data.signature.items()}
    return signature | {f"data: validation set {name}": rows.fingerprint for name, rows in run.data.valid.items()}


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        full: leaf for key, inner in value.items() for full, leaf in _flat(inner, f"{name}.{key}".lstrip(".")).items()
    }


def _as_json(value: Any) -> Any:
    return os.path.abspath(value) if isinstance(value, Path) else value
