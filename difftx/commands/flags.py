"""Command-line overrides of config fields, in the syntax of ml_collections.config_flags.

Examples are `--config.train.steps=10`, `--config.train.steps 10`, `--config.data.verify`,
`--config.eval.suites=loss,recall` and `--config.eval.suites="('loss', 'recall')"`. "config." may be left out.
"""

import argparse
import functools
import glob
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import difftx.model.architectures  # noqa: F401  # It finds the groups of architectures in names of fields.
from difftx import compilation_cache
from difftx.config import Config
from difftx.config.build import annotation_of, parse_text
from difftx.config.fields import Positive, marks, options, types_of
from difftx.config.recipes import is_json, load_config, recipe_names
from difftx.config.synonyms import field_named, flag_named, note_on
from difftx.errors import UserError, closest
from difftx.files import matching_folders, require_local_paths, require_run, require_writable_file
from difftx.registry import load_extensions
from difftx.storage.paths import AnyPath, is_bucket, path_of


class Parser(argparse.ArgumentParser):
    """The parser of a command. Its errors name the flag or the config field that the user meant.

    `fields` are the config fields and groups that the command's overrides may change. "config" means all.
    """

    def __init__(self, prog: str | None = None, description: str | None = None, *fields: str, **options: Any):
        super().__init__(prog, description=description, allow_abbrev=False, **options)
        self.fields = fields
        if "config" in fields:
            self.epilog = "--config.path.to.field=value changes a field; docs/config.md describes them all"

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
        """Add `--extension`, load the extensions on a command line, and return its flags and config overrides."""
        add_extension_flag(self)
        options, rest = self.parse_known_args(arguments)
        prepare_process(options)  # Do this first, because extensions may add fields.
        return options, self.overrides(rest)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the flags and the overrides. If the command has no overrides, raise `UserError` for other words."""
        options, rest = super().parse_known_args(args, namespace)
        if rest and not self.fields:
            raise self._unknown(rest[0])
        return options, rest

    def error(self, message: str) -> Any:
        """Raise the error of a flag."""
        message = message.replace("ignored explicit argument", "takes no value, but has")
        raise UserError(f"{message}; see {self.prog} --help")

    def overrides(self, arguments: Sequence[str]) -> dict[str, str]:
        """Return overrides of config fields: `--config.mesh.tensor=4` becomes `{"mesh.tensor": "4"}`."""
        overrides: dict[str, str] = {}
        remaining = list(arguments)
        while remaining:
            argument = remaining.pop(0)
            _, equals, value = argument.partition("=")
            if (found := self._override(argument)) is None:
                raise self._unknown(argument)
            field = found[2]
            if not self._changes(field):
                raise self._unchanged(argument, field)
            is_bool = bool in options(annotation_of(field))
            if not equals:
                if is_bool:
                    value = "true"
                elif remaining and not remaining[0].startswith("--"):
                    value = remaining.pop(0)
                else:
                    raise UserError(f"{argument!r}: the value is missing; write {argument}=value")
            overrides[field] = value
        return overrides

    def _override(self, argument: str) -> re.Match[str] | None:
        """Return the parts (config., field, group) of an override, or None if the argument is not an override."""
        found = re.fullmatch(r"--(config\.)?((\w+)(?:\.[\w.-]+)?)", argument.partition("=")[0])
        is_field = found and found[3] in types_of(Config) and ("." in found[2] or self._changes(found[3]))
        return found if found and (found[1] or is_field) else None

    def _changes(self, field: str) -> bool:
        return any(name == "config" or f"{field}.".startswith(f"{name}.") for name in self.fields)

    def _unchanged(self, argument: str, field: str) -> UserError:
        names = ", ".join(name if "." in name else f"{name}.…" for name in self.fields)
        return UserError(f"{argument}: {self.prog} does not change {field}, only {names}")

    def _unknown(self, argument: str) -> UserError:
        """Return the error for an argument that is neither a flag nor an override."""
        name = argument.partition("=")[0].lstrip("-").replace("-", "_")
        flags = {flag[2:]: flag for flag in self._option_string_actions if flag.startswith("--")}
        prefix = "--config." if "config" in self.fields else "--"
        fields = {field: prefix + field for field, _ in marks(Config) if self._changes(field)}
        flag, field = flag_named(name), field_named(name)
        same = [spelled for one, spelled in fields.items() if one.rpartition(".")[2] == name]
        meant = flags.get(flag or name) or fields.get(field or name) or " or ".join(sorted(same, key=len)[:3])
        if not argument.startswith("-") and not (meant and "=" in argument):
            return UserError(f"{argument!r} belongs to no flag; quote a value that has spaces, and write a list as a,b")
        known = {one.rpartition(".")[2]: spelled for one, spelled in fields.items()} | fields | flags
        if meant := meant or known.get(closest(name, known, cutoff=0.75) or ""):
            note = note_on(name, flag if flag in flags else field)
            return UserError(f"{argument}: no such flag. Did you mean {meant}{note}?")
        if self.fields and field:
            return self._unchanged(argument, field)
        overrides = ", --config.path.to.field" if "config" in self.fields else ""
        return UserError(f"{argument}: no such flag. Known: {', '.join(flags.values())}{overrides}")


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--config`. Its value is the `spec` of `load_config`."""
    text = f"recipe ({', '.join(recipe_names())}, or a file), such as quickstart:diff; or the config.json of a run"
    parser.add_argument("--config", required=True, metavar="NAME[:ARG]|FILE.py[:ARG]|FILE.json", help=text)


def config_of(spec: str, overrides: Mapping[str, Any]) -> Config:
    """Load the config that `--config` names. If it is JSON, risky fields need confirmation (`confirm_outward`)."""
    config = load_config(spec, overrides)
    if is_json(spec):
        from difftx.commands.evaluate import confirm_outward  # Imported here because the import is slow.

        confirm_outward(config, spec, config.eval.suites, overrides, trusted=None)
    return config


def add_extension_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--extension`. `prepare_process` loads its files."""
    text = "run a file that adds architectures, suites, optimizers, …; may be repeated; see docs/extend.md"
    parser.add_argument("--extension", action="append", type=Path, default=[], metavar="FILE.py", help=text)


class CheckedFlag(argparse.Action):
    """A flag's action that stores `read(flag, text)`. With a `type`, argparse would hide the messages of `read`."""

    def __init__(self, *arguments: Any, read: Callable[[str, str], Any], **options: Any):
        super().__init__(*arguments, **options)
        self._read = read

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        """Set the flag's value."""
        setattr(namespace, self.dest, self._read(flag or self.dest, value))


# The action of a flag for a path, local or in a bucket.
PathFlag: Any = functools.partial(CheckedFlag, read=path_of)


def value_flag(annotation: Any) -> Any:
    """Return the action of a flag with the type and rules of a config field, such as `Positive[float]`."""
    return functools.partial(CheckedFlag, read=lambda flag, text: parse_text(text, annotation, flag))


CountFlag: Any = value_flag(Positive[int])  # For a positive integer.


def add_weights_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--weights`. Its value is a `WeightsPart`."""
    text = "weights of the checkpoint: the parameters, or their average (train.ema_decay); default: params"
    parser.add_argument("--weights", choices=("params", "ema"), default="params", help=text)


def prepare_process(options: argparse.Namespace) -> None:
    """Check the paths on a command line, load its extensions, and set JAX options."""
    require_local_paths(options)
    compilation_cache.enable()
    load_extensions(options.extension)
    for library in ("absl", "huggingface_hub.utils._http"):  # They print failures that difftx reports itself.
        logging.getLogger(library).setLevel(logging.CRITICAL)


def require_file_path(flag: str, path: AnyPath) -> None:
    """Raise an error if no file can be written to the path in a flag."""
    if not is_bucket(path) and not path.parent.is_dir():
        raise UserError(f"{flag}={path}: there is no folder {path.parent}")
    require_writable_file(path)


def run_folders(flag: str) -> list[AnyPath]:
    """Return the runs named by the `--workdir` of a report: runs, folders of runs such as a sweep's, and globs.

    Raise `UserError` if a part of the flag matches no run.
    """
    folders: list[AnyPath] = []
    names = [flag] if os.path.isdir(flag) else flag.split(",")  # A folder's name may contain a comma.
    parts = [(name, path_of("--workdir", name)) for name in names]  # Check all names before reading files.
    for name, folder in parts:
        patterns = name, f"{glob.escape(name.rstrip('/'))}/*"
        found = (matching_folders("--workdir", pattern, "config.json") for pattern in patterns)
        if not (runs := next(filter(None, found), [])):
            require_run(folder)
        folders += runs
    return folders
