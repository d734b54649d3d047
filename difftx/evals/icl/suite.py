"""Suite `icl`: classification from demonstrations in the prompt (Figures 6, 7 and 9 of the paper; docs/suites.md)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.icl.prompts import IclItem, IclTask
from difftx.evals.result import LineChart, Number, ReferenceLine, Result, ScatterChart, Series
from difftx.evals.suite import Suite
from difftx.inference.score import most_likely
from difftx.training.run import Run

type Accuracies = dict[tuple[str, int], list[float]]  # (order, number of demonstrations) → accuracy per permutation.

STABLE_WITHIN = 0.05  # Accuracies are stable if no two of them differ by more than this.
ROUNDING = 1e-9  # Tolerance for rounding errors in accuracies.


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
    """Return the first index from which on no two mean accuracies differ by more than `STABLE_WITHIN`."""
    start = len(means) - 1
    while start > 0 and max(means[start - 1 :]) - min(means[start - 1 :]) <= STABLE_WITHIN + ROUNDING:
        start -= 1
    return start


def tasks_of(run: Run) -> list[IclTask]:
    """Read the tasks of the config, or raise `UserError` if there is none or one is invalid."""
    if not run.config.eval.icl.tasks:
        raise UserError("suite 'icl': eval.icl.tasks is empty; name files of examples, see docs/config.md")
    return [IclTask(run, config) for config in run.config.eval.icl.tasks]


def _accuracies(evaluation: Evaluation, task: IclTask) -> Accuracies:
    def answer(items: Sequence[IclItem]) -> list[list[int]]:
        asked = [prompt for item in items for prompt in task.prompts(item)]
        chosen = most_likely(evaluation.lm, asked, task.labels, batch_rows=evaluation.run.microbatch_rows)
        return np.reshape(chosen, (len(items), -1)).tolist()

    accuracies: Accuracies = {}
    for item, answers in evaluation.answers(task.items, answer, what=f"orders of demonstrations of {task.name}"):
        for order in item.orders:
            accuracies.setdefault((order, item.shots), []).append(task.accuracy(answers))
    return accuracies


def _details(task: IclTask, accuracies: Accuracies) -> dict[str, Any]:
    labels = [example.label for example in task.questions]
    return {
        "labels": len(task.labels),
        "questions": len(task.questions),
        "most_frequent_label": max(map(labels.count, labels)) / len(labels),  # Accuracy of always choosing it.
        "shots_that_fit": task.most_shots,
        "tokens_of_these": task.context_tokens,
        "prompts": len(task.items) * len(task.questions),  # A permutation that both orders share counts once.
        "accuracy_of_each_permutation": [
            {"order": order, "shots": shots, "permutations": len(values), "accuracy": values}
            for (order, shots), values in accuracies.items()
        ],
    }


SUITE = Suite(
    evaluate=evaluate,
    check=tasks_of,
    title="Learning from demonstrations",
    explanation="Accuracy of classification with demonstrations in the prompt. The margin is the best minus the worst "
    "accuracy over permutations of the same demonstrations, so a small margin means that the order matters little.",
    revision=1,
)
