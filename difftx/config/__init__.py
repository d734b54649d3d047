"""The config schema: frozen dataclasses that declare all config fields."""

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
    """A config with one attribute per group of fields. `fit` of difftx/training/fit.py checks them together."""

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
        """Return the config with other values of some fields, as in `config.but(mesh={"tensor": 4})`."""
        changed = {name: dataclasses.replace(getattr(self, name), **fields) for name, fields in groups.items()}
        return dataclasses.replace(self, **changed)

    @property
    def batch_rows(self) -> int:
        """Number of rows per update, over all devices and microbatches."""
        return self.train.global_batch_tokens // self.data.sequence_length

    @property
    def warmup_steps(self) -> int:
        """Number of steps of the warm-up. `optimizer.warmup_steps` may be a share of all steps."""
        return _count(self.optimizer.warmup_steps, self.train.steps)

    @property
    def decay_steps(self) -> int:
        """Number of steps of the decay of schedule wsd. `optimizer.decay_steps` may be a share of all steps."""
        warmup, decay = self.optimizer.warmup_steps, self.optimizer.decay_steps
        steps = max(1, _count(decay, self.train.steps))
        # Two shares may both be rounded up to whole steps.
        are_shares = warmup < 1 and decay < 1 and warmup + decay <= 1
        return min(steps, self.train.steps - self.warmup_steps) if are_shares else steps

    @property
    def used_extensions(self) -> list[Extension]:
        """The users' files that add the entries and groups which this config uses, sorted by path."""
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
        """Yield the parent's field, the name for `extension_of`, and the value of each added group."""
        for field, group in vars(self).items():
            for name, value in getattr(group, "extensions", ()):
                yield field, f"{type(group).__name__}.{name}", value

    def to_json(self) -> str:
        """Return the config as indented JSON, the content of `config.json`, without groups of unused extensions."""
        values, used = values_of(self), [None, *self.used_extensions]
        for field, name, _ in self._added_groups():
            if extension_of(GROUP, name) not in used:
                del values[field][name.rpartition(".")[2]]
        return json.dumps(values, indent=2) + "\n"


def _count(steps: float, total: int) -> int:
    """Return a number of steps, which may be given as a share of `total` steps."""
    return round(steps * total) if steps < 1 else int(steps)
