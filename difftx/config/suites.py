"""The registry of evaluation suites. The names are known without an import of the suites, which takes seconds."""

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from difftx.registry import Registry

if TYPE_CHECKING:
    from difftx.evals.suite import Suite

# Each entry is a `Suite` (`difftx/evals/suite.py`).
SUITES: Registry["Suite"] = Registry(
    "suite",
    {
        "loss": "difftx.evals.loss:SUITE",
        "test": "difftx.evals.held_out:SUITE",
        "recall": "difftx.evals.recall:SUITE",
        "position": "difftx.evals.position:SUITE",
        "exact_match": "difftx.evals.exact_match:SUITE",
        "needle": "difftx.evals.needle.suite:SUITE",
        "icl": "difftx.evals.icl.suite:SUITE",
        "attention": "difftx.evals.attention.suite:SUITE",
        "hallucination": "difftx.evals.hallucination.suite:SUITE",
        "harness": "difftx.evals.harness.suite:SUITE",
        "math": "difftx.evals.math.suite:SUITE",
        "sample": "difftx.evals.sample:SUITE",
        "throughput": "difftx.evals.throughput:SUITE",
        "outliers": "difftx.evals.outliers.suite:SUITE",
        "quantize": "difftx.evals.quantize:SUITE",
        "cache": "difftx.evals.cache:SUITE",
        "gradients": "difftx.evals.gradients:SUITE",
    },
)


def suite_list() -> str:
    """Return a line for each suite: its name, and its `summary`."""
    width = max(map(len, SUITES)) + 2
    return "\n".join(f"{name:<{width}}{summary(name)}" for name in SUITES)


def summary(name: str) -> str:
    """Return the first line of the docstring of a suite's function `evaluate`."""
    module = SUITES.module_of(name)
    if module is None:
        return (SUITES[name].evaluate.__doc__ or "").partition("\n")[0]
    path = Path(__file__).parents[1] / f"{module.removeprefix('difftx.').replace('.', '/')}.py"
    functions = {node.name: node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.FunctionDef)}
    return (ast.get_docstring(functions["evaluate"]) or "").partition("\n")[0]
