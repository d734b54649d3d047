"""A run: what training and evaluation share, and the files that describe it."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import tiktoken

from difftx.config import Config
from difftx.config_reader import saved_config
from difftx.data.sources import Sources, load_sources
from difftx.data.tokenizer import load_tokenizer
from difftx.errors import UserError
from difftx.files import read_json, write_atomically
from difftx.model.flops import count_parameters
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import check_divisible, make_mesh
from difftx.parallel.multihost import barrier, is_lead
from difftx.parallel.presets import apply_preset
from difftx.training.manifest import package_versions

LOCK_WAIT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked config with its mesh, tokenizer and data; `workdir` is where its files go."""

    config: Config
    workdir: Path
    mesh: jax.sharding.Mesh
    tokenizer: tiktoken.Encoding
    data: Sources

    @classmethod
    def open(cls, config: Config, workdir: Path) -> "Run":
        """Build the mesh and read the data.

        Raises:
            UserError: the config does not fit the devices, the data or the tokenizer.
        """
        mesh = make_mesh(config.mesh)
        check_divisible(config, mesh)
        tokenizer = load_tokenizer(config.data.tokenizer)
        check_vocabulary(config, tokenizer)
        return cls(config, workdir, mesh, tokenizer, load_sources(config.data, tokenizer))

    @property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """Sharding of a `[rows, tokens]` batch."""
        return jax.NamedSharding(self.mesh, Layout().act_BT)

    @property
    def microbatch_rows(self) -> int:
        """Rows that go through the model at once, over all devices."""
        return self.config.batch_rows // self.config.train.accumulation

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second training of this workdir out, and wait for one that is about to end.

        Raises:
            UserError: it has not ended within a minute.
        """
        with _lock_of(self.workdir) if is_lead() else contextlib.nullcontext():
            # Before it is held, another training may still save: none may look for the newest checkpoint.
            barrier("lock of the workdir", self.config.multihost.barrier_timeout_seconds)
            yield

    def write_description(self) -> None:
        """Write `config.json` and `manifest.json`, atomically."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        write_atomically(self.workdir / "config.json", self.config.to_json())
        devices = self.mesh.devices.flatten()
        manifest = {
            "commit": _git_commit(),
            "python": platform.python_version(),
            "packages": package_versions(),
            "devices": {
                "kind": devices[0].device_kind,
                "count": len(devices),
                "mesh": dict(self.mesh.shape),
            },
            "data": {
                **self.data.signature,
                "train_tokens": {name: rows.tokens for name, rows in self.data.train.items()},
                "valid_tokens": {name: rows.tokens for name, rows in self.data.valid.items()},
                "notes": self.data.notes,
            },
        }
        write_atomically(self.workdir / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def check_vocabulary(config: Config, tokenizer: tiktoken.Encoding) -> None:
    """Raise `UserError` where the model has fewer embeddings than the tokenizer has tokens."""
    if tokenizer.n_vocab > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is less than the {tokenizer.n_vocab} tokens of "
            f"data.tokenizer={config.data.tokenizer!r}; use at least {-(-tokenizer.n_vocab // 128) * 128}"
        )


def fit_to_devices(config: Config) -> Config:
    """Return the config with its preset for the devices here, if it asks for one."""
    parameters = count_parameters(config.model).total
    return apply_preset(config, kind=jax.devices()[0].device_kind, devices=jax.device_count(), parameters=parameters)


def read_config(workdir: Path) -> Config:
    """Return the config of an existing run directory.

    Raises:
        UserError: there is none, or it is not a config of this version.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise UserError(f"--workdir={workdir}: no config.json there, so it is no run; train one with train.py")
    return saved_config(read_json(path))


@contextlib.contextmanager
def _lock_of(workdir: Path) -> Iterator[None]:
    """Lock the folder itself, which stays locked if `.lock` is deleted, and `.lock`, which also names the process.

    NFS locks files alone; of earlier versions of difftx, `.lock` is the only lock.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    folder, path, deadline = os.open(workdir, os.O_RDONLY), workdir / ".lock", time.monotonic() + LOCK_WAIT_SECONDS
    try:  # The system frees the locks however the process ends.
        folder_is_locked = _wait_for_lock(folder, path, deadline)
        with path.open("a+") as file:
            if not _wait_for_lock(file.fileno(), path, deadline) and not folder_is_locked:
                print(f"{workdir}: no file locks here, so nothing keeps a second training out", flush=True)
            file.truncate(0)
            print(f"process {os.getpid()} on {platform.node()}", file=file, flush=True)
            yield
    finally:
        os.close(folder)


def _wait_for_lock(descriptor: int, path: Path, deadline: float) -> bool:
    """Lock an open file or folder; return False where the file system has no locks for it.

    Raises:
        UserError: another process, which `path` names, still holds the lock at the deadline.
    """
    holder = None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            # Some cluster file systems know no locks (Lustre without -o flock); NFS none of folders (EBADF).
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF):
                raise
            return False
        if holder is None:
            with contextlib.suppress(FileNotFoundError):
                holder = path.read_text().strip()
            holder = holder or "another process"
            print(f"{path.parent}: waiting for {holder}, which trains there", flush=True)
        if time.monotonic() > deadline:
            raise UserError(f"--workdir={path.parent}: {holder} trains there; stop it, or use another --workdir")
        time.sleep(0.2)


def _git_commit() -> str | None:
    """Return the commit of this source tree, with "+" for uncommitted changes; None outside of git."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "")
