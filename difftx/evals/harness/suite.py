"""Suite `harness`: tasks of EleutherAI's lm-eval, built in or from YAML files (arXiv 2410.05258, Tables 1 and 8)."""

import difflib
import functools
import importlib.metadata
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from difftx.config import Config
from difftx.config.eval import HarnessConfig
from difftx.errors import UserError, did_you_mean, import_extra
from difftx.evals.evaluation import Evaluation
from difftx.evals.harness.data import data_files
from difftx.evals.result import Heatmap, Result
from difftx.evals.suite import Suite
from difftx.training.run import Run

PAPER_METRICS = {
    "arc_challenge": "acc",
    "arc_easy": "acc",
    "boolq": "acc",
    "hellaswag": "acc_norm",
    "openbookqa": "acc",
    "piqa": "acc",
    "winogrande": "acc",
}
LOCAL_TASKS = Path(__file__).parent / "tasks"
# Resamples for standard errors of metrics that are not means, such as F1. lm-eval's default, 100,000, takes minutes.
BOOTSTRAPS = 1000


def evaluate(evaluation: Evaluation) -> Result:
    """Run lm-eval's tasks on the model.

    Numbers named `<task>_<metric>`, and their standard errors, are those of lm-eval. `average_acc` is the mean of `acc`
    over `eval.harness.tasks`. `average_acc_norm` is the mean of `acc_norm`, the accuracy of choices by likelihood per
    character, with `acc` for tasks without it. `average_paper` is the "Avg" of Tables 1 and 8: see `averages`.

    Raises:
        UserError: lm-eval is not installed, a task or its data is not available, or a request does not fit the context.
    """
    settings = evaluation.run.config.eval.harness
    manager, tasks = load_tasks(settings)
    from difftx.evals.harness.model import HarnessModel  # Imports lm-eval, an optional dependency.

    model = HarnessModel(evaluation)
    found = import_extra("lm_eval", "eval").simple_evaluate(
        model,
        tasks=list(tasks.values()),
        task_manager=manager,
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        bootstrap_iters=BOOTSTRAPS,
        log_samples=False,
        random_seed=None,  # With a seed, lm-eval would reset the process's global random generators.
        numpy_random_seed=None,
        torch_random_seed=None,
        fewshot_random_seed=settings.seed,
    )
    return _result(list(tasks), found, model.truncated)


def needs(run: Run) -> None:
    """Raise a `UserError` if lm-eval, a task or its data is not available."""
    load_tasks(run.config.eval.harness)


def files(config: Config) -> list[Path]:
    """Return the files that the suite reads in addition to the run's data."""
    settings = config.eval.harness
    data = [] if settings.data_path is None else data_files(settings.data_path, settings.tasks)
    others = [] if settings.include_path is None else sorted(Path(settings.include_path).rglob("*"))
    return data + [path for path in others if path.suffix in (".yaml", ".py")]


def load_tasks(settings: HarnessConfig) -> tuple[Any, dict[str, Any]]:
    """Return lm-eval's task manager, and the tasks and groups of the settings by name, with their data.

    Raises:
        UserError: lm-eval is not installed, a task does not exist, or its data is not available.
    """
    for module in ("lm_eval", "datasets"):
        import_extra(module, "eval")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # By default lm-eval logs every default and override.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's bootstrap would fork: JAX's threads do not survive it.
    for field, path in (("data_path", settings.data_path), ("include_path", settings.include_path)):
        if path is not None and not Path(path).is_dir():
            raise UserError(f"eval.harness.{field}={path}: no such folder")
    manager = _manager(settings.data_path, settings.include_path, settings.num_fewshot, own=False)
    if not set(settings.tasks) <= set(manager.all_tasks):
        manager = _manager(settings.data_path, settings.include_path, settings.num_fewshot, own=True)
    tasks = {}
    for name in settings.tasks:
        if name not in manager.all_tasks:
            raise UserError(f"eval.harness.tasks: lm-eval has no task {name!r}.{_near(name, manager.all_tasks)}")
        tasks |= _load(manager, name)
    return manager, tasks


@functools.cache
def _manager(data_path: str | None, include_path: str | None, num_fewshot: int | None, *, own: bool) -> Any:
    """Return a task manager; with `own`, also load the index of lm-eval's built-in tasks, which takes half a minute."""
    from lm_eval.tasks import TaskManager

    folders = [] if data_path is None else [LOCAL_TASKS]
    folders += [] if include_path is None else [Path(include_path)]
    metadata = None if data_path is None else {"data_path": data_path, "num_fewshot": num_fewshot or 0}
    return TaskManager(include_path=folders, include_defaults=own, metadata=metadata)


def _near(name: str, known: Sequence[str]) -> str:
    """Return the closest known name as a hint; if none is close, return "" rather than a list of thousands of names."""
    return did_you_mean(name, known) if difflib.get_close_matches(name, known, n=1, cutoff=0.5) else ""


def _load(manager: Any, name: str) -> dict[str, Any]:
    """Return the group or the task of a name, or the several tasks of a tag."""
    from datasets.exceptions import DatasetsError

    try:
        loaded = manager.load([name])
    except (OSError, DatasetsError) as error:
        raise UserError(
            f"eval.harness.tasks: the data of {name!r} cannot be had from the Hugging Face hub ({error}); leave it "
            "out, or read it from files, eval.harness.data_path"
        ) from error
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(
                f"eval.harness.tasks: {name!r} runs what a model writes, or shows it pictures; leave it out"
            )
    groups = loaded["groups"]
    return {name: groups[name]} if name in groups else loaded["tasks"]


def _result(tasks: Sequence[str], found: Mapping[str, Any], truncated: int) -> Result:
    """Return lm-eval's numbers and the means over `tasks`."""
    scores = {task: _numbers(values) for task, values in found["results"].items()}
    rows = {task: scores[task] for task in tasks if "acc" in scores.get(task, {})}  # Some groups have no mean accuracy.
    numbers = averages(rows)
    for task, values in scores.items():
        numbers |= {f"{task}_{metric}": value for metric, value in values.items()}
    table = Heatmap(
        name="harness",
        title="Accuracy of lm-eval's tasks",
        x_label="by likelihood (acc), by likelihood a character (acc_norm)",
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
        "questions": {task: counts["effective"] for task, counts in found["n-samples"].items()},
        "examples_in_a_prompt": found["n-shot"],
        "versions_of_tasks": found["versions"],
        "truncated_requests": truncated,
    }
    return Result(numbers=numbers, details=details, charts=[table] if rows else [])


def averages(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the means over tasks of `acc`, of `acc_norm` (`acc` for tasks without it), and of the paper's metrics.

    `average_paper` is the mean over the seven tasks of the paper, and exists only if all seven were evaluated. Its
    metrics are `acc_norm` for HellaSwag, and `acc` for ARC-C, ARC-E, BoolQ, OpenBookQA, PIQA and WinoGrande.

    The paper does not name its metrics; this choice is an inference. With these metrics, the row of OpenLLaMA-3B-v2 in
    Table 1 equals, when rounded, the column of that model in the README of github.com/openlm-research/open_llama. With
    the alternatives, the numbers differ (HellaSwag 70.0: acc_norm 0.70, acc 0.52; OpenBookQA 26.0: acc 0.26, acc_norm
    0.38).
    """
    numbers = {}
    if rows:
        numbers["average_acc"] = float(np.mean([row["acc"] for row in rows.values()]))
        numbers["average_acc_norm"] = float(np.mean([row.get("acc_norm", row["acc"]) for row in rows.values()]))
    if PAPER_METRICS.keys() <= rows.keys():
        numbers["average_paper"] = float(np.mean([rows[task][metric] for task, metric in PAPER_METRICS.items()]))
    return numbers


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return a task's numbers by metric: lm-eval's "acc,none" becomes "acc", other filters append "_<filter>"."""
    parts = ((name.partition(","), value) for name, value in values.items())
    return {
        metric if filtered == "none" else f"{metric}_{filtered}": float(value)
        for (metric, comma, filtered), value in parts
        if comma and isinstance(value, int | float | np.number)
    }


SUITE = Suite(evaluate=evaluate, reads=("harness",), check=needs, files=files)
