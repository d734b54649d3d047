"""Command-line overrides of config fields, in the syntax of ml_collections.config_flags.

Examples are `--config.train.steps=10`, `--config.train.steps 10`, `--config.data.verify`, `--noconfig.data.verify`,
`--config.eval.suites=loss,recall` and `--config.eval.suites="('loss', 'recall')"`.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from difftx.config.build import annotation_of
from difftx.errors import UserError, did_you_mean
from difftx.files import require_local_paths
from difftx.registry import load_extensions


def add_extension_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--extension`; the command passes its values to `load_extensions`."""
    parser.add_argument(
        "--extension",
        action="append",
        type=Path,
        default=[],
        metavar="FILE.py",
        help="run a file that adds architectures, suites, optimizers, …; may be repeated; see docs/extend.md",
    )


def parse_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *flags: str
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse a command line and load the extensions that it names.

    Args:
        parser: Parser of the command's own flags. The flag `--extension` is added.
        arguments: Arguments of the command; None: `sys.argv`.
        flags: Flags that set config fields, as for `parse_overrides`.

    Returns:
        The flags, and the overrides of config fields.

    Raises:
        UserError: A path is the address of an object store, an extension fails, or an argument is not understood.
    """
    add_extension_flag(parser)
    options, rest = parser.parse_known_args(arguments)
    require_local_paths(options)
    load_extensions(options.extension)  # They may add fields that overrides set.
    return options, parse_overrides(rest, *flags)


def parse_overrides(arguments: Sequence[str], *flags: str) -> dict[str, str]:
    """Parse overrides such as `--config.mesh.tensor=4` into `{"mesh.tensor": "4"}`.

    Args:
        arguments: Command-line arguments that no other flag of the command uses.
        flags: Names of the flags that set fields. "config" sets fields of the whole config; any other name sets fields
            of the group with this name.

    Raises:
        UserError: An argument is not an override, or its value is missing.
    """
    overrides = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        found = re.fullmatch(rf"--(no)?({'|'.join(flags)})\.(.+)", name)
        if found is None:
            hint = did_you_mean(name.removeprefix("--").partition(".")[0], flags) if name.startswith("--") else ""
            example = f"--{flags[0]}.path.to.field=value"
            raise UserError(f"{argument!r} is not understood; write overrides as {example}.{hint}")
        negated, flag, field = found.groups()
        field = field if flag == "config" else f"{flag}.{field}"
        is_bool = annotation_of(field) is bool
        if negated and (not is_bool or equals):
            raise UserError(f"{argument!r}: only a true-or-false field can be switched off; write --{flag}.…=value")
        if not equals:
            if is_bool:
                value = "false" if negated else "true"
            elif remaining and not remaining[0].startswith("--"):
                value = remaining.pop(0)
            else:
                raise UserError(f"{argument!r}: the value is missing; write {argument}=value")
        overrides[field] = value
    return overrides
