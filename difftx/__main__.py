"""The command `difftx COMMAND …`, or `python -m difftx COMMAND …` if the package is not installed."""

import importlib
import sys

import difftx
from difftx.errors import UserError, did_you_mean, run_command

# Command → description. Each command is a module of difftx/commands/ with a function `main(arguments) -> exit code`.
COMMANDS = {
    "train": "train a model, or resume a run",
    "eval": "run evaluation suites on a run, draw curves, or fit scaling laws",
    "report": "write an HTML page about one run, or compare several",
    "generate": "complete a prompt, or a file of prompts, with a trained model",
    "chat": "talk to a trained model: prompts in a loop, with one load and one compilation",
    "prepare": "tokenise text, JSON lines, Parquet or a Hugging Face dataset",
    "data": "verify a token store, show a row of it, or count its bigrams",
    "tokenizer": "train a tokenizer on text",
    "doctor": "check whether a training can start on this machine, and how fast it will be",
    "plan": "estimate the memory and time of a config on devices that are not attached",
    "sweep": "run a grid of configs on this machine, or write its job files",
    "checkpoint": "list, verify, compare or delete the checkpoints of a run",
    "convert": "convert weights from and to Hugging Face and the official layout",
}
HELP = "\n".join(
    [
        "Train and evaluate Differential Transformers beside the Transformers that they are matched with.\n",
        "usage: difftx COMMAND [FLAG …]\n",
        *(f"  {command:<12}{text}" for command, text in COMMANDS.items()),
        "\n`difftx COMMAND --help` describes the flags of a command. `difftx --version` prints the version.",
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
    sys.path.insert(0, "")  # Lets config files import modules of the current folder.
    run_command(main)


if __name__ == "__main__":
    entry()
