"""Write job files for clusters from the templates in `templates/`, one file per run of a sweep."""

import dataclasses
import functools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import jinja2
import jinja2.meta

from difftx.config.data import STDLIB, SYNTHETIC
from difftx.config.recipes import is_name, split_spec
from difftx.errors import UserError, did_you_mean
from difftx.launch.grid import SweepPoint
from difftx.storage.paths import scheme_of

TEMPLATES = Path(__file__).with_name("templates")
ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 120  # Time in which the templates let a job end after the signal of a preemption.
MAX_NAME_CHARACTERS = 40  # Limit for a JobSet's name. Pods add suffixes, and host names have at most 63 characters.
JINJA = jinja2.Environment(  # nosec B701
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)
# XLA flags that overlap collectives between GPUs with computation. Source: "GPU performance tips" in JAX's
# documentation. The threshold of 128 MiB is from MaxText's scripts for Llama on GPUs.
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
GPU_XLA_FLAGS = " ".join(
    ["--xla_gpu_enable_latency_hiding_scheduler=true"]
    + [f"--xla_gpu_enable_pipelined_{kind}=true" for kind in _KINDS]
    + [f"--xla_gpu_{kind}_combine_threshold_bytes={2**27}" for kind in _KINDS]
)
# Template variables that this module computes. Users set all others.
COMPUTED = {"name", "command", "here", "output", "label", "stop", "xla_flags"}
COUNTS = {"nodes", "gpus", "cpus", "slices", "hosts", "chips", "restarts"}  # Integer settings, which are not quoted.


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A way to start runs on other machines."""

    template: str  # Name of the file in `templates/`.
    submit: str  # Command that submits a job file.
    quote: Callable[[str], str]  # Quotes a setting in the template's language.
    # Whether jobs see this machine's files, as under Slurm. If not, a job has its own copy of the repository, and its
    # workdir is in a bucket or on a shared file system that is mounted at the path in the setting "mount".
    local_files: bool


def _sbatch(text: str) -> str:
    """Quote a value for an #SBATCH line. Within quotes, a backslash escapes the next character, and $ is literal."""
    return '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'


_yaml = functools.partial(json.dumps, ensure_ascii=False)  # JSON strings are valid YAML strings.
LAUNCHERS = {
    "slurm": Launcher("slurm.sbatch", "sbatch", _sbatch, local_files=True),
    "jobset": Launcher("jobset_tpu.yaml", "kubectl apply -f", _yaml, local_files=False),
    "jobset-gpu": Launcher("jobset_gpu.yaml", "kubectl apply -f", _yaml, local_files=False),
    "tpu-vm": Launcher("tpu_vm.sh", "bash", shlex.quote, local_files=False),
}


def parse_settings(arguments: Sequence[str]) -> dict[str, str]:
    """Parse `["nodes=2", "time=24:00:00"]` to `{"nodes": "2", "time": "24:00:00"}`."""
    settings = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if not name or not value:
            raise UserError(f"--set {argument!r} is not understood; it is written name=value")
        if name in settings:
            raise UserError(f"--set {argument!r}: given twice")
        settings[name] = value
    return settings


def write_jobs(name: str, points: Sequence[SweepPoint], out: str, settings: Mapping[str, str]) -> None:
    """Write a job file for each point with the launcher `name`, and print the commands that submit the files.

    The files are written to the folder `out`/jobs. If `out` is in a bucket, they are written to a local folder such as
    jobs/gs/BUCKET/NAME, because only the jobs access the bucket.
    """
    if name not in LAUNCHERS:
        raise UserError(f"--launcher={name}: no such launcher.{did_you_mean(name, LAUNCHERS)}")
    launcher, text = LAUNCHERS[name], (TEMPLATES / LAUNCHERS[name].template).read_text()
    _check_settings(name, jinja2.meta.find_undeclared_variables(JINJA.parse(text)), settings, in_bucket=_is_bucket(out))
    for point in points:
        _check_config(launcher, point, settings)
    quoted = {setting: value if setting in COUNTS else launcher.quote(value) for setting, value in settings.items()}
    values = {point.name: _values(launcher, point, out, settings) for point in points}
    folder = _job_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    for run, computed in values.items():
        file = folder / f"{run}{Path(launcher.template).suffix}"
        file.write_text(JINJA.from_string(text).render(quoted | computed))
        print(f"{launcher.submit} {shlex.quote(str(file))}")


def _is_bucket(out: str) -> bool:
    return scheme_of("--out", out) is not None


def _job_folder(out: str) -> Path:
    return Path("jobs", out.replace("://", "/")) if _is_bucket(out) else Path(out, "jobs")


def _check_settings(name: str, variables: set[str], settings: Mapping[str, str], *, in_bucket: bool) -> None:
    """Raise `UserError` if a setting is invalid, unknown or missing. The template determines which settings exist."""
    wanted = variables - COMPUTED
    if in_bucket:  # A run in a bucket needs no shared volume.
        wanted -= {"mount", "claim"}
    elif not LAUNCHERS[name].local_files:
        wanted |= {"mount"}
    for setting, value in settings.items():
        if setting not in wanted:
            raise UserError(f"--set {setting}=…: {name} asks for no such thing.{did_you_mean(setting, wanted)}")
        if setting in COUNTS and not re.fullmatch("[0-9]{1,9}", value):
            raise UserError(f"--set {setting}={value}: not a count; write an integer")
    if missing := sorted(wanted - settings.keys() - {"spot"}):
        raise UserError(f"--launcher={name}: give --set {' '.join(f'{m}=…' for m in missing)}; see docs/operations.md")


def _check_config(launcher: Launcher, point: SweepPoint, settings: Mapping[str, str]) -> None:
    """Raise `UserError` if a run's config does not fit the devices or the volume that the settings describe."""
    if "topology" in settings:
        chips = math.prod(map(int, re.findall("[0-9]+", settings["topology"])))
        hosts, per_host = int(settings["hosts"]), int(settings["chips"])
        if hosts * per_host != chips:
            given = f"--set hosts={hosts} chips={per_host} topology={settings['topology']}"
            raise UserError(f"{given}: {hosts * per_host} chips per slice, but the topology has {chips}")
        if point.config.mesh.slices != int(settings["slices"]):
            given = f"--set slices={settings['slices']}, but mesh.slices={point.config.mesh.slices}"
            raise UserError(f"run {point.name}: {given}; give --config.mesh.slices={settings['slices']}")
    if launcher.quote is not _yaml:
        return
    for path in point.config.data.paths:  # A pod sees only files of the image and the volume.
        everywhere = path == STDLIB or path.startswith(SYNTHETIC) or scheme_of("data.path", path) is not None
        if not everywhere and not ("mount" in settings and PurePosixPath(path).is_relative_to(settings["mount"])):
            where = f"below mount={settings['mount']} or in a bucket" if "mount" in settings else "in a bucket"
            raise UserError(f"run {point.name}: data.path={path}: the pods would not have it; give a path {where}")


def _values(launcher: Launcher, point: SweepPoint, out: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the template variables in `COMPUTED`, quoted in the template's language."""
    if launcher.local_files:
        here = Path.cwd()
        workdir = f"{out.rstrip('/')}/{point.name}" if _is_bucket(out) else here / out / point.name
        command = [sys.executable, "-m", "difftx", "train", *point.flags(workdir)]
        # sbatch replaces %j by the job's id and %% by %.
        output = str(here / _job_folder(out) / point.name).replace("%", "%%") + "-%j.out"
        values = {"here": shlex.quote(str(here)), "output": launcher.quote(output)}
    else:
        workdir = f"{out.rstrip('/')}/{point.name}"
        if not _is_bucket(out):
            workdir = PurePosixPath(settings["mount"]) / workdir
            if not workdir.is_relative_to(settings["mount"]):
                lost = f"not below mount={settings['mount']}, so the run would be lost"
                raise UserError(f"--out={out}: {lost}; give --out=runs/NAME, or a bucket")
        command = ["python", "train.py", *_in_repository(point).flags(str(workdir))]
        # Send SIGTERM to the process that trains in `workdir`. The regular expression ends in `( |$)`, so that it does
        # not match the command line of the shell that runs pkill, which contains the expression itself.
        escaped = re.sub(r"([][\\.^$*+?(){}|])", r"\\\1", str(workdir))
        stop = f"pkill -TERM -f {shlex.quote(f'python train.py .*--workdir={escaped}( |$)')}"
        values = {"stop": shlex.quote(stop)}
        if launcher.quote is _yaml:
            # Kubernetes names consist of lower-case letters, digits and hyphens, and begin with a letter (RFC 1035).
            label = re.sub(r"[^a-z0-9]+", "-", point.name.lower()).strip("-")
            values["label"] = label = label if label[:1].isalpha() else f"run-{label}"
            if len(label) > MAX_NAME_CHARACTERS:
                limit = f"a job's name has at most {MAX_NAME_CHARACTERS} characters"
                raise UserError(f"run {point.name}: {limit}; vary fewer fields")
    shell = shlex.join(command)
    if launcher.quote is _yaml:
        shell = shell.replace("$", "$$")  # Kubernetes expands $(NAME) in a container's arguments, and replaces $$ by $.
    return {"name": point.name, "command": shell, "xla_flags": GPU_XLA_FLAGS, **values}


def _in_repository(point: SweepPoint) -> SweepPoint:
    """Return the point with the paths of its config file and extensions relative to the root of the repository."""

    def relative(flag: str, path: str | Path) -> Path:
        try:
            return Path(path).resolve().relative_to(ROOT)
        except ValueError as error:
            raise UserError(f"--{flag}={path}: not in {ROOT}, so a job elsewhere would not have it") from error

    path, argument = split_spec(point.spec)
    extensions = [relative("extension", extension) for extension in point.extensions]
    config = path if is_name(path) else relative("config", path)
    return dataclasses.replace(point, spec=f"{config}:{argument}" if argument else str(config), extensions=extensions)
