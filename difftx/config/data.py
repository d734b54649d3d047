"""Group `data` of a config."""

import dataclasses
from typing import Literal

from difftx.config.checks import (
    require_distinct_names,
    require_not_negative,
    require_positive,
    require_seed,
    require_size,
    require_weights,
)
from difftx.errors import UserError

SYNTHETIC = "synthetic:"  # Of a data path: a task of difftx/data/synthetic.py.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """An entry of `data.sources`."""

    name: str
    path: str
    weight: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
    """An entry of `data.stages`."""

    from_tokens: int
    weights: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpsamplingConfig:
    """Group `data.upsampling`."""

    longer_than_tokens: int | None
    share: float

    def __post_init__(self):
        if self.longer_than_tokens is not None:
            require_positive("data.upsampling", "longer_than_tokens", self.longer_than_tokens)
        if not 0 < self.share < 1:
            raise UserError(f"data.upsampling.share={self.share} must lie between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Group `data.synthetic`."""

    vocab_size: int
    pairs: int
    query_power: float
    distractors: int
    train_examples: int
    valid_examples: int
    seed: int

    def __post_init__(self):
        for name in ("pairs", "query_power", "train_examples", "valid_examples"):
            require_positive("data.synthetic", name, getattr(self, name))
        require_size("data.synthetic", "vocab_size", self.vocab_size)
        require_not_negative("data.synthetic", "distractors", self.distractors)
        if self.pairs > self.vocab_size // 2 - 1:
            raise UserError(
                f"data.synthetic.vocab_size={self.vocab_size} has no {self.pairs} different keys in its lower half; "
                f"use at least {2 * self.pairs + 2}"
            )
        require_seed("data.synthetic", self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Group `data`."""

    path: str | None
    sources: tuple[SourceConfig, ...]
    stages: tuple[StageConfig, ...]
    upsampling: UpsamplingConfig
    synthetic: SyntheticConfig
    tokenizer: str
    verify: bool
    sequence_length: int
    packing: Literal["concat", "best_fit"]
    document_mask: bool
    valid_fraction: float
    seed: int
    prefetch_batches: int
    cache_path: str

    def __post_init__(self):
        require_size("data", "sequence_length", self.sequence_length)
        require_positive("data", "prefetch_batches", self.prefetch_batches)
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"data.valid_fraction={self.valid_fraction} must lie between 0 and 1")
        require_seed("data", self.seed)
        if self.sources and self.path is not None:
            raise UserError(f"data.path={self.path!r} and data.sources are both set; set data.path to None")
        names = [source.name for source in self.sources]
        require_distinct_names("data.sources", names)
        if self.sources:
            require_weights("data.sources", names, [source.weight for source in self.sources])
        start = 0
        for i, stage in enumerate(self.stages):
            if stage.from_tokens <= start:
                raise UserError(f"data.stages[{i}].from_tokens={stage.from_tokens} must be more than {start}")
            start = stage.from_tokens
            require_weights(f"data.stages[{i}].weights", names, stage.weights)
