"""Config group `data`."""

from collections.abc import Sequence
from typing import Literal

from difftx.config import affects, flag
from difftx.config.checks import require_distinct_names
from difftx.config.fields import AxisLength, Group, NotNegative, Positive, Seed, UnitOpen
from difftx.errors import UserError

STDLIB = "stdlib"  # Data path that selects the source code of Python's standard library.
SYNTHETIC = "synthetic:"  # Prefix of data paths that select a task of difftx/data/synthetic.py.


class SourceConfig(Group):
    """An entry of `data.sources`: one of several sources of training data."""

    name: affects.Training[str]
    """Name of the source and of its validation set."""
    path: flag.Process[flag.Bucket[affects.Training[str]]]
    """Path of the data, in the format of `data.path`."""
    weight: affects.Training[float]
    """Share of the rows, relative to the other sources. With 0, the source is only a validation set."""


class StageConfig(Group):
    """An entry of `data.stages`: a change of the source weights during training."""

    from_tokens: affects.Training[int]
    """Number of training tokens after which these weights apply, rounded up to 256 rows."""
    weights: affects.Training[tuple[float, ...]]
    """Weight of each entry of `data.sources`."""


class UpsamplingConfig(Group):
    """Draw long documents more often, within each source (§3.3 of the paper, arXiv 2402.10171)."""

    longer_than_tokens: affects.Training[Positive[int] | None] = None
    """Length in tokens above which a document counts as long. None: no up-sampling."""
    share: affects.Training[UnitOpen] = 0.7
    """Share of a source's tokens that come from long documents. A source that already has a larger share is not
    changed."""


class SyntheticConfig(Group):
    """Settings of the synthetic tasks. A data path such as "synthetic:mqar" selects a task."""

    vocab_size: affects.Training[AxisLength] = 8192
    """Number of different tokens, at most `model.vocab_size`."""
    pairs: affects.Training[Positive[int]] = 64
    """Tasks mqar and retrieval: number of key-value pairs per example."""
    query_power: affects.Training[Positive[float]] = 0.01
    """Task mqar: the probability of a gap of g before a query is proportional to g ** (`query_power` - 1)."""
    distractors: affects.Training[NotNegative[int]] = 256
    """Task retrieval: number of irrelevant tokens placed among the pairs."""
    train_examples: affects.Training[Positive[int]] = 100_000
    """Number of training examples per epoch."""
    valid_examples: affects.Training[Positive[int]] = 1000
    """Number of examples in the validation set."""
    seed: affects.Training[Seed] = 0
    """Random seed of the examples, below 2**32."""

    def __post_init__(self):
        if self.pairs > self.vocab_size // 2 - 1:
            raise UserError(
                f"data.synthetic.vocab_size={self.vocab_size} has no {self.pairs} different keys in its lower half; "
                f"use at least {2 * self.pairs + 2}"
            )


class DataConfig(Group):
    """The training data, and how documents are packed into rows."""

    path: flag.Bucket[flag.Process[flag.Location[affects.Training[str | None]]]] = None
    """Path of a store written by `difftx prepare`, a text file or a glob of text files, "stdlib" for the source code of
    Python's library, or a synthetic task: "synthetic:mqar", "synthetic:retrieval" or "synthetic:copy". Stores and text
    may be in buckets, gs://… or s3://… (docs/storage.md)."""
    sources: flag.Location[affects.Training[tuple[SourceConfig, ...]]] = ()
    """Sources in place of `data.path`: ({"name": "books", "path": "stores/books", "weight": 0.7}, …). Each source
    is also a validation set. The command line accepts JSON, or one field as in --config.data.sources.0.weight=0.5."""
    stages: affects.Training[tuple[StageConfig, ...]] = ()
    """Changes of the source weights during training: ({"from_tokens": 10_000_000_000, "weights": (0.3, 0.7)}, …)."""
    upsampling: UpsamplingConfig
    synthetic: SyntheticConfig
    tokenizer: flag.Bucket[flag.Process[flag.Location[affects.Training[str]]]] = "cl100k_base"
    """Tokenizer: "bytes", the name of a tiktoken encoding, or a path. The path is a .tiktoken file, a tokenizer.json, a
    SentencePiece model (.model), or a folder that contains one of the last two."""
    end_of_text: flag.Process[flag.Location[affects.Training[str | None]]] = None
    """Name of the end-of-text token, if the tokenizer's files do not name it. None: the name in the files."""
    verify: affects.Nothing[bool] = False
    """Whether to verify the SHA-256 of each file of a store before the first step. False: only names and sizes. Do not
    replace a store while a run reads it: later reads are verified only in buckets."""
    sequence_length: flag.Kernel[affects.Training[AxisLength]] = 2048
    """Number of tokens per row."""
    packing: affects.Training[Literal["concat", "best_fit"]] = "concat"
    """How documents fill rows. "concat": documents are concatenated and split every `sequence_length` tokens.
    "best_fit": documents that fit into a row are not split, and rows have some padding."""
    document_mask: flag.Kernel[affects.Training[bool]] = False
    """Whether a token attends only to tokens of its own document. Positions then restart in each document, and the loss
    does not count a document's first token."""
    valid_fraction: affects.Training[UnitOpen] = 0.05
    """Share of the documents in text files that are held out for validation: at least one document, but not all. Files
    longer than 64 KiB are split at line ends into documents of about 64 KiB. A store has its own validation split."""
    seed: flag.Seed[affects.Training[Seed]] = 0
    """Random seed of the order of rows, below 2**32."""
    prefetch_batches: affects.Nothing[Positive[int]] = 2
    """Number of batches that are prepared in advance."""
    cache_path: flag.Process[affects.Nothing[str]] = "~/.cache/difftx"
    """Local folder that caches parts of stores in buckets. All runs share it, and you can delete it at any time."""
    cache_mib: flag.Process[affects.Nothing[Positive[int]]] = 16_384
    """Size limit of this cache in MiB."""

    def __post_init__(self):
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

    @property
    def paths(self) -> list[str]:
        """The data paths: `path` if it is set, else the paths of `sources`."""
        return [source.path for source in self.sources] if self.path is None else [self.path]


def _check_weights(field: str, names: Sequence[str], weights: Sequence[float]) -> None:
    if len(weights) != len(names):
        raise UserError(f"{field}={tuple(weights)}: {len(weights)} weights for the {len(names)} data.sources")
    if not all(weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise UserError(f"{field}={tuple(weights)}: weights must not be negative, and one must be positive")
