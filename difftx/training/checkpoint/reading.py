"""Open a checkpoint for `eval`, `generate` or `convert`, with the config that it was trained with."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax

from difftx.config import Config
from difftx.config.build import config_from_dict
from difftx.config.data import DataConfig
from difftx.config.fields import Flag, fields_with, values_of
from difftx.data.loader import signature_changes
from difftx.data.sources import Sources, load_sources
from difftx.data.tokenizer import Tokenizer
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.registry import require_extensions
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import Manifest, WeightsPart
from difftx.training.checkpoint.restoring import config_of
from difftx.training.resume import changed_fields
from difftx.training.run import Run


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, and the config to use with it."""

    manifest: Manifest
    part: WeightsPart  # Weights to read: the parameters, or their average.
    config: Config  # Training config, with the run directory's values for fields that do not change results.
    run_config: Config  # Config of the run directory, with overrides from the command line.

    @property
    def weights(self) -> str:
        """Identifier of the weights: the manifest's, with "/ema" appended for the average."""
        return self.manifest.weights if self.part == "params" else f"{self.manifest.weights}/{self.part}"


def open_checkpoint(manifest: Manifest, run_config: Config, part: WeightsPart = "params") -> Checkpoint:
    """Open a checkpoint without verifying it. For `run_config`, see `Checkpoint`.

    Raise `UserError` if the checkpoint does not have the weights `part`.
    """
    folder = manifest.folder
    require_extensions(manifest.extensions, str(folder))
    if not any(name.startswith(f"{part}/") for name in manifest.arrays):
        raise UserError(f"--weights={part}: {folder} has no such weights; training with train.ema_decay saves them")
    return Checkpoint(manifest, part, config_for_reader(config_of(manifest), run_config), run_config)


def config_for_reader(trained: Config, run_config: Config) -> Config:
    """Return `trained`, but take the fields that affect results at most by rounding from `run_config`."""
    raw = values_of(trained)
    for change in changed_fields(trained, run_config):
        *groups, name = change.field.split(".")
        # Keep `train` and `logging`, because accumulation and profiled steps must fit the rows and steps of the
        # training.
        if change.is_neutral and groups[0] not in ("train", "logging"):
            group: Any = functools.reduce(operator.getitem, groups, raw)
            group[name] = change.new
    return config_from_dict(raw)


def open_run(checkpoint: Checkpoint, checkpoints: Checkpoints, mesh: jax.sharding.Mesh | None = None) -> Run:
    """Open the run of a checkpoint with the checkpoint's config. The training data may have been moved since.

    The default `mesh` is the one in the config, over all devices. Raise `UserError` if the training data is neither at
    its present location nor at its former one.
    """

    def opened(config: Config) -> Run:
        run = Run.open(config, checkpoints.workdir, mesh)
        _require_same_data(checkpoint, run.data)
        return run

    return _at_moved_data(checkpoint, opened)


def open_sources(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Sources:
    """Return the data that the checkpoint was trained on. Find it like `open_run` if it was moved."""

    def opened(config: Config) -> Sources:
        sources = load_sources(config.data, tokenizer)
        _require_same_data(checkpoint, sources)
        return sources

    return _at_moved_data(checkpoint, opened)


def open_tokenizer(checkpoint: Checkpoint) -> tuple[Config, Tokenizer]:
    """Return the checkpoint's tokenizer, and its config with the tokenizer's present location."""

    def opened(config: Config) -> tuple[Config, Tokenizer]:
        tokenizer = load_tokenizer(config.data.tokenizer, end_of_text=config.data.end_of_text)
        if tokenizer.fingerprint != checkpoint.manifest.data.get("tokenizer"):
            raise UserError(
                f"{checkpoint.manifest.folder} was trained with another vocabulary than data.tokenizer="
                f"{config.data.tokenizer!r} has now; put the tokenizer's file back"
            )
        return config, tokenizer

    return _at_moved_data(checkpoint, opened)


def _at_moved_data[T](checkpoint: Checkpoint, opened: Callable[[Config], T]) -> T:
    """Return `opened(config)`. Try the data locations of the run directory first, then those of the checkpoint.

    `opened` must raise `UserError` if a location does not have the data of the training.
    """
    data = checkpoint.config.data
    # The run directory's locations may be invalid together with the checkpoint's other fields.
    with contextlib.suppress(UserError):
        locations = {name: getattr(checkpoint.run_config.data, name) for name in fields_with(DataConfig, Flag.LOCATION)}
        if (moved := dataclasses.replace(data, **locations)) != data:
            return opened(dataclasses.replace(checkpoint.config, data=moved))
    return opened(checkpoint.config)


def data_changes(checkpoint: Checkpoint, signature: dict[str, Any]) -> list[str]:
    """Describe each entry in the checkpoint's data signature that differs from `signature`."""
    # The training data of an imported checkpoint is unknown, so its signature has only the tokenizer.
    trained = checkpoint.manifest.data
    return signature_changes(trained, {name: signature.get(name) for name in trained})


def _require_same_data(checkpoint: Checkpoint, data: Sources) -> None:
    """Raise `UserError` if the data changed since the training: validation text may have been training text."""
    if changes := data_changes(checkpoint, data.signature):
        raise UserError(
            f"{checkpoint.manifest.folder}: the data changed since the training: {', '.join(changes)}; restore the "
            "data, or train again (to evaluate another text, restore the data and use the suite 'test')"
        )
