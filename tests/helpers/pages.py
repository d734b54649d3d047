"""Pages of docs/: their blocks of code, and their commands as processes on tiny models."""

import re
import shlex
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path

from conftest import ROOT, child_environment

from helpers.command_server import commands

DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a language in docs/`page`, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def named_files(page: str) -> dict[str, str]:
    """Return the Python files of docs/`page`: the blocks that follow a name such as `mine.py` and a colon."""
    return dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL))


def page_commands(page: str) -> list[list[str]]:
    """Return the lines of each bash block of docs/`page`."""
    return [block.splitlines() for block in blocks(page, "bash")]


def run_command(
    folder: Path,
    line: str,
    *more: str,
    fields: Mapping[str, str] = types.MappingProxyType({}),
    code: int = 0,
    typed: str | None = None,
) -> str:
    """Run a command of a page in `folder`; return its output, or its errors if an exit code other than 0 is expected.

    Args:
        folder: The working directory.
        line: The command: `difftx …`, `python -m difftx …`, `python train.py …` or `python eval.py …`.
        more: Further flags.
        fields: Config fields that make the run tiny. A field that the command sets is left as it is.
        code: The expected exit code.
        typed: Text for standard input. With it, the command runs in a new interpreter.
    """
    words = shlex.split(line)
    if words[0] == "python":
        words = words[2:] if words[1] == "-m" else [str(ROOT / words[1]), *words[2:]]
    small = {name: value for name, value in fields.items() if f"--config.{name}=" not in line}
    words += [*(f"--config.{name}={value}" for name, value in small.items()), *more]
    environment = child_environment(1) | {"PYTHONPATH": str(ROOT)}
    if typed is None:
        ended = commands().run(words, environment=environment, folder=folder)
    else:
        command = [sys.executable, *(["-m"] if words[0] == "difftx" else []), *words]
        ended = subprocess.run(
            command, env=environment, cwd=folder, input=typed, capture_output=True, text=True, timeout=300
        )
    assert ended.returncode == code, f"{line}\n{ended.stdout}{ended.stderr}"
    assert "Traceback" not in ended.stderr
    return ended.stdout if code == 0 else ended.stderr
