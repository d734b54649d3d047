"""Config group `data`."""

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

SYNTHETIC = "synthetic:"  # Prefix of data paths that name a task of difftx/data/synthetic.py.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A data source, an entry of `data.sources`."""

    name: str
    """Name of the source and of its validation set."""
    path: str
    """Path of the data, written as for `data.path`."""
    weight: float
    """Share of the rows, relative to the other sources. 0: the source is a validation set only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
    """A change of the source weights during training, an entry of `data.stages`."""

    from_tokens: int
    """Number of training tokens after which these weights apply, rounded up to 256 rows."""
    weights: tuple[float, ...]
    """One weight per entry of `data.sources`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpsamplingConfig:
    """Up-sampling of long documents within each source (§3.3, arXiv 2402.10171)."""

    longer_than_tokens: int | None = None
    """Length in tokens above which a document is long; None: no up-sampling."""
    share: float = 0.7
    """Share of a source's tokens that come from long documents. A source that has a larger share keeps it."""

    def __post_init__(self):
        require_positive("data.upsampling", self, "longer_than_tokens")
        if not 0 < self.share < 1:
            raise UserError(f"data.upsampling.share={self.share} must lie between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Synthetic tasks, selected by data paths that start with "synthetic:"."""

    vocab_size: int = 8192
    """Number of different tokens; at most `model.vocab_size`."""
    pairs: int = 64
    """Tasks mqar and retrieval: keys with values per example."""
    query_power: float = 0.01
    """Task mqar: a gap g before a query has probability proportional to g ** (`query_power` - 1)."""
    distractors: int = 256
    """Task retrieval: tokens placed among the pairs."""
    train_examples: int = 100_000
    """Examples per epoch."""
    valid_examples: int = 1000
    """Examples of the validation set."""
    seed: int = 0
    """Seed of the examples, below 2**32."""

    def __post_init__(self):
        require_positive("data.synthetic", self, "pairs", "query_power", "train_examples", "valid_examples")
        require_size("data.synthetic", self, "vocab_size")
        require_not_negative("data.synthetic", self, "distractors")
        require_seed("data.synthetic", self)
        if self.pairs > self.vocab_size // 2 - 1:
            raise UserError(
                f"data.synthetic.vocab_size={self.vocab_size} has no {self.pairs} different keys in its lower half; "
                f"use at least {2 * self.pairs + 2}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data, and the packing of documents into rows."""

    path: str | None = None
    """A store written by `difftx prepare`; text: "stdlib" (the running Python's library), a text file or a glob of text
    files; or a synthetic task: "synthetic:mqar", "synthetic:retrieval" or "synthetic:copy"."""
    sources: tuple[SourceConfig, ...] = ()
    """Several paths in place of `data.path`: ({"name": "books", "path": "stores/books", "weight": 0.7}, …). Each source
    is also a validation set. On the command line: JSON, or one field, such as --config.data.sources.0.weight=0.5."""
    stages: tuple[StageConfig, ...] = ()
    """Later weights of the sources: ({"from_tokens": 10_000_000_000, "weights": (0.3, 0.7)}, …)."""
    upsampling: UpsamplingConfig
    synthetic: SyntheticConfig
    tokenizer: str = "cl100k_base"
    """Tokenizer: "bytes", the name of a tiktoken encoding, or the path of a .tiktoken file."""
    verify: bool = False
    """Whether to compare the SHA-256 of a store's files with its description before the first step."""
    sequence_length: int = 2048
    """Tokens per row."""
    packing: Literal["concat", "best_fit"] = "concat"
    """How documents fill rows. "concat": end to end, split every `sequence_length` tokens; "best_fit": whole where a
    row can hold them, with some padding."""
    document_mask: bool = False
    """Whether attention stays within a document. Positions then restart in each document, and a document's first token
    is not a target."""
    valid_fraction: float = 0.05
    """Share of a text's documents that are held out for validation, chosen by hash; a store has its own split."""
    seed: int = 0
    """Seed of the order of rows, below 2**32."""
    prefetch_batches: int = 2
    """Batches prepared ahead of the step."""
    cache_path: str = "~/.cache/difftx"
    """Folder of packing indices for "best_fit", named by content. Runs share it, and it may be deleted at any time."""

    def __post_init__(self):
        require_size("data", self, "sequence_length")
        require_positive("data", self, "prefetch_batches")
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"data.valid_fraction={self.valid_fraction} must lie between 0 and 1")
        require_seed("data", self)
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
