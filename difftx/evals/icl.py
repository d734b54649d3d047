"""Suite `icl`: classification from demonstrations in the prompt (Figures 6, 7 and 9 of the paper; docs/suites.md).

A demonstration is a labelled text, followed by an empty line. The prompt ends with a question without its label:

    Question: How far is it from Denver to Aspen ?
    Type: NUM

Text and label are tokenised separately, so that a label always has the same tokens.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from difftx.config.eval import IclTaskConfig
from difftx.data.records import Record, read_records
from difftx.errors import UserError, did_you_mean
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import LineChart, Number, ReferenceLine, Result, ScatterChart, Series
from difftx.evals.suite import Suite
from difftx.inference.score import Prompt, most_likely
from difftx.storage.paths import path_of
from difftx.training.run import Run

type Accuracies = dict[tuple[str, int], list[float]]  # (order, number of demonstrations) → accuracy per permutation.

STABLE_WITHIN = 0.05  # Accuracies are stable if they all differ by at most this.
ROUNDING = 1e-9  # Tolerance for rounding errors in accuracies.


@dataclasses.dataclass(frozen=True)
class Example:
    """A text with its label, as tokens."""

    question: tuple[int, ...]  # Tokens of "Question: …\nType:".
    label: int  # Index into `IclTask.labels`.
    demonstration: tuple[int, ...]  # Tokens of the question, its label and an empty line.


@dataclasses.dataclass(frozen=True)
class IclItem:
    """A permutation of demonstrations. Each question of the task is asked after it."""

    task: str
    permutation: tuple[int, ...]  # Indices of the demonstrations, in this order.
    orders: tuple[str, ...]  # Entries of `eval.icl.orders` that produce this permutation.

    @property
    def shots(self) -> int:
        return len(self.permutation)


class IclTask:
    """The demonstrations, questions and labels of a task. Equal files, settings and tokenizers give equal tasks."""

    def __init__(self, run: Run, config: IclTaskConfig):
        """Read the files. Raise `UserError` if one is invalid, or if the context is too short for one demonstration."""
        self.name, self._config, self._tokenizer = config.name, config, run.tokenizer
        self._settings = run.config.eval.icl
        field = f"eval.icl.tasks, {config.name}"
        train, test = (
            list(read_records(path_of(of_path, path), field=of_path, what="examples"))
            for of_path, path in ((f"{field}.train", config.train), (f"{field}.test", config.test))
        )
        self._label_names = sorted({_one_line(record, config.label) for record in train})
        # Thanks to the line break, no label is a prefix of another. `most_likely` requires this.
        self.labels = tuple(self._encode(f" {name}\n") for name in self._label_names)
        rng = np.random.default_rng([self._settings.seed, 0])
        demonstrations = [self._example(train[i]) for i in rng.permutation(len(train))]
        examples = [self._example(record) for record in test]  # Check all records, even those that are not drawn.
        self.questions = [examples[i] for i in rng.permutation(len(test))[: self._settings.questions]]
        context_length = run.config.data.sequence_length
        # The last token of a label is only a target, so it needs no position in the context.
        answered = max(len(example.question) for example in self.questions) + max(map(len, self.labels))
        room = context_length + 1 - len(self._tokenizer.prefix) - answered
        ends = np.cumsum([len(example.demonstration) for example in demonstrations])
        self.most_shots = most = int(np.searchsorted(ends, room, side="right"))
        if not most:
            raise UserError(
                f"eval.icl.tasks, task {self.name!r}: data.sequence_length={context_length} does not hold a "
                f"demonstration and the longest question, which take {ends[0] - room} tokens more; leave the task out"
            )
        self._demonstrations = demonstrations[:most]
        self.context_tokens = int(ends[most - 1])  # Number of tokens in the demonstrations that fit.
        # Numbers of demonstrations, ascending. A number that does not fit is replaced by the largest one that does.
        shots = self._settings.shots or [*(2**i for i in range(most.bit_length())), most]
        self.shots = sorted({min(count, most) for count in shots})

    @functools.cached_property
    def items(self) -> list[IclItem]:
        """Return the distinct permutations for every number of demonstrations, smallest number first."""
        items = []
        for shots in self.shots:
            orders: dict[tuple[int, ...], list[str]] = {}
            for order in self._settings.orders:
                for permutation in self._permutations(order, shots):
                    orders.setdefault(permutation, []).append(order)
            items += [IclItem(self.name, permutation, tuple(names)) for permutation, names in orders.items()]
        return items

    def prompts(self, item: IclItem) -> list[Prompt]:
        """Return a prompt for each question, with the item's demonstrations as context."""
        demonstrations = (self._demonstrations[i].demonstration for i in item.permutation)
        context = (*self._tokenizer.prefix, *itertools.chain(*demonstrations))
        return [Prompt(context, example.question) for example in self.questions]

    def _permutations(self, order: str, shots: int) -> list[tuple[int, ...]]:
        """Return `eval.icl.permutations` distinct permutations of `shots` demonstrations, or all if there are fewer."""
        counts = Counter(example.label for example in self._demonstrations[:shots])
        factors = [shots] if order == "random" else [len(counts), *counts.values()]
        # 21! exceeds any number of permutations to draw. Factorials of thousands would take long to compute.
        limit = min(self._settings.permutations, math.prod(math.factorial(min(n, 21)) for n in factors))
        found: dict[tuple[int, ...], None] = {}
        draws = itertools.count()
        while len(found) < limit:
            rng = np.random.default_rng([self._settings.seed, 1, next(draws)])
            shuffled = rng.permutation(shots).tolist()
            found[tuple(shuffled if order == "random" else self._alternating(shuffled))] = None
        return list(found)

    def _alternating(self, shuffled: list[int]) -> list[int]:
        """Arrange demonstrations in rounds: each round has one demonstration per label, while any are left.

        Labels, and demonstrations of a label, keep the order of their first occurrence in `shuffled`.
        """
        by_label: dict[int, list[int]] = {}
        for i in shuffled:
            by_label.setdefault(self._demonstrations[i].label, []).append(i)
        rounds = itertools.zip_longest(*by_label.values())
        return [i for one_round in rounds for i in one_round if i is not None]

    def _example(self, record: Record) -> Example:
        text, name = _one_line(record, self._config.text), _one_line(record, self._config.label)
        if name not in self._label_names:
            raise UserError(
                f"{record.name}: {self._config.label}={name!r} is not a label of {self._config.train}."
                f"{did_you_mean(name, self._label_names)}"
            )
        question = self._encode(f"{self._config.text_word}: {text}\n{self._config.label_word}:")
        label = self._label_names.index(name)
        return Example(question, label, question + self.labels[label] + self._encode("\n"))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_ordinary(text, continues=True))


def evaluate(evaluation: Evaluation) -> Result:
    """Choose the most likely label for each question. Accuracy is the share of right labels."""
    numbers, details, charts = {}, {}, []
    for task in tasks_of(evaluation.run):
        accuracies = _accuracies(evaluation, task)
        x = [float(shots) for shots in task.shots]
        by_shots, averages, by_permutation = [], [], []
        details[task.name] = _details(task, accuracies)
        guess = details[task.name]["most_frequent_label"]
        for order in evaluation.run.config.eval.icl.orders:
            found = [accuracies[order, shots] for shots in task.shots]
            means = [float(np.mean(values)) for values in found]
            low, high = [min(values) for values in found], [max(values) for values in found]
            start = first_stable(means)
            stable = float(np.mean(means[start:]))
            numbers |= {
                f"{task.name}_{order}_accuracy": Number(means[-1], "share", "higher", chance=guess),
                f"{task.name}_{order}_margin": Number(high[-1] - low[-1], "share", "lower"),
                f"{task.name}_{order}_stable_accuracy": Number(stable, "share", "higher", chance=guess),
                f"{task.name}_{order}_stable_shots": Number(x[start], "demonstrations"),
            }
            by_shots.append(Series(name=order, x=x, y=means, low=low, high=high))
            averages.append(Series(name=f"{order}, average once stable", x=x[start:], y=[stable] * len(x[start:])))
            by_permutation.append(Series(name=order, x=[float(i) for i in range(len(found[-1]))], y=found[-1]))
        numbers[f"{task.name}_shots"] = Number(x[-1], "demonstrations")
        permutations = [0.0, max(line.x[-1] for line in by_permutation)]
        charts += [
            LineChart(  # Figure 6 of the paper.
                name=f"icl_{task.name}",
                title=f"{task.name}: accuracy, mean and range over permutations",
                x_label="demonstrations",
                y_label="accuracy (share)",
                series=[*by_shots, *averages, _guessing([x[0], x[-1]], guess)],
                log_x=True,
            ),
            ScatterChart(  # Figure 7 of the paper.
                name=f"icl_{task.name}_permutations",
                title=f"{task.name}: permutations of {task.shots[-1]} demonstrations",
                x_label="permutation",
                y_label="accuracy (share)",
                series=[*by_permutation, _guessing(permutations, guess)],
            ),
        ]
    return Result(numbers=numbers, details={"tasks": details}, charts=charts)


def _guessing(x: Sequence[float], accuracy: float) -> ReferenceLine:
    return ReferenceLine(name="always the most frequent label", x=x, y=[accuracy] * len(x))


def first_stable(means: Sequence[float]) -> int:
    """Return the first index from which all mean accuracies differ by at most `STABLE_WITHIN`."""
    start = len(means) - 1
    while start > 0 and max(means[start - 1 :]) - min(means[start - 1 :]) <= STABLE_WITHIN + ROUNDING:
        start -= 1
    return start


def tasks_of(run: Run) -> list[IclTask]:
    """Read the tasks in the config. Raise `UserError` if there are none, or one is invalid."""
    if not run.config.eval.icl.tasks:
        raise UserError("suite 'icl': eval.icl.tasks is empty; name files of examples, see docs/config.md")
    return [IclTask(run, config) for config in run.config.eval.icl.tasks]


def _accuracies(evaluation: Evaluation, task: IclTask) -> Accuracies:
    def answer(items: Sequence[IclItem]) -> list[list[int]]:
        asked = [prompt for item in items for prompt in task.prompts(item)]
        chosen = most_likely(evaluation.lm, asked, task.labels, batch_rows=evaluation.run.microbatch_rows)
        return np.reshape(chosen, (len(items), -1)).tolist()

    labels = [example.label for example in task.questions]
    accuracies: Accuracies = {}
    for item, answers in evaluation.answers(task.items, answer, what=f"orders of demonstrations of {task.name}"):
        for order in item.orders:
            accuracies.setdefault((order, item.shots), []).append(float(np.mean(np.equal(labels, answers))))
    return accuracies


def _details(task: IclTask, accuracies: Accuracies) -> dict[str, Any]:
    labels = [example.label for example in task.questions]
    return {
        "labels": len(task.labels),
        "questions": len(task.questions),
        "most_frequent_label": max(map(labels.count, labels)) / len(labels),  # Accuracy of always choosing it.
        "shots_that_fit": task.most_shots,
        "tokens_of_these": task.context_tokens,
        "prompts": len(task.items) * len(task.questions),  # Count a permutation once if both orders produce it.
        "accuracy_of_each_permutation": [
            {"order": order, "shots": shots, "permutations": len(values), "accuracy": values}
            for (order, shots), values in accuracies.items()
        ],
    }


def _one_line(record: Record, field: str) -> str:
    """Return a field's text on one line, because a line break ends a label. Raise `UserError` if it is blank."""
    text = " ".join(record.text(field).split())
    if not text:
        raise UserError(f"{record.name}: {field} is only white space")
    return text


SUITE = Suite(
    evaluate=evaluate,
    check=tasks_of,
    title="Learning from demonstrations",
    explanation="Accuracy of classification with demonstrations in the prompt. The margin is the best minus the worst "
    "accuracy over permutations of the same demonstrations, so a small margin means that the order matters little.",
    revision=1,
)
