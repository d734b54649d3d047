"""Reading of checkpoints for eval.py, `generate` and `convert`, each with the config that it was trained with."""

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
from difftx.parallel.multihost import decide_on_primary, say
from difftx.registry import require_extensions
from difftx.training import agreement
from difftx.training.changes import config_for_reader
from difftx.training.checkpoint.checkpointer import DECISION_SECONDS, Checkpointer, config_of
from difftx.training.checkpoint.manifest import read_manifest
from difftx.training.run import Run

# Fields of `data` that locate the data. The signature in the manifest identifies its contents.
LOCATIONS = ("path", "sources", "tokenizer")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was when a reader opened it."""

    folder: Path
    weights: str  # Identifier of the parameters.
    sha256: str  # SHA-256 of the manifest.
    data: dict[str, Any]  # Signature of the training data, or of the tokenizer alone.
    config: Config  # Result of `config_for_reader`.
    now: Config  # Config of the run directory, with the reader's overrides.

    def require_unchanged(self) -> None:
        """Raise `RunError` unless the folder still holds the checkpoint. All processes must call this method."""
        decide_on_primary(self._require_unchanged, DECISION_SECONDS)

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
    """Return the checkpoint in `folder`, the same in every process, without verifying its arrays.

    Args:
        folder: Folder of the checkpoint.
        now: Config of the run directory, with the reader's overrides.

    Raises:
        UserError: manifest and config do not fit together, or an extension is not loaded or has changed.
    """

    def describe() -> dict[str, Any]:
        manifest = read_manifest(folder)
        require_extensions(manifest.extensions, str(folder))
        found = {"weights": manifest.weights, "sha256": manifest.sha256, "data": manifest.data}
        return found | {"config": json.loads(config_for_reader(config_of(folder), now).to_json())}

    found = decide_on_primary(describe, DECISION_SECONDS)
    return Checkpoint(folder, **found | {"config": config_from_dict(found["config"])}, now=now)


def read_newest[T](checkpointer: Checkpointer, read: Callable[[int], T]) -> T | None:
    """Return `read(step)` of the newest step that verifies, or None if there has never been a checkpoint.

    If training deletes the checkpoint meanwhile, `read` is called again with the step that is then the newest.

    Raises:
        RunError: one of several processes found the checkpoint deleted.
    """
    while (step := checkpointer.newest()) is not None:
        folder = checkpointer.folder / str(step)
        try:
            return read(step)
        except Exception as error:  # Orbax raises many exception types for a missing file.
            if folder.exists():
                raise
            if jax.process_count() > 1:  # The other processes may have read it.
                raise RunError(f"{folder} was deleted while it was read; run the same command again") from error
            say(f"checkpoint {folder} was deleted while it was read; reading the newest again")
    return None


def open_run(checkpoint: Checkpoint, workdir: Path) -> Run:
    """Open the run of a checkpoint, with the checkpoint's model and the present location of its training data."""
    for config in _moved(checkpoint):
        with contextlib.suppress(UserError):
            run = agreement.open_run(config, workdir)
            # The signature of an imported checkpoint has only the tokenizer: its training data is not known.
            signature = {name: run.data.signature.get(name) for name in checkpoint.data}
            if not signature_changes(checkpoint.data, signature):
                return run
    return agreement.open_run(checkpoint.config, workdir)


def open_tokenizer(checkpoint: Checkpoint) -> tuple[Config, tiktoken.Encoding]:
    """Return a config with the tokenizer's present location, and the tokenizer that the checkpoint was trained with.

    Raises:
        UserError: the tokenizer is missing, or its vocabulary differs from that of the checkpoint.
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
    """Yield the checkpoint's config with the data locations of the run directory's config, if the locations differ.

    The data may differ too, so the caller must compare them with the checkpoint's signature.
    """
    data = checkpoint.config.data
    with contextlib.suppress(UserError):  # Locations of other data may contradict the rest of the config.
        moved = dataclasses.replace(data, **{name: getattr(checkpoint.now.data, name) for name in LOCATIONS})
        if moved != data:
            yield dataclasses.replace(checkpoint.config, data=moved)
