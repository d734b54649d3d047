"""Suite `icl`: classification from demonstrations in the prompt (arXiv 2410.05258, §3.5: Figures 6, 7 and 9)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from difftx.config import Config
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.icl_prompts import IclItem, IclTask
from difftx.evals.result import LineChart, Result, Series
from difftx.evals.resume import resumable
from difftx.inference.score import most_likely
from difftx.training.run import Run

type Accuracies = dict[tuple[str, int], list[float]]  # By order and number of demonstrations, a permutation each.


def evaluate(evaluation: Evaluation) -> Result:
    """Take the most likely label of each question; accuracy is the share that is right.

    Of a task, under the most demonstrations: the mean accuracy over permutations, and the margin, best − worst.

    Raises:
        UserError: there is no task, or its files or the context do not serve.
    """
    run = evaluation.run
    numbers, details, charts = {}, {}, []
    for task in tasks_of(run):
        accuracies = _accuracies(evaluation, task)
        for order in run.config.eval.icl.orders:
            at_most = accuracies[order, task.shots[-1]]
            numbers[f"{task.name}_{order}_accuracy"] = float(np.mean(at_most))
            numbers[f"{task.name}_{order}_margin"] = max(at_most) - min(at_most)
        numbers[f"{task.name}_shots"] = float(task.shots[-1])
        details[task.name] = _details(task, accuracies)
        charts += _charts(task, accuracies)
    return Result(numbers=numbers, details={"tasks": details}, charts=charts)


def tasks_of(run: Run) -> list[IclTask]:
    """Return the tasks of the config, read.

    Raises:
        UserError: there is none, or its files or the context do not serve.
    """
    if not run.config.eval.icl.tasks:
        raise UserError("suite 'icl': eval.icl.tasks is empty; name files of examples, see configs/base.py")
    return [IclTask(run, config) for config in run.config.eval.icl.tasks]


def files(config: Config) -> list[Path]:
    """Return the files that the suite reads beside the run's own data."""
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
        accuracies.setdefault((item.order, item.shots), []).append(task.accuracy(answers))
    return accuracies


def _details(task: IclTask, accuracies: Mapping[tuple[str, int], list[float]]) -> dict[str, object]:
    labels = [example.label for example in task.questions]
    return {
        "labels": len(task.labels),
        "questions": len(task.questions),
        "most_frequent_label": max(map(labels.count, labels)) / len(labels),  # What needs no model.
        "shots_that_fit": task.most_shots,
        "tokens_of_these": task.context_tokens,
        "accuracy_of_each_permutation": [
            {"order": order, "shots": shots, "accuracy": values} for (order, shots), values in accuracies.items()
        ],
    }


def _charts(task: IclTask, accuracies: Mapping[tuple[str, int], list[float]]) -> list[LineChart]:
    """Return accuracy over the number of demonstrations (Figure 6), and of each permutation of the most (Figure 7)."""
    orders, shots = list(dict.fromkeys(order for order, _ in accuracies)), task.shots
    by_shots = [
        Series(
            name=order,
            x=[float(count) for count in shots],
            y=[float(np.mean(accuracies[order, count])) for count in shots],
            low=[min(accuracies[order, count]) for count in shots],
            high=[max(accuracies[order, count]) for count in shots],
        )
        for order in orders
    ]
    by_permutation = [
        Series(name=order, x=[float(i) for i in range(len(values))], y=values)
        for order in orders
        for values in [accuracies[order, shots[-1]]]
    ]
    return [
        LineChart(
            name=f"icl_{task.name}",
            title=f"{task.name}: accuracy, mean and range over permutations",
            x_label="demonstrations",
            y_label="accuracy",
            series=by_shots,
            log_x=True,
        ),
        LineChart(
            name=f"icl_{task.name}_permutations",
            title=f"{task.name}: permutations of {shots[-1]} demonstrations",
            x_label="permutation",
            y_label="accuracy",
            series=by_permutation,
        ),
    ]
