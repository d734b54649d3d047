"""Evaluation suites by name. The training loop and eval.py run them through `evaluate`."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax

from difftx.errors import UserError, did_you_mean
from difftx.evals import exact_match, loss, sample
from difftx.evals.result import Result
from difftx.files import write_atomically
from difftx.parallel.multihost import is_lead
from difftx.training.run import Run

SUITES: dict[str, Callable[[Run, Any], Result]] = {
    "loss": loss.evaluate,
    "exact_match": exact_match.evaluate,
    "sample": sample.evaluate,
}


def check_suites(names: Sequence[str]) -> None:
    """Raise `UserError` for a name that is no suite."""
    for name in names:
        if name not in SUITES:
            raise UserError(f"suite {name!r}: no such suite.{did_you_mean(name, SUITES)}")


def evaluate(run: Run, params: Any, step: int, suites: Sequence[str]) -> dict[str, Result]:
    """Run suites on parameters of a step and write `<workdir>/evals/<suite>/<step>.json` for each."""
    check_suites(suites)
    results = {}
    with jax.set_mesh(run.mesh):
        for name in suites:
            results[name] = result = SUITES[name](run, params)
            if not is_lead():
                continue
            folder = run.workdir / "evals" / name
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"suite": name, "step": step, **dataclasses.asdict(result)}, indent=2)
            write_atomically(folder / f"{step}.json", text + "\n")
    return results
