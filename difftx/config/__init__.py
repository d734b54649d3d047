"""The config schema. Frozen dataclasses declare all config fields."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from difftx.config.data import SYNTHETIC, DataConfig
from difftx.config.eval import EvalConfig
from difftx.config.fields import GROUP, Group, values_of
from difftx.config.model import ModelConfig
from difftx.config.training import (
    CheckpointConfig,
    GuardsConfig,
    LoggingConfig,
    MeshConfig,
    MultihostConfig,
    OptimizerConfig,
    TrainConfig,
)
from difftx.registry import Extension, extension_of


class Config(Group):
    """A config, with one attribute per group of fields. `fit` (difftx/training/fit.py) checks the groups together."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    mesh: MeshConfig
    multihost: MultihostConfig
    checkpoint: CheckpointConfig
    guards: GuardsConfig
    eval: EvalConfig
    logging: LoggingConfig

    def but(self, **groups: Mapping[str, Any]) -> "Config":
        """Return a copy with some fields replaced, as in `config.but(mesh={"tensor": 4})`."""
        changed = {name: dataclasses.replace(getattr(self, name), **fields) for name, fields in groups.items()}
        return dataclasses.replace(self, **changed)

    @property
    def batch_rows(self) -> int:
        """Number of rows per update, over all devices and microbatches."""
        return self.train.global_batch_tokens // self.data.sequence_length

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps. If `optimizer.warmup_steps` is a share, convert it to steps."""
        return _count(self.optimizer.warmup_steps, self.train.steps)

    @property
    def decay_steps(self) -> int:
        """Number of decay steps of the schedule "wsd". If `optimizer.decay_steps` is a share, convert it to steps."""
        warmup, decay = self.optimizer.warmup_steps, self.optimizer.decay_steps
        steps = max(1, _count(decay, self.train.steps))
        # If both shares are rounded up, warm-up and decay together may exceed all steps.
        are_shares = warmup < 1 and decay < 1 and warmup + decay <= 1
        return min(steps, self.train.steps - self.warmup_steps) if are_shares else steps

    @property
    def used_extensions(self) -> list[Extension]:
        """The user files (extensions) that define registry entries or groups of this config, sorted by path."""
        tasks = (path.removeprefix(SYNTHETIC) for path in self.data.paths)
        used = {
            "architecture": [self.model.architecture],
            "optimizer": [self.optimizer.name],
            "schedule": [self.optimizer.schedule],
            "suite": self.eval.suites,
            "synthetic task": tasks,
            GROUP: [name for _, name, value in self._added_groups() if value != type(value)()],
        }
        found = {extension_of(kind, name) for kind, names in used.items() for name in names}
        return sorted((extension for extension in found if extension), key=lambda extension: extension.path)

    def _added_groups(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (parent's field, name for `extension_of`, value) for each group that an extension has added."""
        for field, group in vars(self).items():
            for name, value in getattr(group, "extensions", ()):
                yield field, f"{type(group).__name__}.{name}", value

    def to_json(self) -> str:
        """Return the config as the indented JSON of `config.json`. Groups of unused extensions are left out."""
        values, used = values_of(self), [None, *self.used_extensions]
        for field, name, _ in self._added_groups():
            if extension_of(GROUP, name) not in used:
                del values[field][name.rpartition(".")[2]]
        return json.dumps(values, indent=2) + "\n"


def _count(steps: float, total: int) -> int:
    """Convert `steps`, which may be a share of `total` steps, to a number of steps."""
    return round(steps * total) if steps < 1 else int(steps)
