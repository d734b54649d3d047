"""Checks of the commands that pages show and that no test runs: programs, flags, fields, grids, targets, extras."""

import contextlib
import functools
import io
import itertools
import re
import shlex
import tomllib
from pathlib import Path

from conftest import ROOT

from difftx.commands import COMMANDS
from difftx.commands.flags import Parser
from difftx.config.recipes import load_config
from difftx.evals import SUITES
from difftx.launch.grid import make_points, parse_grid
from difftx.launch.jobs import write_jobs
from difftx.launch.topology import parse_topology

SHELL = ("bash", "console")  # Languages of blocks with commands.
# Programs of other projects. Their flags are not checked.
OTHERS = ["cd", "docker", "gcloud", "git", "hf", "kill", "kubectl", "mkdir", "sbatch", "source", "tensorboard", "vllm"]
PROGRAM = rf"(?:[A-Z_]+=\S+ )?(?:difftx|python[\d.]*|make|pip|bash|{'|'.join(OTHERS)}) "
# Contents of the reader's files in `"$(cat FILE)"`.
FILES = {
    "sets.json": '[{"name": "a", "path": "a.jsonl", "kind": "question_answering", "document": "context", '
    '"question": "input", "answers": "answers", "new_tokens": 32}]',
    "tasks.json": '[{"name": "a", "train": "a", "test": "b", "text": "text", "label": "label", "text_word": "Q", '
    '"label_word": "A"}]',
    "math.json": '[{"name": "gsm8k", "format": "gsm8k", "test": "a", "train": "b", "train_format": null}]',
}


def fences(text: str) -> list[tuple[str, str]]:
    """Return language and content of each fenced block of a page, also of those inside lists."""
    return [(found[2], found[3]) for found in re.finditer(r"(?ms)^( *)```(\w*)\n(.*?)^\1```$", text)]


def commands_of(text: str) -> list[str]:
    """Return the commands in the blocks `bash` and `console` of a page, each as one line without its comment."""
    lines = [line for language, block in fences(text) if language in SHELL for line in joined(block)]
    return [line for line in lines if shlex.split(line, comments=True)]


def inline_commands(text: str) -> list[str]:
    """Return the commands in the sentences of a page, except for bare names and templates."""
    without = re.sub(r"(?ms)^( *)```.*?^\1```$", "", text).replace("\n", " ")
    found = re.findall(r"`((?:difftx|make|pip|python) [^`]+)`", without)
    return [
        line
        for line in found
        if ("--" in line or line.startswith(("make", "pip"))) and not re.search("…|COMMAND", line)
    ]


def joined(block: str) -> list[str]:
    """Return the lines of a block, with lines that end in a backslash joined to the next."""
    return [line.strip() for line in re.sub(r" *\\\n *", " ", block).splitlines()]


def stray_commands(text: str) -> list[str]:
    """Return the lines that look like commands in indented blocks and in blocks of other languages."""
    other = [block for language, block in fences(text) if language not in (*SHELL, "python")]
    without = re.sub(r"(?ms)^( *)```.*?^\1```$", "", text)
    indented = re.findall(r"(?m)^ {4,}(.*)$", without)
    return [line for line in (*indented, *"".join(other).splitlines()) if re.match(rf"(?:\$ )?{PROGRAM}", line)]


def check_line(line: str, folder: Path) -> None:
    """Raise an error if a command line names a program, flag, field, value, target or file that does not exist.

    Args:
        line: The line of a page.
        folder: An empty folder, for job files.
    """
    line = re.sub(r"\$\(cat (\S+)\)", lambda found: FILES[found[1]].replace('"', '\\"'), line)
    words = shlex.split(line, comments=True)
    while "&&" in words:
        end = words.index("&&")
        check_command(words[:end], folder)
        words = words[end + 1 :]
    check_command(words[: words.index(">")] if ">" in words else words, folder)


def check_command(words: list[str], folder: Path) -> None:
    """Check one command of a line."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "difftx":
        check_difftx(rest, folder)
    elif program == "python":
        check_python(rest, folder)
    elif program == "make":
        for word in rest:
            name, is_variable, _ = word.partition("=")
            form = rf"^{name} \?=|\$\({name}\)" if is_variable else rf"^{name}:"
            assert re.search(form, (ROOT / "Makefile").read_text(), re.MULTILINE), f"Makefile has no {name}"
    elif program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        (place,) = (word for word in rest if word.startswith("."))
        extras = re.fullmatch(r"\.(?:\[(.*)\])?", place)
        assert rest[:2] == ["install", "-e"]
        assert extras
        assert {name for name in (extras[1] or "").split(",") if name} <= known.keys()
    else:
        assert program in (*OTHERS, "bash"), f"{program}: no known program"


def check_python(words: list[str], folder: Path) -> None:
    """Check `python FILE …` and `python -m MODULE …`. FILE and MODULE are files of the repository."""
    if words[:2] == ["-m", "difftx"]:
        check_difftx(words[2:], folder)
    elif words[0] in ("train.py", "eval.py"):
        check_difftx([words[0].removesuffix(".py"), *words[1:]], folder)
    elif words[0] == "-m" and words[1].startswith("sglang."):  # A module of another project.
        return
    else:
        path = f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]
        text = (ROOT / path).read_text()
        # A study has the flags of `study_parser`, which is in a module of its own.
        for module in re.findall(r"^from studies\.(\w+) import", text, re.MULTILINE):
            text += (ROOT / "studies" / f"{module}.py").read_text()
        own = itertools.takewhile(lambda word: word != "--", words)  # Then the command of another program follows.
        for flag in (word.partition("=")[0] for word in own if word.startswith("--")):
            assert f'"{flag}"' in text, f"{path} has no {flag}"


@functools.cache
def help_of(command: str) -> str:
    """Return the help text of a command and of its subcommands, from docs/cli.md."""
    assert command in COMMANDS, f"{command}: no such command of difftx"
    return (ROOT / "docs" / "cli.md").read_text().partition(f"\n## difftx {command}\n")[2].partition("\n## ")[0]


def check_difftx(words: list[str], folder: Path) -> None:
    """Check a command of difftx: its flags, suites, config fields, topology, and the grid and jobs of a sweep."""
    command, *rest = words
    text = help_of(command)
    positional, flags, lists = [], {}, {"--grid": [], "--set": []}
    inside = None
    for word in rest:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            inside = name if name in lists else None
            if not re.match(r"--(config|eval|mesh)\.", word):
                flags[name] = value
        elif inside:
            lists[inside].append(word)
        else:
            positional.append(word)
    unknown = {name for name in flags if not re.search(rf"^  (-\w, )?{name}\b", text, re.MULTILINE)}
    assert not unknown, f"difftx {command} has no {', '.join(unknown)}"
    subcommands = re.search(r"^  \{([a-z,]+)\}$", text, re.MULTILINE)
    if subcommands:
        assert positional[0] in subcommands[1].split(",")
    elif "positional arguments" not in text:
        assert not positional, f"difftx {command} takes no {positional}"
    assert set(flags.get("--suite", "loss").split(",")) <= set(SUITES)
    assert flags.get("--weights", "ema") in ("params", "ema")
    if "--topology" in flags:
        parse_topology(flags["--topology"])
    check_fields(rest, flags, lists, folder)


@functools.cache  # Many lines have the same config.
def check_config(spec: str, *overrides: tuple[str, str]) -> None:
    load_config(spec, dict(overrides))


def check_fields(words: list[str], flags: dict[str, str], lists: dict[str, list[str]], folder: Path) -> None:
    """Check the recipe of a command, the fields that it sets, and the grid and the job files of a sweep."""
    spec = flags.get("--config", "quickstart")
    spec = str(ROOT / spec) if spec.startswith("configs/") else spec
    overrides = Parser(None, None, "config").overrides([w for w in words if re.match(r"--(config|eval|mesh)\.", w)])
    if not lists["--grid"]:
        check_config(spec, *overrides.items())
        return
    points = make_points(spec, parse_grid(lists["--grid"]), overrides)
    assert points
    if "--launcher" in flags:
        settings = dict(setting.split("=", 1) for setting in lists["--set"])
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            write_jobs(flags["--launcher"], points, flags["--out"], settings)
