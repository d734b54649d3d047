"""The run object that training and evaluation share, and the files that describe a run."""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from difftx import kernels
from difftx.config import Config
from difftx.config.build import config_from_dict
from difftx.config.fields import Flag, flat, values_of, without
from difftx.data.sources import Sources, load_sources
from difftx.data.tokenizer import Tokenizer
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import SOURCE, UserError
from difftx.files import UNLOCKED, Owner, read_file, require_run, size_of, source_sha256
from difftx.json_files import read_json, schema_error
from difftx.kernels.backend import Ranking
from difftx.model.abstract import count_parameters
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import make_mesh
from difftx.parallel.multihost import agree, barrier, decide_on_primary, is_primary
from difftx.parallel.presets import apply_preset
from difftx.registry import EXTENSIONS_SHAPE, changed_extensions, loaded_extensions
from difftx.run_files import lock_workdir
from difftx.storage.paths import AnyPath, is_bucket
from difftx.training.checkpoint.manifest import MANIFEST, OtherFormatError, package_versions, read_manifest, steps_in
from difftx.training.fit import fit
from difftx.training.workload import attention_kernel

# Version of the format of a run's files, except checkpoints. Increase it when difftx can no longer read older files.
RUN_FORMAT = 1
LOCK_WAIT_SECONDS = 60.0
RANKING_SCHEMA = {"function": str, "conditions": {str: str}, "milliseconds": {str: float}, "rejected": {str: str}}
# Flags that may differ between processes. For `config` and `extension`, file contents are compared instead of paths.
OWN_FLAGS = ("distributed", "coordinator", "processes", "process", "config", "extension")
# JAX and XLA settings that may differ between processes, because they do not change numerical results.
OWN_SETTINGS = re.compile("visible_devices|device_count|num_cpu|cache|dump|debug|_log(ging)?_|traceback|mtls|address")


@dataclasses.dataclass(frozen=True)
class Run:
    """A validated config with its mesh, tokenizer and data. The run's files are stored in `workdir`."""

    config: Config
    workdir: AnyPath
    mesh: jax.sharding.Mesh
    tokenizer: Tokenizer
    data: Sources
    run_id: str | None = None  # Random identity of the run, also in its checkpoints. Set by `lock`.
    teacher: str | None = None  # Identifier of the weights of `train.teacher`, once they are read.
    owner: Owner = UNLOCKED  # Writes the files in `workdir` (`lock_workdir`).

    @classmethod
    def open(cls, config: Config, workdir: AnyPath, mesh: jax.sharding.Mesh | None = None) -> "Run":
        """Open the tokenizer and the data. The default mesh is `config.mesh` over all devices.

        Raise `UserError` in every process if the config does not fit the devices, data or tokenizer of any process, or
        if the data differs between processes.
        """

        def opened() -> Run:
            run_mesh = mesh or make_mesh(config.mesh)
            tokenizer = load_tokenizer(config.data.tokenizer, end_of_text=config.data.end_of_text)
            fit(config, run_mesh, tokenizer)
            return cls(config, workdir, run_mesh, tokenizer, load_sources(config.data, tokenizer))

        def contents(run: Run) -> dict[str, Any]:
            signature = {f"data: {name}": value for name, value in run.data.signature.items()}
            valid = run.data.valid_fingerprints
            return signature | {f"data: validation set {name}": value for name, value in valid.items()}

        return agree("the data", opened, contents, config.multihost.barrier_timeout_seconds)

    @property
    def files(self) -> Path:
        """Local folder with the run's small files. For a run in a bucket, only the primary process has it."""
        return self.owner.folder if is_bucket(self.workdir) else self.workdir

    @property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """Sharding of arrays with the axes `[rows, tokens]`."""
        return jax.NamedSharding(self.mesh, Layout().act_BT)

    @property
    def microbatch_rows(self) -> int:
        """Number of rows per microbatch, over all devices."""
        return self.config.batch_rows // self.config.train.accumulation

    @contextlib.contextmanager
    def lock(self) -> Iterator["Run"]:
        """Lock the workdir. Raise `UserError` if another training still holds the lock after a minute.

        Yield the run with `run_id` and `owner` set.
        """
        limits, held = self.config.multihost, contextlib.nullcontext(UNLOCKED)
        if is_primary():
            held = lock_workdir(self.workdir, limits.lock_takeover_seconds, LOCK_WAIT_SECONDS)
        with held as owner:
            # Wait for the primary process to get the lock. Until then, its previous holder may save a newer checkpoint.
            barrier("lock of the workdir", limits.barrier_timeout_seconds)
            run_id = decide_on_primary(lambda: _run_id(self.workdir), limits.barrier_timeout_seconds)
            yield dataclasses.replace(self, run_id=run_id, owner=owner)

    def check_records(self) -> None:
        """Raise an error in every process if an earlier attempt's manifest cannot be read or has another format."""

        def check() -> None:
            if size_of(self.workdir / MANIFEST) is not None:
                read_run_manifest(self.workdir)

        decide_on_primary(check, self.config.multihost.barrier_timeout_seconds)

    def write_files(self, source_weights: str | None = None, *, has_saved: bool = False) -> None:
        """Write config.json and manifest.json, with the devices, kernels and data of this run.

        `source_weights` is the identifier of the weights that the run began with, or None for new weights. `has_saved`
        says whether the run has a checkpoint (`note_save`).
        """
        devices = self.mesh.devices.flatten()
        manifest = {
            "run_id": self.run_id,
            "has_saved": has_saved,
            "command": shlex.join(sys.argv),
            "attention_kernel": attention_kernel(self.config, self.mesh),
            "kernels": {function: dataclasses.asdict(ranking) for function, ranking in kernels.rankings().items()},
            "devices": {"kind": devices[0].device_kind, "count": len(devices), "mesh": dict(self.mesh.shape)},
            "data": {
                **self.data.signature,
                "train_tokens": {name: rows.tokens for name, rows in self.data.train.items()},
                "valid_tokens": {name: rows.tokens for name, rows in self.data.valid.items()},
                "notes": self.data.notes,
            },
        }
        if source_weights is not None:
            manifest["source_weights"] = source_weights
        write_run_files(self.files, self.config, manifest, self.owner)

    def note_save(self) -> None:
        """Record in manifest.json that the run has saved a checkpoint. Only the primary process may call this."""
        path = self.files / MANIFEST
        content = read_file(path)  # A branch saves its first checkpoint before it writes this file.
        if content is not None and not (manifest := read_json(path, content)).get("has_saved"):
            self.owner.write(path, json.dumps(manifest | {"has_saved": True}, indent=2) + "\n")
            self.owner.push()

    def require_none_saved(self) -> None:
        """Raise `UserError` if the manifest says that a checkpoint was saved. Call this if no checkpoint is found."""
        path = self.files / MANIFEST
        if size_of(path) is not None and read_json(path).get("has_saved"):
            raise UserError(
                f"{self.workdir / 'checkpoints'}: there is no checkpoint, but {path} shows that one was saved; restore "
                f"it, or use a new --workdir. To start from step 0 here and lose the metrics, delete {path}"
            )


def agree_on_command(config: Config, flags: argparse.Namespace) -> None:
    """Raise `UserError` in every process if source, packages, extensions, flags or config differ between processes.

    Call this as soon as the processes have joined, because a difference could make one of them wait forever.
    """

    def fields() -> dict[str, Any]:
        compared = {f"--{name}": _comparable(value) for name, value in vars(flags).items() if name not in OWN_FLAGS}
        packages = {f"package {name}": version for name, version in package_versions().items()}
        loaded = sorted((Path(extension.path).name, extension.sha256) for extension in loaded_extensions())
        extensions = {f"extension {number}, {name}": sha256 for number, (name, sha256) in enumerate(loaded, start=1)}
        # The contents of the data are compared later, in `Run.open`.
        settings = flat(without(Config, values_of(config), Flag.PROCESS))
        return jax_settings() | {"difftx source": source_sha256()} | packages | extensions | compared | settings

    agree("the command", fields, dict, config.multihost.barrier_timeout_seconds)


def jax_settings() -> dict[str, str]:
    """Return the JAX and XLA settings that may change numerical results: all except paths and logging."""
    flags = (flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    settings = {**jax.config.values, **{f"XLA_FLAGS {name}": value for name, _, value in flags}}
    return {name: str(value) for name, value in settings.items() if not OWN_SETTINGS.search(name)}


def _comparable(flag: Any) -> Any:
    """Return a flag's value as JSON. Make local paths absolute, because processes may run in different folders."""
    if isinstance(flag, os.PathLike):
        return os.path.abspath(flag) if isinstance(flag, Path) else str(flag)
    return flag


def fit_to_devices(config: Config) -> Config:
    """Return the config for the available devices. If `mesh.preset` is "auto", apply the preset."""
    parameters = count_parameters(config.model).total
    return apply_preset(config, kind=jax.devices()[0].device_kind, devices=jax.device_count(), parameters=parameters)


def write_run_files(
    folder: Path, config: Config, details: Mapping[str, Any] | None = None, owner: Owner = UNLOCKED
) -> None:
    """Write `config.json` and `manifest.json`, the files that make a folder a run. Add `details` to the manifest."""
    manifest = {
        "format": RUN_FORMAT,
        "commit": _git_commit(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "source_sha256": source_sha256(),
        "extensions": list(map(dataclasses.asdict, config.used_extensions)),
        **(details or {}),
    }
    # Write the manifest first, because reading the config requires the extensions that the manifest names.
    owner.write(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    owner.write(folder / "config.json", config.to_json())


def read_config(workdir: AnyPath) -> Config:
    """Return the config of a run directory. Raise `UserError` if a required extension is not loaded.

    An extension may have changed since the manifest was written. Code that reads a checkpoint compares the extensions
    with those of the checkpoint.
    """
    require_run(workdir)
    changed_extensions(read_run_manifest(workdir)["extensions"], f"--workdir={workdir}")
    return config_from_dict(read_json(workdir / "config.json"))


def read_run_manifest(workdir: AnyPath) -> dict[str, Any]:
    """Read a run's `manifest.json`. Raise `UserError` if it is corrupt or has another format."""
    path = workdir / MANIFEST
    if size_of(path) is None:
        raise UserError(
            f"{workdir}: no {MANIFEST} there, so it is not a run; `difftx convert` makes one of other models"
        )
    manifest = read_json(path)
    if isinstance(manifest, dict) and (number := manifest.get("format")) != RUN_FORMAT:
        found = f"format {number}" if schema_error(number, int) is None else "no format number"
        raise OtherFormatError(
            f"{workdir}: {MANIFEST} has {found}, and this version of difftx reads runs of format {RUN_FORMAT}; "
            "use the version that wrote the run, or train again in a new --workdir"
        )
    if why := schema_error(manifest, {"format": int, "extensions": EXTENSIONS_SHAPE}):
        raise UserError(f"{path}: not the description of a run ({why})")
    return manifest


def recorded_rankings(workdir: AnyPath) -> dict[str, Ranking]:
    """Return the measured kernel rankings in a run's manifest, by attention function.

    Raise `UnreadableError` if the manifest cannot be read, because a new measurement could choose another kernel.
    """
    content = read_file(workdir / MANIFEST)
    try:
        found: Any = json.loads(content or b"")["kernels"].items()
    except (ValueError, LookupError, TypeError, AttributeError):  # `Run.check_records` reports a corrupt manifest.
        return {}
    return {name: Ranking(**ranking) for name, ranking in found if schema_error(ranking, RANKING_SCHEMA) is None}


def _run_id(workdir: AnyPath) -> str:
    """Return the run's identity from its manifest, else from its newest checkpoint, else a new one."""
    folder = workdir / "checkpoints"
    reads = [lambda: read_run_manifest(workdir).get("run_id")]
    reads += [lambda step=step: read_manifest(folder / str(step)).run_id for step in reversed(steps_in(folder))]
    for read in reads:
        with contextlib.suppress(UserError):
            if found := re.fullmatch("[0-9a-f]{32}", str(read())):
                return found[0]
    return uuid.uuid4().hex


def _git_commit() -> str | None:
    """Return the commit of this source tree, plus "+" if it has uncommitted changes. None without a repository."""
    options = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": True}
    try:
        top, commit = subprocess.run(["git", "rev-parse", "--show-toplevel", "HEAD"], **options).stdout.splitlines()
        status = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **options)
    except (OSError, subprocess.CalledProcessError):
        return None
    # If difftx is installed inside a user's repository, the commit is not difftx's.
    is_own = Path(top) == SOURCE.resolve()
    return commit + ("+" if status.stdout.strip() else "") if is_own else None
