"""Checkpoints as eval.py, `generate` and `convert` read them: each by the config that it was trained with."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import tiktoken

from difftx.config import Config
from difftx.config.build import config_from_dict
from difftx.data.loader import signature_changes
from difftx.data.tokenizer import fingerprint, load_tokenizer
from difftx.errors import RunError, UserError
from difftx.parallel.multihost import decided_by_lead, say
from difftx.registry import require_extensions
from difftx.training import agreement
from difftx.training.changes import config_for_reader
from difftx.training.checkpoint import DECISION_SECONDS, Checkpointer, config_of
from difftx.training.manifest import read_manifest
from difftx.training.run import Run

# Fields of `data` that say where the data is; the manifest's signature says what it is.
LOCATIONS = ("path", "sources", "tokenizer")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was when a reader opened it."""

    folder: Path
    weights: str  # Identity of the parameters.
    sha256: str  # Of the manifest.
    data: dict[str, Any]  # Signature of the training data, or of the tokenizer alone.
    config: Config  # `config_for_reader`.
    now: Config  # Of the run directory, with the reader's overrides.

    def require_unchanged(self) -> None:
        """Check that the folder still holds the checkpoint that was opened; all processes must call this.

        Raises:
            RunError: the checkpoint was deleted, replaced or damaged.
        """
        decided_by_lead(self._require_unchanged, DECISION_SECONDS)

    def _require_unchanged(self) -> None:
        try:
            change = None if read_manifest(self.folder).sha256 == self.sha256 else "was replaced"
        except UserError:
            change = "was damaged" if self.folder.exists() else "was deleted"
        if change is not None:
            raise RunError(
                f"{self.folder} {change} while this command used it, and no result was written; "
                "run the same command again"
            )


def open_checkpoint(folder: Path, now: Config) -> Checkpoint:
    """Return what the checkpoint in `folder` is, the same in every process; its arrays are not verified.

    Args:
        folder: of the checkpoint.
        now: the config of the run directory, with the reader's overrides.

    Raises:
        UserError: manifest or config cannot be read or do not fit together, or an extension that the checkpoint was
            trained with is not loaded or has changed.
    """

    def look() -> dict[str, Any]:
        manifest = read_manifest(folder)
        require_extensions(manifest.extensions, str(folder))
        found = {"weights": manifest.weights, "sha256": manifest.sha256, "data": manifest.data}
        return found | {"config": json.loads(config_for_reader(config_of(folder), now).to_json())}

    found = decided_by_lead(look, DECISION_SECONDS)
    return Checkpoint(folder, **found | {"config": config_from_dict(found["config"])}, now=now)


def read_newest[T](checkpointer: Checkpointer, read: Callable[[int], T]) -> T | None:
    """Return what `read` makes of the newest step that verifies; None where there never was a checkpoint.

    A training may delete that checkpoint meanwhile: `read` is then called with the step that is the newest by then.

    Raises:
        RunError: one of several processes found the checkpoint deleted.
    """
    while (step := checkpointer.newest()) is not None:
        folder = checkpointer.folder / str(step)
        try:
            return read(step)
        except Exception as error:  # Whatever orbax calls a file that is gone.
            if folder.exists():
                raise
            if jax.process_count() > 1:  # The other processes may have read it.
                raise RunError(f"{folder} was deleted while it was read; run the same command again") from error
            say(f"checkpoint {folder} was deleted while it was read; reading the newest again")
    return None


def open_run(checkpoint: Checkpoint, workdir: Path) -> Run:
    """Open the run that a checkpoint was trained in: its own model, and its own data where that is now.

    Raises:
        UserError: the config does not fit the devices, the data or the tokenizer.
    """
    for config in _moved(checkpoint):
        with contextlib.suppress(UserError):
            run = agreement.open_run(config, workdir)
            # An imported checkpoint was trained on no data here: its signature has the tokenizer alone.
            signature = {name: run.data.signature.get(name) for name in checkpoint.data}
            if not signature_changes(checkpoint.data, signature):
                return run
    return agreement.open_run(checkpoint.config, workdir)


def open_tokenizer(checkpoint: Checkpoint) -> tuple[Config, tiktoken.Encoding]:
    """Return the tokenizer that a checkpoint was trained with, and the config that says where it is now.

    Raises:
        UserError: there is none, or it has another vocabulary than the checkpoint.
    """
    for config in _moved(checkpoint):
        with contextlib.suppress(UserError):
            tokenizer = load_tokenizer(config.data.tokenizer)
            if fingerprint(tokenizer) == checkpoint.data.get("tokenizer"):
                return config, tokenizer
    tokenizer = load_tokenizer(checkpoint.config.data.tokenizer)
    if fingerprint(tokenizer) != checkpoint.data.get("tokenizer"):
        raise UserError(
            f"{checkpoint.folder} was trained with another vocabulary than data.tokenizer="
            f"{checkpoint.config.data.tokenizer!r} has now; put the tokenizer's file back"
        )
    return checkpoint.config, tokenizer


def _moved(checkpoint: Checkpoint) -> Iterator[Config]:
    """Yield the checkpoint's config with the run's present locations of data, if these differ.

    They may also be of other data, which the caller finds by the checkpoint's signature.
    """
    data = checkpoint.config.data
    with contextlib.suppress(UserError):  # Locations of other data may contradict the rest of the config.
        moved = dataclasses.replace(data, **{name: getattr(checkpoint.now.data, name) for name in LOCATIONS})
        if moved != data:
            yield dataclasses.replace(checkpoint.config, data=moved)
