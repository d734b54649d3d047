"""Suite `icl`: classification from demonstrations in the prompt (arXiv 2410.05258, §3.5: Figures 6, 7 and 9)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from difftx.config import Config
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.icl.prompts import IclItem, IclTask
from difftx.evals.result import LineChart, Result, Series
from difftx.evals.resume import resumable
from difftx.evals.suite import Suite
from difftx.inference.score import most_likely
from difftx.training.run import Run

type Accuracies = dict[tuple[str, int], list[float]]  # (order, number of demonstrations) → accuracy per permutation.

STABLE_WITHIN = 0.05  # Largest difference between stable accuracies, which are shares.
ROUNDING = 1e-9  # Tolerance for rounding errors in accuracies.


def evaluate(evaluation: Evaluation) -> Result:
    """Choose the most likely label for each question; accuracy is the share of right labels.

    For each task and order, the numbers are:

    - `accuracy` and `margin`: mean, and best − worst, over permutations of the largest number of demonstrations;
    - `stable_accuracy`: mean over the stable numbers of demonstrations, the dashed line of Figure 6;
    - `stable_shots`: the smallest stable number of demonstrations (see `first_stable`).

    Raises:
        UserError: the config has no task, a file is invalid, or the context does not hold a prompt.
    """
    run = evaluation.run
    numbers, details, charts = {}, {}, []
    for task in tasks_of(run):
        accuracies = _accuracies(evaluation, task)
        for order in run.config.eval.icl.orders:
            at_most = accuracies[order, task.shots[-1]]
            numbers[f"{task.name}_{order}_accuracy"] = float(np.mean(at_most))
            numbers[f"{task.name}_{order}_margin"] = max(at_most) - min(at_most)
            means = [float(np.mean(accuracies[order, shots])) for shots in task.shots]
            start = first_stable(means)
            numbers[f"{task.name}_{order}_stable_accuracy"] = float(np.mean(means[start:]))
            numbers[f"{task.name}_{order}_stable_shots"] = float(task.shots[start])
        numbers[f"{task.name}_shots"] = float(task.shots[-1])
        details[task.name] = _details(task, accuracies)
        charts += _charts(task, accuracies)
    return Result(numbers=numbers, details={"tasks": details}, charts=charts)


def first_stable(means: Sequence[float]) -> int:
    """Return the first index from which no two means differ by more than `STABLE_WITHIN`.

    The paper's Figure 6 averages accuracy "after the performance becomes stable" without a definition. This rule is
    difftx's own. If accuracy still changes at the end, only the largest number of demonstrations is stable.

    Args:
        means: mean accuracy for each number of demonstrations, in ascending order of that number.
    """
    start = len(means) - 1
    while start > 0 and max(means[start - 1 :]) - min(means[start - 1 :]) <= STABLE_WITHIN + ROUNDING:
        start -= 1
    return start


def tasks_of(run: Run) -> list[IclTask]:
    """Read the tasks of the config.

    Raises:
        UserError: the config has no task, a file is invalid, or the context does not hold a prompt.
    """
    if not run.config.eval.icl.tasks:
        raise UserError("suite 'icl': eval.icl.tasks is empty; name files of examples, see docs/config.md")
    return [IclTask(run, config) for config in run.config.eval.icl.tasks]


def _files(config: Config) -> list[Path]:
    return [Path(path) for task in config.eval.icl.tasks for path in (task.train, task.test)]


def _accuracies(evaluation: Evaluation, task: IclTask) -> Accuracies:
    rows = evaluation.run.microbatch_rows

    def answer(items: Sequence[IclItem]) -> list[list[int]]:
        asked = [prompt for item in items for prompt in task.prompts(item)]
        chosen = most_likely(evaluation.lm, asked, task.labels, batch_rows=rows)
        count = len(task.questions)
        return [chosen[start : start + count] for start in range(0, len(chosen), count)]

    accuracies: Accuracies = {}
    what = f"orders of demonstrations of {task.name}"
    for item, answers in resumable(evaluation, task.items, answer, what=what, batch_items=rows):
        for order in item.orders:
            accuracies.setdefault((order, item.shots), []).append(task.accuracy(answers))
    return accuracies


def _details(task: IclTask, accuracies: Mapping[tuple[str, int], list[float]]) -> dict[str, object]:
    labels = [example.label for example in task.questions]
    return {
        "labels": len(task.labels),
        "questions": len(task.questions),
        "most_frequent_label": max(map(labels.count, labels)) / len(labels),  # Accuracy of always choosing this label.
        "shots_that_fit": task.most_shots,
        "tokens_of_these": task.context_tokens,
        # Scored prompts; a permutation that both orders share is scored once.
        "prompts": len(task.items) * len(task.questions),
        "accuracy_of_each_permutation": [
            {"order": order, "shots": shots, "permutations": len(values), "accuracy": values}
            for (order, shots), values in accuracies.items()
        ],
    }


def _charts(task: IclTask, accuracies: Mapping[tuple[str, int], list[float]]) -> list[LineChart]:
    """Return a chart of accuracy by number of demonstrations (Figure 6), and one by permutation (Figure 7)."""
    x = [float(count) for count in task.shots]
    by_shots, averages, by_permutation = [], [], []
    for order in dict.fromkeys(order for order, _ in accuracies):
        found = [accuracies[order, count] for count in task.shots]
        means = [float(np.mean(values)) for values in found]
        low, high = [min(values) for values in found], [max(values) for values in found]
        by_shots.append(Series(name=order, x=x, y=means, low=low, high=high))
        start = first_stable(means)
        average = [float(np.mean(means[start:]))] * len(x[start:])
        averages.append(Series(name=f"{order}, average once stable", x=x[start:], y=average))
        by_permutation.append(Series(name=order, x=[float(i) for i in range(len(found[-1]))], y=found[-1]))
    return [
        LineChart(
            name=f"icl_{task.name}",
            title=f"{task.name}: accuracy, mean and range over permutations",
            x_label="demonstrations",
            y_label="accuracy",
            series=by_shots + averages,
            log_x=True,
        ),
        LineChart(
            name=f"icl_{task.name}_permutations",
            title=f"{task.name}: permutations of {task.shots[-1]} demonstrations",
            x_label="permutation",
            y_label="accuracy",
            series=by_permutation,
        ),
    ]


SUITE = Suite(evaluate=evaluate, reads=("icl",), check=tasks_of, files=_files)
