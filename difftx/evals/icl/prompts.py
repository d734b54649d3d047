"""Prompts of suite `icl`: demonstrations of a classification task, then a question.

A demonstration is a labelled text, followed by an empty line:

    Question: How far is it from Denver to Aspen ?
    Type: NUM

The question has the same form, without the label. Each part is tokenised separately, so that a label has the same
tokens everywhere.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np

from difftx.config.eval import IclConfig, IclTaskConfig
from difftx.data.records import Record, read_records
from difftx.errors import UserError, did_you_mean
from difftx.inference.score import Prompt
from difftx.training.run import Run


@dataclasses.dataclass(frozen=True)
class Example:
    """A text with its label."""

    question: tuple[int, ...]  # Tokens of "Question: …\nType:".
    label: int  # Index into `IclTask.labels`.

    def demonstration(self, labels: tuple[tuple[int, ...], ...], gap: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of question, label and empty line."""
        return self.question + labels[self.label] + gap


@dataclasses.dataclass(frozen=True)
class IclItem:
    """A permutation of demonstrations; each question of the task is asked after it."""

    task: str
    number: int  # Index among the items with the same number of demonstrations.
    permutation: tuple[int, ...]  # Indices of demonstrations.
    orders: tuple[str, ...]  # Entries of `eval.icl.orders` that produce this permutation.

    @property
    def shots(self) -> int:
        """The number of demonstrations."""
        return len(self.permutation)

    @property
    def id(self) -> str:
        """The item's name in a journal."""
        return f"{self.task}/{self.shots}/{self.number}"


class IclTask:
    """The demonstrations, questions and labels of a task.

    The same files, settings and tokenizer always give the same task.
    """

    def __init__(self, run: Run, config: IclTaskConfig):
        """Read the files.

        Demonstrations are drawn from the training file without regard to labels. Prompts with fewer demonstrations use
        the first of them.

        Raises:
            UserError: a file cannot be read or is empty, a line lacks a field or has an unknown label, or the context
                does not hold a demonstration and the longest question.
        """
        self.name, self._config, self._tokenizer = config.name, config, run.tokenizer
        self._settings: IclConfig = run.config.eval.icl
        self._gap = self._encode("\n")
        train = self._read(config.train, "train")
        self.label_names = sorted({self._label_of(record) for record in train})
        # The line break ensures that a label is never a prefix of another, as `most_likely` requires.
        self.labels = tuple(self._encode(f" {name}\n") for name in self.label_names)
        rng = np.random.default_rng([self._settings.seed, 0])
        demonstrations = [self._example(train[i]) for i in rng.permutation(len(train))]
        test = self._read(config.test, "test")
        questions = rng.permutation(len(test))[: self._settings.questions]
        examples = [self._example(record) for record in test]  # Check all records, including those that are not drawn.
        self.questions = [examples[i] for i in questions]
        room = run.config.data.sequence_length + 1  # The last token is only a target and needs no position.
        room -= max(len(example.question) for example in self.questions) + max(map(len, self.labels))
        ends = np.cumsum([len(example.demonstration(self.labels, self._gap)) for example in demonstrations])
        self.most_shots = int(np.searchsorted(ends, room, side="right"))
        if not self.most_shots:
            raise UserError(
                f"eval.icl.tasks, task {self.name!r}: data.sequence_length={run.config.data.sequence_length} does not "
                f"hold a demonstration and the longest question, which take {ends[0] - room} tokens more; leave it out"
            )
        self._demonstrations = demonstrations[: self.most_shots]
        self.context_tokens = int(ends[self.most_shots - 1])  # Tokens of the largest number of demonstrations.

    @property
    def shots(self) -> list[int]:
        """The numbers of demonstrations, ascending: `eval.icl.shots`, or powers of two and the most that fit.

        Numbers that exceed the context are replaced by the most that fit.
        """
        wanted = self._settings.shots or [2**i for i in range(self.most_shots.bit_length())] + [self.most_shots]
        return sorted({min(count, self.most_shots) for count in wanted})

    @functools.cached_property
    def items(self) -> list[IclItem]:
        """The permutations of every number of demonstrations, fewest demonstrations first, without duplicates."""
        items = []
        for shots in self.shots:
            orders: dict[tuple[int, ...], list[str]] = {}
            for order in self._settings.orders:
                for permutation in self._permutations(order, shots):
                    orders.setdefault(permutation, []).append(order)
            items += [
                IclItem(self.name, number, permutation, tuple(names))
                for number, (permutation, names) in enumerate(orders.items())
            ]
        return items

    def prompts(self, item: IclItem) -> list[Prompt]:
        """Return a prompt for each question, with an item's demonstrations before it."""
        demonstrations = [self._demonstrations[i] for i in item.permutation]
        context = tuple(token for example in demonstrations for token in example.demonstration(self.labels, self._gap))
        return [Prompt(context, example.question) for example in self.questions]

    def accuracy(self, answers: list[int]) -> float:
        """Return the share of questions whose chosen label is right."""
        return float(
            np.mean([example.label == answer for example, answer in zip(self.questions, answers, strict=True)])
        )

    def _permutations(self, order: str, shots: int) -> list[tuple[int, ...]]:
        """Return `eval.icl.permutations` distinct permutations, or all if there are fewer.

        Both orders process the same sequence of shuffles, and skip duplicates.
        """
        counts = Counter(example.label for example in self._demonstrations[:shots])
        factors = [shots] if order == "random" else [len(counts), *counts.values()]
        # 21! exceeds any possible number of permutations; factorials of thousands would take long to compute.
        limit = min(self._settings.permutations, math.prod(math.factorial(min(n, 21)) for n in factors))
        found: dict[tuple[int, ...], None] = {}
        draws = itertools.count()
        while len(found) < limit:
            rng = np.random.default_rng([self._settings.seed, 1, next(draws)])
            shuffled = rng.permutation(shots).tolist()
            found[tuple(shuffled if order == "random" else self._alternating(shuffled))] = None
        return list(found)

    def _alternating(self, shuffled: list[int]) -> list[int]:
        """Return the demonstrations in rounds, each with one demonstration of every label that has any left.

        Labels, and demonstrations within a label, keep the order of their first occurrence in `shuffled`.
        """
        turn = dict.fromkeys((self._demonstrations[i].label for i in shuffled), 0)
        place = {label: rank for rank, label in enumerate(turn)}
        rounds = []
        for i in shuffled:
            label = self._demonstrations[i].label
            rounds.append((turn[label], place[label], i))
            turn[label] += 1
        return [i for _, _, i in sorted(rounds)]

    def _read(self, path: str, field: str) -> list[Record]:
        return list(read_records(Path(path), field=f"eval.icl.tasks, {self.name}.{field}", what="examples"))

    def _label_of(self, record: Record) -> str:
        return _one_line(record, self._config.label)

    def _example(self, record: Record) -> Example:
        text, label = _one_line(record, self._config.text), self._label_of(record)
        if label not in self.label_names:
            raise UserError(
                f"{record.name}: {self._config.label}={label!r} is no label of {self._config.train}."
                f"{did_you_mean(label, self.label_names)}"
            )
        question = f"{self._config.text_word}: {text}\n{self._config.label_word}:"
        return Example(self._encode(question), self.label_names.index(label))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_ordinary(text))


def _one_line(record: Record, field: str) -> str:
    """Return a field's text on one line, without surrounding space; line breaks would end a label.

    Raises:
        UserError: the field is missing, is not text, or is only white space.
    """
    text = " ".join(record.text(field).split())
    if not text:
        raise UserError(f"{record.name}: {field} is only white space")
    return text
