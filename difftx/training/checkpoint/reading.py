"""Reading of checkpoints for eval.py, `generate` and `convert`, each with the config that it was trained with."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiktoken

from difftx.config import Config
from difftx.config.build import config_from_dict
from difftx.config.fields import values_of
from difftx.data.loader import signature_changes
from difftx.data.tokenizer import fingerprint, load_tokenizer
from difftx.errors import RunError, UserError
from difftx.parallel.multihost import decide_on_primary
from difftx.registry import require_extensions
from difftx.training.checkpoint.checkpointer import DECISION_SECONDS, config_of
from difftx.training.checkpoint.manifest import read_manifest
from difftx.training.resume import changed_fields
from difftx.training.run import Run

# Fields of `data` that only say where the data is. The signature in the manifest identifies the contents.
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

        def check() -> None:
            try:
                change = None if read_manifest(self.folder).sha256 == self.sha256 else "was replaced"
            except UserError:
                change = "was damaged" if self.folder.exists() else "was deleted"
            if change is not None:
                raise RunError(
                    f"{self.folder} {change} while this command used it, and no result was written; "
                    "run the same command again"
                )

        decide_on_primary(check, DECISION_SECONDS)


def open_checkpoint(folder: Path, now: Config) -> Checkpoint:
    """Return the checkpoint in `folder`, read by the primary process, without verifying its arrays.

    `now` is the config of the run directory, with the reader's overrides.
    """

    def describe() -> dict[str, Any]:
        manifest = read_manifest(folder)
        require_extensions(manifest.extensions, str(folder))
        found = {"weights": manifest.weights, "sha256": manifest.sha256, "data": manifest.data}
        return found | {"config": json.loads(config_for_reader(config_of(folder), now).to_json())}

    found = decide_on_primary(describe, DECISION_SECONDS)
    return Checkpoint(folder, **found | {"config": config_from_dict(found["config"])}, now=now)


def config_for_reader(trained: Config, now: Config) -> Config:
    """Return the config to read a checkpoint with: that of its training, with the neutral fields of `now`."""
    raw = values_of(trained)
    for change in changed_fields(trained, now):
        # The accumulation stays, because it must divide the rows of the training batch.
        if change.is_neutral and change.field != "train.accumulation":
            group, name = change.field.split(".")
            raw[group][name] = change.new
    return config_from_dict(raw)


def open_run(checkpoint: Checkpoint, workdir: Path) -> Run:
    """Open the run of a checkpoint, with the checkpoint's model and the present location of its training data."""
    for config in _moved(checkpoint):
        with contextlib.suppress(UserError):
            run = Run.open(config, workdir)
            # The training data of an imported checkpoint is not known, so its signature has only the tokenizer.
            signature = {name: run.data.signature.get(name) for name in checkpoint.data}
            if not signature_changes(checkpoint.data, signature):
                return run
    return Run.open(checkpoint.config, workdir)


def open_tokenizer(checkpoint: Checkpoint) -> tuple[Config, tiktoken.Encoding]:
    """Return a config with the tokenizer's present location, and the tokenizer that the checkpoint was trained with."""
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
    with contextlib.suppress(UserError):  # The locations may contradict other fields of the checkpoint's config.
        moved = dataclasses.replace(data, **{name: getattr(checkpoint.now.data, name) for name in LOCATIONS})
        if moved != data:
            yield dataclasses.replace(checkpoint.config, data=moved)
