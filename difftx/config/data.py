"""Config group `data`."""

from collections.abc import Sequence
from typing import Literal

from difftx.config.checks import require_distinct_names
from difftx.config.fields import AxisLength, Group, NotNegative, Positive, ProperShare, Seed
from difftx.errors import UserError

SYNTHETIC = "synthetic:"  # Prefix of data paths that name a task of difftx/data/synthetic.py.


class SourceConfig(Group):
    """A data source, an entry of `data.sources`."""

    name: str
    """Name of the source and of its validation set."""
    path: str
    """Path of the data, written as for `data.path`."""
    weight: float
    """Share of the rows, relative to the other sources. 0: the source is a validation set only."""


class StageConfig(Group):
    """A change of the source weights during training, an entry of `data.stages`."""

    from_tokens: int
    """Number of training tokens after which these weights apply, rounded up to 256 rows."""
    weights: tuple[float, ...]
    """One weight per entry of `data.sources`."""


class UpsamplingConfig(Group, path="data.upsampling"):
    """Up-sampling of long documents within each source (§3.3, arXiv 2402.10171)."""

    longer_than_tokens: Positive[int] | None = None
    """Length in tokens above which a document is long; None: no up-sampling."""
    share: ProperShare = 0.7
    """Share of a source's tokens that come from long documents. A source that has a larger share keeps it."""


class SyntheticConfig(Group, path="data.synthetic"):
    """Synthetic tasks, selected by data paths that start with "synthetic:"."""

    vocab_size: AxisLength = 8192
    """Number of different tokens; at most `model.vocab_size`."""
    pairs: Positive[int] = 64
    """Tasks mqar and retrieval: keys with values per example."""
    query_power: Positive[float] = 0.01
    """Task mqar: a gap g before a query has probability proportional to g ** (`query_power` - 1)."""
    distractors: NotNegative[int] = 256
    """Task retrieval: tokens placed among the pairs."""
    train_examples: Positive[int] = 100_000
    """Examples per epoch."""
    valid_examples: Positive[int] = 1000
    """Examples of the validation set."""
    seed: Seed = 0
    """Seed of the examples, below 2**32."""

    def __post_init__(self):
        super().__post_init__()
        if self.pairs > self.vocab_size // 2 - 1:
            raise UserError(
                f"data.synthetic.vocab_size={self.vocab_size} has no {self.pairs} different keys in its lower half; "
                f"use at least {2 * self.pairs + 2}"
            )


class DataConfig(Group, path="data"):
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
    sequence_length: AxisLength = 2048
    """Tokens per row."""
    packing: Literal["concat", "best_fit"] = "concat"
    """How documents fill rows. "concat": end to end, split every `sequence_length` tokens; "best_fit": whole where a
    row can hold them, with some padding."""
    document_mask: bool = False
    """Whether attention stays within a document. Positions then restart in each document, and a document's first token
    is not a target."""
    valid_fraction: ProperShare = 0.05
    """Share of a text's documents that are held out for validation, chosen by hash; a store has its own split."""
    seed: Seed = 0
    """Seed of the order of rows, below 2**32."""
    prefetch_batches: Positive[int] = 2
    """Batches prepared ahead of the step."""
    cache_path: str = "~/.cache/difftx"
    """Folder of packing indices for "best_fit", named by content. Runs share it, and it may be deleted at any time."""

    def __post_init__(self):
        super().__post_init__()
        if self.sources and self.path is not None:
            raise UserError(f"data.path={self.path!r} and data.sources are both set; set data.path to None")
        names = [source.name for source in self.sources]
        require_distinct_names("data.sources", names)
        if self.sources:
            _check_weights("data.sources", names, [source.weight for source in self.sources])
        start = 0
        for i, stage in enumerate(self.stages):
            if stage.from_tokens <= start:
                raise UserError(f"data.stages[{i}].from_tokens={stage.from_tokens} must be more than {start}")
            start = stage.from_tokens
            _check_weights(f"data.stages[{i}].weights", names, stage.weights)


def _check_weights(field: str, names: Sequence[str], weights: Sequence[float]) -> None:
    """Raise `UserError` unless each name has a weight of at least 0, and at least one weight is above 0."""
    if len(weights) != len(names):
        raise UserError(f"{field}={tuple(weights)}: {len(weights)} weights for the {len(names)} data.sources")
    if not all(weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise UserError(f"{field}={tuple(weights)}: weights must not be negative, and one must be positive")
