"""Evaluation suites. The training loop and eval.py run them by `evaluate`."""

from difftx.evals.driver import (
    check_run,
    check_suites,
    evaluate,
    fields_of,
    result_path,
    settings,
    stored_result,
    with_inner,
)
from difftx.evals.evaluation import Evaluation
from difftx.evals.suite import SUITES

__all__ = [
    "SUITES",
    "Evaluation",
    "check_run",
    "check_suites",
    "evaluate",
    "fields_of",
    "result_path",
    "settings",
    "stored_result",
    "with_inner",
]
