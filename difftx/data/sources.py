"""Training rows, from one source or a mixture, and validation sets, as the config's group `data` defines them."""

import dataclasses
import functools
from typing import Any

import grain
import tiktoken

from difftx.config.data import SYNTHETIC, DataConfig
from difftx.data.corpora import load_corpus
from difftx.data.mixture import BLOCK_ROWS, Mixture, Stage
from difftx.data.packing import BEST_FIT_VERSION, PackedRows, RowSource
from difftx.data.synthetic import SyntheticRows
from difftx.data.tokenizer import fingerprint
from difftx.data.upsampling import UpsampledStore

GOLDEN = 0x9E3779B9  # 2**32 / golden ratio. Spreads the seeds of sources, because grain adds the epoch to a seed.
ONLY_SOURCE, ONLY_SET = "train", "valid"  # Names of the source and the validation set from data.path.


@dataclasses.dataclass(frozen=True)
class Sources:
    """Training rows by source, and validation rows by set. With several sources, each has its own validation set."""

    config: DataConfig
    train: dict[str, RowSource]
    valid: dict[str, RowSource]
    signature: dict[str, Any]  # Settings that determine the order and content of the examples, as JSON.
    notes: tuple[str, ...]  # Messages for the user about up-sampling and packing.

    @functools.cached_property
    def examples(self) -> Any:
        """Endless random-access training rows: each source is reshuffled in every epoch, then mixed."""
        shuffled = [self._shuffled(grain.MapDataset.source(rows), i) for i, rows in enumerate(self.train.values())]
        return shuffled[0] if len(shuffled) == 1 else Mixture(shuffled, self._stages(), self.config.seed)

    def where(self, example: int) -> str:
        """Return the source and the row of a training example, for messages."""
        source, number = self.examples.locate(example) if len(self.train) > 1 else (0, example)
        rows = list(self.train.values())[source]
        return f"{rows.name}: row {self._shuffled(grain.MapDataset.range(len(rows)), source)[number]}"

    def _shuffled(self, rows: grain.MapDataset, source: int) -> grain.MapDataset:
        return rows.shuffle(seed=(self.config.seed + source * GOLDEN) % 2**32).repeat()

    def epochs(self, examples: int) -> dict[str, float]:
        """Return the number of passes over each source after `examples` examples.

        In a mixture, examples count in whole blocks, rounded up.
        """
        if len(self.train) == 1:
            return {name: examples / len(rows) for name, rows in self.train.items()}
        used = self.examples.used(-(-examples // BLOCK_ROWS))
        return {name: int(n) / len(rows) for n, (name, rows) in zip(used, self.train.items(), strict=True)}

    def _stages(self) -> list[Stage]:
        block_tokens = BLOCK_ROWS * self.config.sequence_length
        first = Stage(0, tuple(source.weight for source in self.config.sources))
        return [first, *(Stage(-(-stage.from_tokens // block_tokens), stage.weights) for stage in self.config.stages)]


def load_sources(config: DataConfig, encoding: tiktoken.Encoding) -> Sources:
    """Read, tokenise or open every source, then up-sample and pack it.

    Raises:
        UserError: If a source cannot be read, or is too short for a row.
    """
    train, valid, notes = {}, {}, []
    if not config.sources:
        train[ONLY_SOURCE], valid[ONLY_SET], notes = _load(config.path, config, encoding)
    for source in config.sources:
        train[source.name], valid[source.name], lines = _load(source.path, config, encoding)
        notes += [f"{source.name}: {line}" for line in lines]
    signature = {
        **{f"source {name}": rows.fingerprint for name, rows in train.items()},
        "weights": [source.weight for source in config.sources],
        "stages": [[stage.from_tokens, *stage.weights] for stage in config.stages],
        "upsampling": dataclasses.asdict(config.upsampling) if config.upsampling.longer_than_tokens else None,
        "tokenizer": fingerprint(encoding),
        "sequence_length": config.sequence_length,
        "packing": config.packing if config.packing == "concat" else f"best_fit {BEST_FIT_VERSION}",
        "document_mask": config.document_mask,
        "seed": config.seed,
    }
    return Sources(config, train, valid, signature, tuple(notes))


def _load(path: str | None, config: DataConfig, encoding: tiktoken.Encoding) -> tuple[RowSource, RowSource, list[str]]:
    """Return the training rows, the validation rows and the notes for a path."""
    if path is not None and path.startswith(SYNTHETIC):
        return SyntheticRows(path, config, "train"), SyntheticRows(path, config, "valid"), []
    train_store, valid_store = load_corpus(dataclasses.replace(config, path=path, sources=(), stages=()), encoding)
    notes = []
    if (longer_than := config.upsampling.longer_than_tokens) is not None:
        train_store = UpsampledStore(train_store, longer_than_tokens=longer_than, share=config.upsampling.share)
        notes.append(train_store.report)
    train, valid = (
        PackedRows(
            store,
            sequence_length=config.sequence_length,
            packing=config.packing,
            document_mask=config.document_mask,
            cache_path=config.cache_path,
        )
        for store in (train_store, valid_store)
    )
    if config.packing == "best_fit":
        padding = 1 - train.tokens / (len(train) * train.sequence_length)
        notes.append(f"packed into {len(train):,} rows, {padding:.2%} of them padding")
    return train, valid, notes
