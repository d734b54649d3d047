"""The difftx command: python -m difftx COMMAND …, or `difftx COMMAND …` where the package is installed."""

import importlib
import sys

from difftx.errors import UserError, did_you_mean, run_command

# Name → module with `main(arguments) -> exit code`, imported only when its command runs, and description.
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("difftx.commands.plan", "what a config costs on devices that are not here"),
    "data": ("difftx.commands.data", "verify a token store, show a row of it, or count its bigrams"),
    "prepare": (
        "difftx.commands.prepare",
        "tokenise text, JSON lines, Parquet or a Hugging Face dataset",
    ),
    "checkpoint": ("difftx.commands.checkpoint", "list, verify, compare or delete a run's checkpoints"),
    "generate": ("difftx.commands.generate", "complete a prompt, or a file of prompts, with a trained model"),
    "convert": ("difftx.commands.convert", "weights from and to Hugging Face and the official layout"),
    "sweep": ("difftx.commands.sweep", "run a grid of configs here, or write its job files"),
}


def main() -> int:
    """Run the command that the first argument names."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("-h", "--help"):
        print(__doc__.splitlines()[0], *(f"  {n:<12}{text}" for n, (_, text) in COMMANDS.items()), sep="\n")
        return 0
    if name not in COMMANDS:
        raise UserError(f"{name!r}: no such command.{did_you_mean(name, COMMANDS)}")
    module = importlib.import_module(COMMANDS[name][0])
    return module.main(arguments)


def entry() -> None:
    """Run the command and exit with its code."""
    sys.path.insert(0, "")  # As with `python -m difftx`: config files import other files of the current folder.
    run_command(main)


if __name__ == "__main__":
    entry()
