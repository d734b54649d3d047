"""Suite `math`: accuracy and length of answers to word problems (arXiv 2410.05258, ICLR camera-ready, App. C)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from difftx.errors import UserError, import_extra
from difftx.evals.evaluation import Evaluation
from difftx.evals.math.answers import is_right
from difftx.evals.math.prompts import STOP, MathItem, MathTask, files
from difftx.evals.result import LineChart, Result, Series
from difftx.evals.resume import resumable
from difftx.evals.suite import Suite
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import Sampling
from difftx.training.run import Run

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
SHOWN = 3  # Answers of each task in the details, each truncated to `SHOWN_CHARACTERS`.
SHOWN_CHARACTERS = 4000


def evaluate(evaluation: Evaluation) -> Result:
    """Generate an answer to each problem, and return numbers for each task and their means over tasks.

    `accuracy` is the share of answers that end with the right result. `tokens` is the mean length of answers.
    `truncated` is the share of answers that ended at the token limit.

    Raises:
        UserError: `open_tasks` raises it.
    """
    by_task, details, lines = {}, {}, []
    for task in open_tasks(evaluation.run):
        answers = _answers(evaluation, task)
        right = np.array([answer["right"] for _, answer in answers], np.float64)
        lengths = np.array([answer["tokens"] for _, answer in answers], np.float64)
        percentiles = np.percentile(lengths, PERCENTILES).tolist()
        by_task[task.name] = {
            "accuracy": float(np.mean(right)),
            "tokens": float(np.mean(lengths)),
            "truncated": float(np.mean([answer["ended_by"] == "limit" for _, answer in answers])),
        }
        details[task.name] = {
            "problems": len(answers),
            "accuracy_stderr": float(np.std(right, ddof=1)) / math.sqrt(len(right)) if len(right) > 1 else None,
            "tokens_by_percentile": dict(zip(map(str, PERCENTILES), percentiles, strict=True)),
            "least_tokens_allowed": min(task.room(item) for item in task.items),
            "first": [_shown(item, answer) for item, answer in answers[:SHOWN]],
        }
        lines.append(Series(name=task.name, x=[float(value) for value in PERCENTILES], y=percentiles))
    numbers = {
        f"average_{metric}": float(np.mean([of_task[metric] for of_task in by_task.values()]))
        for metric in ("accuracy", "tokens", "truncated")
    }
    for name, of_task in by_task.items():
        numbers |= {f"{name}_{metric}": value for metric, value in of_task.items()}
    chart = LineChart(
        name="math_tokens", title="Length of answers", x_label="percentile of answers", y_label="tokens", series=lines
    )
    return Result(numbers=numbers, details={"tasks": details}, charts=[chart])


def open_tasks(run: Run) -> list[MathTask]:
    """Read the tasks of `eval.math.tasks`.

    Raises:
        UserError: math-verify is not installed, the config has no task, a file is invalid, or the context does not hold
            a prompt.
    """
    import_extra("math_verify", "eval")
    if not run.config.eval.math.tasks:
        raise UserError("suite 'math': eval.math.tasks is empty; set it to files of problems (docs/config.md)")
    return [MathTask(run, config) for config in run.config.eval.math.tasks]


def _answers(evaluation: Evaluation, task: MathTask) -> list[tuple[MathItem, dict[str, Any]]]:
    settings = evaluation.run.config.eval.math
    sampling = Sampling(repetition_penalty=None, temperature=settings.temperature, top_k=None, top_p=None)

    def answer(items: Sequence[MathItem]) -> list[dict[str, Any]]:
        requests = [Request(prompt=item.prompt, new_tokens=task.room(item), seed=item.seed) for item in items]
        completions = generate(evaluation.lm, requests, sampling, stop=STOP)
        return [
            {
                "text": completion.text,
                "tokens": len(completion.tokens),
                "ended_by": completion.ended_by,
                "right": is_right(completion.text, item.problem),
            }
            for item, completion in zip(items, completions, strict=True)
        ]

    rows = evaluation.run.microbatch_rows
    return list(resumable(evaluation, task.items, answer, what=f"problems of {task.name}", batch_items=rows))


def _shown(item: MathItem, answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "problem": item.problem.name,
        **answer,
        "text": answer["text"][:SHOWN_CHARACTERS],
        "right_answer": item.problem.answer,
    }


SUITE = Suite(evaluate=evaluate, reads=("math",), check=open_tasks, files=files)
