"""The command `difftx COMMAND …`, or `python -m difftx COMMAND …` if the package is not installed."""

import importlib
import sys

from difftx.errors import UserError, did_you_mean, run_command

# Command → description. Each command is a module of difftx/commands/ with a function `main(arguments) -> exit code`.
COMMANDS = {
    "doctor": "check whether a training can start on this machine, and how fast it will be",
    "plan": "estimate the memory and time of a config on devices that are not attached",
    "data": "verify a token store, show a row of it, or count its bigrams",
    "prepare": "tokenise text, JSON lines, Parquet or a Hugging Face dataset",
    "checkpoint": "list, verify, compare or delete the checkpoints of a run",
    "generate": "complete a prompt, or a file of prompts, with a trained model",
    "chat": "talk to a trained model: prompts in a loop, with one load and one compilation",
    "tokenizer": "train a tokenizer on text",
    "convert": "convert weights from and to Hugging Face and the official layout",
    "sweep": "run a grid of configs on this machine, or write its job files",
}


def main() -> int:
    """Run the command that the first argument names."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("-h", "--help"):
        print(__doc__.splitlines()[0], *(f"  {command:<12}{text}" for command, text in COMMANDS.items()), sep="\n")
        return 0
    if name not in COMMANDS:
        raise UserError(f"{name!r}: no such command.{did_you_mean(name, COMMANDS)}")
    return importlib.import_module(f"difftx.commands.{name}").main(arguments)


def entry() -> None:
    """Run the command and exit with its code."""
    sys.path.insert(0, "")  # Lets config files import modules of the current folder.
    run_command(main)


if __name__ == "__main__":
    entry()
