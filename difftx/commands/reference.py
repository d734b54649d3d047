"""Generator of docs/cli.md, the reference of all commands.

Usage: python -m difftx.commands.reference > docs/cli.md
"""

import contextlib
import importlib
import io
import os
import re

from difftx.commands import COMMANDS

WIDTH = "100"  # Columns of the help texts.

HEADER = """# Commands

`python -m difftx.commands.reference > docs/cli.md` makes this page. `difftx COMMAND --help` prints the same text. If
difftx is not installed, write `python -m difftx COMMAND` in the clone. There, `python train.py` is `difftx train`, and
`python eval.py` is `difftx eval`. [files.md](files.md#exit-codes) lists the exit codes.
"""


def reference_page() -> str:
    """Return docs/cli.md, which has a section per command with its help text, and those of its subcommands."""
    return HEADER + "".join(_section(name, text) for name, text in COMMANDS.items())


def _section(name: str, text: str) -> str:
    shown = [_help(name)]
    subcommands = re.search(r"^  \{([a-z,]+)\}$", shown[0], re.MULTILINE)
    shown += [_help(name, subcommand) for subcommand in subcommands[1].split(",")] if subcommands else []
    blocks = "".join(f"\n```text\n{help_text}```\n" for help_text in shown)
    return f"\n## difftx {name}\n\n{text[0].upper()}{text[1:]}.\n{blocks}"


def _help(name: str, *subcommand: str) -> str:
    main = importlib.import_module(f"difftx.commands.{name}").main
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*subcommand, "--help"])
    return printed.getvalue()


if __name__ == "__main__":
    os.environ["COLUMNS"] = WIDTH
    print(reference_page(), end="")
