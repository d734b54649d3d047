"""Suite `harness`: tasks of EleutherAI's lm-eval (Tables 1 and 8 of the Differential Transformer paper)."""

import contextlib
import functools
import importlib.metadata
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from difftx.config.eval import HARNESS_TASKS, HarnessConfig
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError, closest
from difftx.evals import check_suites
from difftx.evals.evaluation import Evaluation
from difftx.evals.harness import ruler
from difftx.evals.result import Better, Heatmap, Number, Result
from difftx.evals.suite import Suite

# The paper does not name its metrics. With these, Table 1's row for OpenLLaMA-3B-v2 equals the scores in the README of
# github.com/openlm-research/open_llama after rounding. Other metrics differ by up to 0.18.
PAPER_METRICS = dict.fromkeys(HARNESS_TASKS, "acc") | {"hellaswag": "acc_norm"}
LOCAL_TASKS = Path(__file__).parent / "tasks"
BOOTSTRAPS = 1000  # Resamples for standard errors of metrics such as F1. lm-eval's default, 100,000, takes minutes.


def evaluate(evaluation: Evaluation) -> Result:
    """Run lm-eval's tasks on the model."""
    settings = evaluation.run.config.eval.harness
    manager, tasks = load_tasks(settings, evaluation.lm.tokenizer)
    import lm_eval

    from difftx.evals.harness.model import HarnessModel

    model = HarnessModel(evaluation)
    lm_eval_results = lm_eval.simple_evaluate(
        model,
        tasks=list(tasks.values()),
        task_manager=manager,
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        bootstrap_iters=BOOTSTRAPS,
        log_samples=False,
        random_seed=None,  # A seed would make lm-eval reset the process's global random generators.
        numpy_random_seed=None,
        torch_random_seed=None,
        fewshot_random_seed=settings.seed,
    )
    return _result(list(tasks), lm_eval_results, model.truncated, _guesses(tasks))


def load_tasks(settings: HarnessConfig, tokenizer: Tokenizer) -> tuple[Any, dict[str, Any]]:
    """Return lm-eval's task manager, and the tasks and groups in `eval.harness.tasks` by name, with their data."""
    check_suites(["harness"])
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # Mute lm-eval's log of defaults.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # Keep lm-eval from forking, which fails with JAX's threads.
    paths = {"data_path": settings.data_path, "include_path": settings.include_path, "ruler_path": settings.ruler_path}
    for field, path in paths.items():
        if path is not None and not Path(path).is_dir():
            raise UserError(f"eval.harness.{field}={path}: no such folder")
    manager = _manager(settings.data_path, settings.include_path, settings.num_fewshot, built_in=False)
    if not {name for name in settings.tasks if not ruler.is_task(name)} <= set(manager.all_tasks):
        manager = _manager(settings.data_path, settings.include_path, settings.num_fewshot, built_in=True)
    tasks = {}
    for name in settings.tasks:
        block = ruler.prompts(tokenizer, settings) if ruler.is_task(name) else contextlib.nullcontext(manager)
        with block as manager_of_task:
            if name not in (names := manager_of_task.all_tasks):
                # Without a close match, `did_you_mean` would list thousands of names.
                hint = f" Did you mean {close!r}?" if (close := closest(name, names)) else ""
                raise UserError(f"eval.harness.tasks: lm-eval has no task {name!r}.{hint}")
            tasks |= _load(manager_of_task, name)
    return manager, tasks


@functools.cache
def _manager(data_path: str | None, include_path: str | None, num_fewshot: int | None, *, built_in: bool) -> Any:
    """Return lm-eval's task manager. With `built_in`, it has lm-eval's own tasks, which takes half a minute."""
    from lm_eval.tasks import TaskManager

    folders = [] if data_path is None else [LOCAL_TASKS]
    folders += [] if include_path is None else [Path(include_path)]
    metadata = None if data_path is None else {"data_path": data_path, "num_fewshot": num_fewshot or 0}
    return TaskManager(include_path=folders, include_defaults=built_in, metadata=metadata)


def _load(manager: Any, name: str) -> dict[str, Any]:
    """Return the task or group called `name`, or all tasks with the tag `name`, by name."""
    from datasets.exceptions import DatasetsError

    try:
        loaded = manager.load([name])
    except (OSError, DatasetsError) as error:
        raise UserError(
            f"eval.harness.tasks: the data of {name!r} cannot be downloaded from the Hugging Face hub ({error}); "
            "remove the task, or read its data from files with eval.harness.data_path"
        ) from error
    groups = loaded["groups"]
    return {name: groups[name]} if name in groups else loaded["tasks"]


def _guesses(tasks: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracy of guessing for each multiple-choice task that has been evaluated.

    It is the mean of 1 / choices over the questions. Groups, and tasks with their own scoring, have none.
    """
    guesses = {}
    for name, task in tasks.items():
        config: Any = getattr(task, "config", None)  # Groups have none, or one of another kind.
        if getattr(config, "output_type", None) == "multiple_choice" and config.process_results is None:
            choices: dict[int, set[int]] = {}  # Question → its choices.
            for request in task.instances or []:
                choices.setdefault(request.doc_id, set()).add(request.idx)
            if choices:
                guesses[name] = float(np.mean([1 / len(of_question) for of_question in choices.values()]))
    return guesses


def _result(
    tasks: Sequence[str], lm_eval_results: Mapping[str, Any], truncated: int, guesses: Mapping[str, float]
) -> Result:
    scores = {task: _numbers(values) for task, values in lm_eval_results["results"].items()}
    rows = {task: scores[task] for task in tasks if "acc" in scores.get(task, {})}  # Some groups have no mean accuracy.
    numbers = averages(rows)
    for task, values in scores.items():
        numbers |= {f"{task}_{metric}": value for metric, value in values.items()}
    table = Heatmap(
        name="harness",
        title="Accuracy of lm-eval's tasks",
        x_label="by likelihood (acc), by likelihood per character (acc_norm)",
        y_label="task",
        x=["acc", "acc_norm"],
        y=list(rows),
        values=[[row.get("acc"), row.get("acc_norm")] for row in rows.values()],
        value_label="accuracy",
        low=0.0,
        high=1.0,
    )
    details = {
        "lm_eval": importlib.metadata.version("lm_eval"),
        "questions": {task: counts["effective"] for task, counts in lm_eval_results["n-samples"].items()},
        "examples_in_a_prompt": lm_eval_results["n-shot"],
        "versions_of_tasks": lm_eval_results["versions"],
        "truncated_requests": truncated,
    }
    guessed = {task: {"acc": guess, "acc_norm": guess} for task, guess in guesses.items()}
    by_guessing = averages({task: guessed[task] for task in rows}) if rows.keys() <= guessed.keys() else {}
    by_guessing |= {f"{task}_{metric}": value for task in guessed for metric, value in guessed[task].items()}
    numbers = {name: number.but(chance=by_guessing.get(name)) for name, number in numbers.items()}
    return Result(numbers=numbers, details=details, charts=[table] if rows else [])


def averages(rows: Mapping[str, Mapping[str, float]]) -> dict[str, Number]:
    """Return the mean scores over tasks. If a task has no `acc_norm`, its `acc` is used.

    `average_paper` is the "Avg" in the paper's Tables 1 and 8. It exists only if all of `PAPER_METRICS` were evaluated.
    """
    scores = {}
    if rows:
        scores["average_acc"] = [row["acc"] for row in rows.values()]
        scores["average_acc_norm"] = [row.get("acc_norm", row["acc"]) for row in rows.values()]
    if PAPER_METRICS.keys() <= rows.keys():
        scores["average_paper"] = [rows[task][metric] for task, metric in PAPER_METRICS.items()]
    return {name: Number(np.mean(values), "share", "higher") for name, values in scores.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, Number]:
    """Return a task's numbers by metric. lm-eval's "acc,none" becomes "acc"; other filters become a suffix."""
    numbers = {}
    for name, value in values.items():
        metric, comma, filter_ = name.partition(",")
        # RULER's metrics are lengths. -1 stands for a length that was not evaluated.
        if comma and isinstance(value, int | float | np.number) and not (metric.isdigit() and value == -1):
            numbers[metric if filter_ == "none" else f"{metric}_{filter_}"] = Number(value, *_said_of(metric))
    return numbers


def _said_of(metric: str) -> tuple[str, Better]:
    """Return the unit and better direction of an lm-eval metric. Metrics not listed here have neither."""
    name = metric.removesuffix("_stderr")
    if name.isdigit() or name.endswith(("acc", "acc_norm", "exact_match", "f1")):
        return "share", None if metric.endswith("_stderr") else "higher"
    if metric.endswith("bits_per_byte"):
        return "bits per byte", "lower"
    return "", "lower" if metric.endswith("perplexity") else None


SUITE = Suite(
    evaluate=evaluate,
    check=lambda run: load_tasks(run.config.eval.harness, run.tokenizer),
    revision=2,
    title="Tasks of lm-eval",
    explanation="Share of multiple-choice questions in which the right choice is the most likely.",
)
