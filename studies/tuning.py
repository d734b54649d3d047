"""Helpers of the study scripts: their flags, sweeps of toy models on one core, and the choice of a learning rate.

This module has no command. A study chooses the learning rate of an arm on a seed that it does not report.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from difftx.errors import UserError
from difftx.report.runs import read_runs

ROOT = Path(__file__).resolve().parents[1]
# Seeds of the studies in docs/exploratory.md. studies/controls_study.py has those of the preregistered questions.
EXPLORATORY_TUNED_SEED = 3
EXPLORATORY_SEEDS = (0, 1, 2)
# Environment of a run that takes one core, as ONE_CORE in the Makefile. Two such runs are faster than one on two cores.
ONE_CORE = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
ERROR_CHARACTERS = 2000  # Length of the end of a failed command's output that the error message shows.


def study_parser(doc: str) -> argparse.ArgumentParser:
    """Return the parser of a study with the flags --out (a `Path`) and --jobs, described by the first line of `doc`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time (%(default)s)")
    return parser


def seed_axis(seeds: Iterable[int]) -> str:
    """Return the word of `difftx sweep --grid` for seeds, such as "seed=0,1,2"."""
    return f"seed={','.join(map(str, seeds))}"


def best_rate(rates: Iterable[float], loss: Callable[[float], float]) -> float:
    """Return the learning rate of the smallest `loss`, which is called once for each rate.

    Try `rates` first. While the best rate is the smallest or the largest one, try half or twice that rate too.
    """
    losses = {rate: loss(rate) for rate in rates}
    while untried := {(best := min(losses, key=losses.__getitem__)) / 2, best * 2} - losses.keys():
        losses |= {rate: loss(rate) for rate in sorted(untried)}
    return best


def run_difftx(out: Path, arguments: Sequence[str]) -> None:
    """Run a command of difftx on one core, if the folder `out` that it writes does not exist.

    Raises:
        UserError: The command failed, or did not write `out`.
    """
    if not out.exists():
        _run(out, arguments)


def sweep(out: Path, config: str, grid: Sequence[str], flags: Sequence[str]) -> float:
    """Run or resume `difftx sweep` on one core, and return the mean validation loss of its runs, in nats per token.

    Args:
        out: Folder of the sweep.
        config: File of the recipe, relative to the root of the project.
        grid: Words of --grid, such as "arm=diff,diff_v2".
        flags: Flags that change fields of all runs, such as "--config.train.steps=100".

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
        end = done.stdout[-ERROR_CHARACTERS:]
        raise UserError(f"{out}: difftx {arguments[0]} ended with exit code {done.returncode}:\n{end}")
