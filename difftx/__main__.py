"""The command `difftx COMMAND …`, or `python -m difftx COMMAND …` if the package is not installed."""

import importlib
import os
import sys

import difftx
from difftx.commands import COMMANDS
from difftx.errors import SOURCE, UserError, did_you_mean, run_command

HELP = "\n".join(
    [
        "Train and evaluate Differential Transformers beside the Transformers that they are matched with.\n",
        "usage: difftx COMMAND [FLAG …]\n",
        *(f"  {command:<12}{text}" for command, text in COMMANDS.items()),
        "\n`difftx COMMAND --help` describes the flags of a command. `difftx --version` prints the version.",
        "Pages that help texts name, such as docs/config.md, are in the repository of difftx.",
    ]
)


def main() -> int:
    """Run the command that the first argument names."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("-h", "--help", "--version"):
        print(f"difftx {difftx.__version__}" if name == "--version" else HELP)
        return 0
    if name not in COMMANDS:
        raise UserError(f"{name!r}: no such command.{did_you_mean(name, COMMANDS)}")
    return importlib.import_module(f"difftx.commands.{name}").main(arguments)


def entry() -> None:
    """Run the command and exit with its code."""
    # `python -m` puts the current folder first in sys.path. Remove it, because it may contain files from strangers.
    if not sys.flags.safe_path and sys.path[0] == os.getcwd() != str(SOURCE):
        del sys.path[0]
    run_command(main)


if __name__ == "__main__":
    entry()
