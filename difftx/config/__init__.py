"""The config schema: frozen dataclasses that declare all config fields."""

import json

from difftx.config.data import DataConfig
from difftx.config.eval import EvalConfig
from difftx.config.fields import Group, values_of
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

    def to_json(self) -> str:
        """Return the config as indented JSON, the content of `config.json`."""
        return json.dumps(values_of(self), indent=2) + "\n"


def _count(steps: float, total: int) -> int:
    """Return a number of steps, which may be given as a share of `total` steps."""
    return round(steps * total) if steps < 1 else int(steps)
