"""Sweeps of toy models on one core, and the choice of a learning rate on a seed that is not reported."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from difftx.errors import UserError
from difftx.report.runs import read_runs

ROOT = Path(__file__).resolve().parents[1]
# Seeds of the studies in docs/exploratory.md. benchmarks/controls_study.py has those of the preregistered questions.
EXPLORATORY_TUNED_SEED = 3
EXPLORATORY_SEEDS = (0, 1, 2)
ONE_CORE = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}


def best_rate(rates: Iterable[float], loss: Callable[[float], float]) -> float:
    """Return the learning rate of the smallest loss.

    While the best rate is the smallest or the largest one, try half or twice that rate too.
    """
    losses = {rate: loss(rate) for rate in rates}
    while untried := {(best := min(losses, key=losses.__getitem__)) / 2, best * 2} - losses.keys():
        losses |= {rate: loss(rate) for rate in sorted(untried)}
    return best


def run_difftx(out: Path, arguments: Sequence[str]) -> None:
    """Run a command of difftx on one core, if the folder `out` that it writes does not exist."""
    if not out.exists():
        _run(out, arguments)


def sweep(out: Path, config: str, grid: Sequence[str], flags: Sequence[str]) -> float:
    """Run or continue `difftx sweep` on one core, and return the mean validation loss of its runs, in nats per token.

    Raises:
        UserError: A run failed.
    """
    _run(out, ["sweep", f"--config={config}", f"--out={out}", "--grid", *grid, *flags])
    runs = read_runs([out / run["name"] for run in json.loads((out / "sweep.json").read_text())["runs"]])
    losses = [max(run.results["loss"].items())[1]["numbers"]["loss"] for run in runs]
    return sum(losses) / len(losses)


def _run(out: Path, arguments: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "difftx", *arguments],
        cwd=ROOT,
        env=os.environ | ONE_CORE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode or not out.exists():
        raise UserError(f"{out}: difftx {arguments[0]} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}")
