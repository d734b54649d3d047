"""Synthetic recall tasks, generated on demand. Example i only depends on the task, the seed, the split and i.

`data.path = "synthetic:TASK"` selects a task, and the group `data.synthetic` has its parameters. Only answers count in
the loss. Token 0 is filler and separator. Of the other tokens, the lower half are keys and the upper half are values.
"""

import dataclasses
import json
from collections.abc import Callable

import numpy as np

from difftx.config.data import SYNTHETIC, DataConfig, SyntheticConfig
from difftx.data.packing import Row, empty_row
from difftx.errors import UserError
from difftx.registry import Registry

SPLITS = {"train": 0, "valid": 1}

type Example = tuple[np.ndarray, np.ndarray, np.ndarray]  # Tokens, positions with an answer, and the answers.


def mqar(config: SyntheticConfig, row_tokens: int, rng: np.random.Generator) -> Example:
    """Make an example of multi-query associative recall: key-value pairs, then each key again as a query.

    The answer to a query is the value of its key. As in Zoology (arXiv 2312.04927), the distance between a query and
    the pairs is even, and drawn from a power law. Answers are only targets, so all other tokens after the pairs are
    random.
    """
    keys, values = _keys_and_values(config, rng)
    context = 2 * config.pairs
    tokens = rng.integers(1, config.vocab_size, row_tokens)
    tokens[0:context:2], tokens[1:context:2] = keys, values
    steps = (row_tokens - context) // 2
    law = np.arange(1, steps + 1) ** (config.query_power - 1.0)
    queries = context + 2 * rng.choice(steps, config.pairs, replace=False, p=law / law.sum())
    tokens[queries] = keys
    return tokens, queries, values


def retrieval(config: SyntheticConfig, row_tokens: int, rng: np.random.Generator) -> Example:
    """Make an example of noisy key-value retrieval: shuffled pairs and distractors, then one key as a query."""
    tokens, positions, queried = retrieval_with_positions(config, row_tokens, rng)
    return tokens, np.array([len(tokens) - 1]), tokens[positions[[queried]] + 1]


def retrieval_with_positions(
    config: SyntheticConfig, row_tokens: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the tokens of a `retrieval` example, the position of each key, and the index of the queried key."""
    keys, values = _keys_and_values(config, rng)
    others = np.setdiff1d(np.arange(1, config.vocab_size), keys)  # Distractors may be values.
    is_pair = rng.permutation(np.arange(config.pairs + config.distractors) < config.pairs)
    starts = np.cumsum(1 + is_pair) - 1 - is_pair
    tokens = np.empty(_retrieval_tokens(config, row_tokens), np.int64)
    positions = starts[is_pair]
    tokens[positions], tokens[positions + 1] = keys, values
    tokens[starts[~is_pair]] = rng.choice(others, config.distractors)
    queried = int(rng.integers(config.pairs))
    tokens[-1] = keys[queried]
    return tokens, positions, queried


def copy(config: SyntheticConfig, row_tokens: int, rng: np.random.Generator) -> Example:
    """Make a copying example: half a row of random tokens, a separator, and the same tokens as the answer."""
    prefix = rng.integers(1, config.vocab_size, row_tokens // 2)
    tokens = np.concatenate([prefix, [0], prefix[:-1]])
    return tokens, np.arange(len(prefix), len(tokens)), prefix


def _retrieval_tokens(config: SyntheticConfig, row_tokens: int) -> int:
    return 2 * config.pairs + config.distractors + 1


def _values(config: SyntheticConfig) -> int:
    return config.vocab_size - config.vocab_size // 2


@dataclasses.dataclass(frozen=True)
class Task:
    """A task, defined by functions of the config and the number of tokens per row."""

    make: Callable[[SyntheticConfig, int, np.random.Generator], Example]  # Returns a random example.
    tokens: Callable[[SyntheticConfig, int], int]  # Returns the number of tokens in an example.
    # Returns how many tokens are equally likely as an answer. None if this number does not exist.
    candidates: Callable[[SyntheticConfig], int] | None = None


TASKS: Registry[Task] = Registry(
    "synthetic task",
    {
        "mqar": Task(mqar, lambda config, _: 4 * config.pairs, _values),
        "retrieval": Task(retrieval, _retrieval_tokens, _values),
        "copy": Task(copy, lambda _, row_tokens: max(2, row_tokens), lambda config: config.vocab_size - 1),
    },
)


class SyntheticRows:
    """Rows of a synthetic task, one example per row. The splits use different random streams."""

    threads = 1

    def __init__(self, path: str, config: DataConfig, split: str):
        name = path.removeprefix(SYNTHETIC)
        self._task, self._config, self.sequence_length = TASKS[name], config.synthetic, config.sequence_length
        self.task, self.name = name, f"{path}, {split}"
        self._document_mask = config.document_mask
        needed = self._task.tokens(self._config, self.sequence_length)
        if needed > self.sequence_length:
            raise UserError(
                f"data.sequence_length={self.sequence_length} is too short for {path!r}, whose examples have {needed} "
                "tokens; use longer rows, or fewer data.synthetic.pairs or distractors"
            )
        self._key = np.array([self._config.seed, SPLITS[split]], np.uint64)
        self._length = self._config.train_examples if split == "train" else self._config.valid_examples
        self.tokens = self._length * self.sequence_length
        # The size of the other split does not affect this one.
        parameters = {k: v for k, v in dataclasses.asdict(self._config).items() if not k.endswith("_examples")}
        self.fingerprint = json.dumps([path, split, self._length, parameters])

    def __len__(self) -> int:
        return self._length

    @property
    def chance(self) -> float | None:
        """The probability that a random guess is right, or None if the task does not define it."""
        return None if self._task.candidates is None else 1 / self._task.candidates(self._config)

    def random(self, index: int) -> np.random.Generator:
        if not 0 <= index < self._length:
            raise IndexError(f"example {index} of {self._length}")
        # Philox is counter-based: every example has its own range of counters, and a generator is cheap to create.
        return np.random.Generator(np.random.Philox(key=self._key, counter=np.array([0, 0, 0, index], np.uint64)))

    def __getitem__(self, index: int) -> Row:
        tokens, positions, answers = self._example(index)
        row = empty_row(self.sequence_length, np.array([len(tokens)]) if self._document_mask else None)
        row["tokens"][: len(tokens)] = tokens
        row["targets"][: len(tokens) - 1] = tokens[1:]
        row["targets"][positions] = answers
        row["loss_mask"][positions] = 1
        return row

    def row_tokens(self, index: int) -> int:
        return len(self._example(index)[0])

    def _example(self, index: int) -> Example:
        return self._task.make(self._config, self.sequence_length, self.random(index))


def _keys_and_values(config: SyntheticConfig, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw distinct keys from the lower half of the tokens, and distinct values from the upper half."""
    middle = config.vocab_size // 2
    keys = 1 + rng.choice(middle - 1, config.pairs, replace=False)
    values = middle + rng.choice(_values(config), config.pairs, replace=False)
    return keys, values
