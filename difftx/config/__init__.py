"""The config schema: frozen dataclasses that declare and validate all config fields."""

import json
from collections.abc import Iterator
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
from difftx.errors import UserError
from difftx.registry import Extension, extension_of


class Config(Group):
    """A complete, validated config with one attribute per group of fields."""

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

    def __post_init__(self):
        model, data, train = self.model, self.data, self.train
        unit = data.sequence_length * train.accumulation
        if train.global_batch_tokens % unit:
            raise UserError(
                f"train.global_batch_tokens={train.global_batch_tokens} is not a multiple of data.sequence_length × "
                f"train.accumulation = {unit}; use {max(1, round(train.global_batch_tokens / unit)) * unit}"
            )
        if (warmup := self.warmup_steps) >= train.steps:
            if (fraction := self.optimizer.warmup_fraction) is not None:
                raise UserError(
                    f"optimizer.warmup_fraction={fraction} leaves none of train.steps={train.steps} after the warm-up; "
                    "use a smaller fraction"
                )
            raise UserError(
                f"optimizer.warmup_steps={warmup} must be less than train.steps={train.steps}; set it to "
                f"{train.steps // 2}, or train.steps to {2 * warmup}"
            )
        if model.window is not None and model.window >= data.sequence_length:
            raise UserError(
                f"model.window={model.window} is not less than data.sequence_length={data.sequence_length}, so it "
                "would hide no token; use a smaller number, or none"
            )
        profiled = self.logging.profile_steps
        if profiled and sum(profiled) - 1 > train.steps:
            raise UserError(
                f"logging.profile_steps={profiled} ends after train.steps={train.steps}; use an earlier first step"
            )
        keep_best = self.checkpoint.keep_best
        if keep_best is not None and (suite := keep_best.split("/")[0]) not in self.eval.suites:
            raise UserError(
                f"checkpoint.keep_best={keep_best!r}: {suite} is not one of eval.suites={self.eval.suites}; add "
                "it there"
            )
        if keep_best is not None and self.checkpoint.every_steps % self.eval.every_steps:
            raise UserError(
                f"eval.every_steps={self.eval.every_steps} does not divide checkpoint.every_steps="
                f"{self.checkpoint.every_steps}, so that checkpoint.keep_best has no numbers to compare; use a divisor"
            )
        is_synthetic = any(path.startswith(SYNTHETIC) for path in data.paths)
        if is_synthetic and model.vocab_size is not None and data.synthetic.vocab_size > model.vocab_size:
            raise UserError(
                f"data.synthetic.vocab_size={data.synthetic.vocab_size} exceeds model.vocab_size={model.vocab_size}; "
                f"use at most {model.vocab_size}"
            )

    @property
    def batch_rows(self) -> int:
        """Number of rows per update, over all devices and microbatches."""
        return self.train.global_batch_tokens // self.data.sequence_length

    @property
    def warmup_steps(self) -> int:
        """Number of steps of the warm-up, from `optimizer.warmup_steps` or `optimizer.warmup_fraction`."""
        return _steps(self.optimizer.warmup_steps, self.optimizer.warmup_fraction, self.train.steps)

    @property
    def decay_steps(self) -> int:
        """Number of steps of the decay of schedule wsd, from `optimizer.decay_steps` or `optimizer.decay_fraction`."""
        warmup, decay = self.optimizer.warmup_fraction, self.optimizer.decay_fraction
        steps = max(1, _steps(self.optimizer.decay_steps, decay, self.train.steps))
        if warmup is not None and decay is not None and warmup + decay <= 1:
            # Both fractions may be rounded up to whole steps.
            return min(steps, self.train.steps - self.warmup_steps)
        return steps

    @property
    def extensions(self) -> list[Extension]:
        """The users' files that add the entries and groups which this config uses, sorted by path."""
        tasks = (path.removeprefix(SYNTHETIC) for path in self.data.paths)
        changed = (f"{path}.{name}" for path, name, value in self._added_groups() if value != type(value)())
        used = {
            "architecture": [self.model.architecture],
            "optimizer": [self.optimizer.name],
            "schedule": [self.optimizer.schedule],
            "suite": self.eval.suites,
            "synthetic task": tasks,
            GROUP: changed,
        }
        found = {extension_of(kind, name) for kind, names in used.items() for name in names}
        return sorted((extension for extension in found if extension), key=lambda extension: extension.path)

    def _added_groups(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the path of the parent, the name and the value of each group that an extension has added."""
        for path, group in vars(self).items():
            for name, value in getattr(group, "extensions", ()):
                yield path, name, value

    def to_json(self) -> str:
        """Return the config as indented JSON, the content of `config.json`, without groups of unused extensions."""
        values, used = values_of(self), [None, *self.extensions]
        for path, name, _ in self._added_groups():
            if extension_of(GROUP, f"{path}.{name}") not in used:
                del values[path][name]
        return json.dumps(values, indent=2) + "\n"


def _steps(steps: int | None, fraction: float | None, total: int) -> int:
    """Return `steps`, or the share `fraction` of `total` steps. Exactly one of both is None."""
    if fraction is None:
        assert steps is not None
        return steps
    return round(fraction * total)
