"""Command-line overrides of config fields, in the syntax of ml_collections.config_flags.

Examples are `--config.train.steps=10`, `--config.train.steps 10`, `--config.data.verify`, `--noconfig.data.verify`,
`--config.eval.suites=loss,recall` and `--config.eval.suites="('loss', 'recall')"`.
"""

import argparse
import glob
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import difftx.model.architectures  # noqa: F401  # It finds the groups of architectures in names of fields.
from difftx import compilation_cache
from difftx.config.build import annotation_of
from difftx.config.fields import options
from difftx.errors import UserError, did_you_mean
from difftx.files import is_glob, matching_folders, require_local_paths, require_run, require_writable_file, size_of
from difftx.registry import load_extensions
from difftx.storage.paths import AnyPath, is_bucket, path_of


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--config`, the `spec` of `load_config`."""
    text = "config of difftx, such as quickstart:diff, or config file, each with its argument"
    parser.add_argument("--config", required=True, metavar="NAME[:ARG]|FILE.py[:ARG]", help=text)


def add_extension_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--extension`, whose files `prepare_process` loads."""
    text = "run a file that adds architectures, suites, optimizers, …; may be repeated; see docs/extend.md"
    parser.add_argument("--extension", action="append", type=Path, default=[], metavar="FILE.py", help=text)


class PathFlag(argparse.Action):
    """The action of a flag for a local path or one in a bucket. A `type` would hide the messages of `path_of`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        """Set the flag's path."""
        setattr(namespace, self.dest, path_of(str(flag), value))


def add_weights_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--weights`, a `WeightsPart`."""
    text = "weights of the checkpoint: the parameters, or their average (train.ema_decay); default: params"
    parser.add_argument("--weights", choices=("params", "ema"), default="params", help=text)


def prepare_process(options: argparse.Namespace) -> None:
    """Check the paths of a command line, load its extensions, and set the options of JAX and orbax."""
    require_local_paths(options)
    compilation_cache.enable()
    load_extensions(options.extension)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # difftx reports the failures of orbax itself.


def require_file_path(flag: str, path: AnyPath) -> None:
    """Raise an error unless a file can be written to the path that a flag gives."""
    if not is_bucket(path) and not path.parent.is_dir():
        raise UserError(f"{flag}={path}: there is no folder {path.parent}")
    require_writable_file(path)


def run_folders(flag: str) -> list[AnyPath]:
    """Return the runs that a `--workdir` of the report names: runs, folders of runs such as a sweep's, and globs.

    Raise `UserError` if a part of the flag names no run.
    """
    folders: list[AnyPath] = []
    names = [flag] if os.path.isdir(flag) else flag.split(",")  # The name of a folder may have a comma.
    parts = [(name, path_of("--workdir", name)) for name in names]  # Check all before files are read.
    for name, folder in parts:
        if size_of(folder / "config.json") is not None:
            folders.append(folder)
            continue
        pattern = name if is_glob(folder) else f"{glob.escape(name.rstrip('/'))}/*"
        runs = matching_folders("--workdir", pattern, "config.json")
        if not runs:
            require_run(folder)
        folders += runs
    return folders


def parse_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *groups: str
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add `--extension`, parse the command line, load its extensions, and return its flags and config overrides."""
    add_extension_flag(parser)
    options, rest = parser.parse_known_args(arguments)
    prepare_process(options)  # Extensions may add fields that overrides set.
    return options, parse_overrides(rest, *groups)


def parse_overrides(arguments: Sequence[str], *groups: str) -> dict[str, str]:
    """Return overrides that begin with one of `groups`, such as `--config.mesh.tensor=4` as `{"mesh.tensor": "4"}`."""
    overrides: dict[str, str] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        found = re.fullmatch(rf"--(no)?({'|'.join(groups)})\.(.+)", name)
        if found is None:
            hint = did_you_mean(name.removeprefix("--").partition(".")[0], groups) if name.startswith("--") else ""
            example = f"--{groups[0]}.path.to.field=value"
            raise UserError(f"{argument!r} is not understood; see --help, or write overrides as {example}.{hint}")
        negated, group, field = found.groups()
        field = field if group == "config" else f"{group}.{field}"
        is_bool = bool in options(annotation_of(field))
        if negated and (not is_bool or equals):
            raise UserError(f"{argument!r}: only a true-or-false field can be switched off; write --{group}.…=value")
        if not equals:
            if is_bool:
                value = "false" if negated else "true"
            elif remaining and not remaining[0].startswith("--"):
                value = remaining.pop(0)
            else:
                raise UserError(f"{argument!r}: the value is missing; write {argument}=value")
        overrides[field] = value
    return overrides
