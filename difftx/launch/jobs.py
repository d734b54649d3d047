"""Job files for a cluster, one a run, from the templates beside this file."""

import dataclasses
import json
import re
import shlex
import string
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from difftx.errors import UserError, did_you_mean
from difftx.launch.grid import Point

TEMPLATES = Path(__file__).with_name("templates")
ROOT = Path(__file__).parents[2]
MOST_NAME_CHARACTERS = 40  # Of a JobSet: with what is appended, a pod's host name must fit 63.
COUNTS = {"nodes", "gpus", "cpus", "slices", "hosts", "chips", "restarts"}  # Settings that are integers.


@dataclasses.dataclass(frozen=True)
class Launcher:
    """One way to start a run elsewhere."""

    template: str
    submit: str  # The command that takes the file.
    quote: Callable[[str], str]  # Turns a setting into a word of the template's language.
    # Whether the job sees this machine's files (Slurm). Else it has a copy of the repository, and the workdir is below
    # a shared file system that is mounted there at `mount`.
    local_files: bool


def _sbatch(text: str) -> str:
    """Quote for a line of #SBATCH: as sbatch reads it, a backslash escapes within quotes, and $ means nothing."""
    return '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'


def _yaml(text: str) -> str:
    """Quote for YAML, whose double-quoted strings are JSON's."""
    return json.dumps(text, ensure_ascii=False)


LAUNCHERS = {
    "slurm": Launcher("slurm.sbatch", "sbatch", _sbatch, local_files=True),
    "jobset": Launcher("jobset_tpu.yaml", "kubectl apply -f", _yaml, local_files=False),
    "jobset-gpu": Launcher("jobset_gpu.yaml", "kubectl apply -f", _yaml, local_files=False),
    "tpu-vm": Launcher("tpu_vm.sh", "bash", shlex.quote, local_files=False),
}


def parse_settings(arguments: Sequence[str]) -> dict[str, str]:
    """Turn `["nodes=2", "time=24:00:00"]` into a dictionary."""
    settings = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not name or not equals or not value:
            raise UserError(f"--set {argument!r} is not understood; it is written name=value")
        if name in settings:
            raise UserError(f"--set {argument!r}: given twice")
        settings[name] = value
    return settings


def write_jobs(name: str, points: Sequence[Point], out: Path, settings: Mapping[str, str]) -> None:
    """Write `out/jobs/<run>.<suffix>` for every point, and print the commands that submit them.

    Raises:
        UserError: no such launcher, or settings that its template does not know or lacks.
    """
    if name not in LAUNCHERS:
        raise UserError(f"--launcher={name}: no such launcher.{did_you_mean(name, LAUNCHERS)}")
    launcher = LAUNCHERS[name]
    template = string.Template((TEMPLATES / launcher.template).read_text())
    _check_settings(name, template, settings)
    quoted = {setting: value if setting in COUNTS else launcher.quote(value) for setting, value in settings.items()}
    texts = {
        point.name: template.substitute(quoted, **_values(launcher, template, point, out, settings)) for point in points
    }
    folder = out / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    for run, text in texts.items():
        file = folder / f"{run}{Path(launcher.template).suffix}"
        file.write_text(text)
        print(f"{launcher.submit} {shlex.quote(str(file))}")


def _check_settings(name: str, template: string.Template, settings: Mapping[str, str]) -> None:
    """Compare with what the template asks for, beside what each run gives it."""
    wanted = {*template.get_identifiers()} - {"name", "command"}
    wanted = wanted - {"directory", "output"} if LAUNCHERS[name].local_files else wanted - {"label", "stop"} | {"mount"}
    for setting, value in settings.items():
        if setting not in wanted:
            raise UserError(f"--set {setting}=…: {name} asks for no such thing.{did_you_mean(setting, wanted)}")
        _check_printable(f"--set {setting}", [value])
        if setting in COUNTS and not re.fullmatch("[0-9]{1,9}", value):
            raise UserError(f"--set {setting}={value}: not a count; write an integer")
    if missing := sorted(wanted - settings.keys()):
        raise UserError(f"--launcher={name}: give --set {' '.join(f'{m}=…' for m in missing)}; see docs/operations.md")


def _values(
    launcher: Launcher, template: string.Template, point: Point, out: Path, settings: Mapping[str, str]
) -> dict[str, str]:
    """Return what a run gives its template, quoted for its place there."""
    if launcher.local_files:
        here = Path.cwd()
        command = [sys.executable, str(ROOT / "train.py"), *point.flags(here / out / point.name)]
        # sbatch replaces %j by the job's number, and %% by %.
        output = str(here / out / "jobs" / point.name).replace("%", "%%") + "-%j.out"
        values = {"directory": shlex.quote(str(here)), "output": launcher.quote(output)}
    else:
        mount = PurePosixPath(settings["mount"])
        workdir = mount / out / point.name
        if not workdir.is_relative_to(mount):
            raise UserError(f"--out={out}: not below mount={mount}, so the run would be lost; give --out=runs/NAME")
        command = ["python", "train.py", *_in_repository(point).flags(str(workdir))]
        values = {"stop": shlex.quote(_stop_command(workdir))}
        if "label" in template.get_identifiers():
            values["label"] = _dns_label(point.name)
    _check_printable(f"run {point.name}", [*command, *values.values()])
    shell = shlex.join(command)
    if launcher.quote is _yaml:
        shell = shell.replace("$", "$$")  # Kubernetes replaces $(NAME) in a container's arguments, and $$ by $.
    return {"name": point.name, "command": shell, **values}


def _stop_command(workdir: PurePosixPath) -> str:
    """Return the command that sends SIGTERM to the process that trains in `workdir`, and not to itself."""
    escaped = re.sub(r"([][\\.^$*+?(){}|])", r"\\\1", str(workdir))
    return f"pkill -TERM -f {shlex.quote(f'python train.py .*--workdir={escaped}( |$)')}"


def _check_printable(what: str, texts: Iterable[str]) -> None:
    """Raise `UserError` for line breaks and the like: they would end a comment, or a block of YAML."""
    for text in texts:
        if not text.isprintable():
            raise UserError(f"{what}: {text!r} has control characters, which a job file cannot hold; remove them")


def _in_repository(point: Point) -> Point:
    """Return the point with its config file and extensions as they are called from the repository's root."""

    def relative(flag: str, path: str | Path) -> Path:
        try:
            return Path(path).resolve().relative_to(ROOT)
        except ValueError as error:
            raise UserError(f"--{flag}={path}: not in {ROOT}, so a job elsewhere would not have it") from error

    path, colon, arg = point.spec.partition(":")
    extensions = [relative("extension", extension) for extension in point.extensions]
    return dataclasses.replace(point, spec=f"{relative('config', path)}{colon}{arg}", extensions=extensions)


def _dns_label(name: str) -> str:
    """Return the name as Kubernetes wants it: lower-case letters, digits and hyphens."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if len(label) > MOST_NAME_CHARACTERS:
        raise UserError(f"run {name}: a job's name has at most {MOST_NAME_CHARACTERS} characters; vary fewer fields")
    return label
