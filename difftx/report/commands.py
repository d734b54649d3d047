"""What eval.py's flags do."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import rich.console

from difftx import evals
from difftx.config_reader import override
from difftx.errors import UserError
from difftx.parallel import multihost
from difftx.report.curves import format_table, write_curves
from difftx.report.runs import Metric
from difftx.report.scaling import format_study, write_scaling
from difftx.training.checkpoint import Checkpointer
from difftx.training.run import Run, read_config
from difftx.training.state import init_state


def list_suites() -> int:
    """Print every suite with the first line of its module."""
    for name, suite in evals.SUITES.items():
        print(f"{name:<12}{(suite.__doc__ or '').splitlines()[0]}")
    return 0


def draw_curves(pattern: str, out: Path, metric: Metric) -> int:
    """Draw the runs that match and print their table and the files."""
    rows, files = write_curves(pattern, out, metric)
    _console().print(format_table(rows))
    print(*files, sep="\n")
    return 0


def fit_scaling(pattern: str, out: Path, metric: Metric) -> int:
    """Fit scaling laws to the runs or tables that match and print the fits, the matches and the files."""
    studies, files = write_scaling(pattern, out, metric)
    for study in studies:
        _console().print(*format_study(study), sep="\n")
        print(*(f"note: {note}" for note in study.notes), sep="\n", end="\n" if study.notes else "")
    print(*files, sep="\n")
    return 0


def write_report(workdirs: Sequence[Path], out: Path | None) -> int:
    """Write the page of one run, or of several to compare, and print where it is."""
    from difftx.report.page import write_page  # Bokeh takes half a second, which the other flags need not wait.

    print(write_page(workdirs, out or workdirs[0] / "report.html"))
    return 0


def run_suites(
    workdir: Path, suites: Sequence[str], step: int | None, overrides: Mapping[str, str], processes: argparse.Namespace
) -> int:
    """Evaluate one checkpoint of a run and print the numbers; `processes` are the flags of `multihost`."""
    evals.check_suites(suites)
    config = override(read_config(workdir), {f"eval.{name}": text for name, text in overrides.items()})
    multihost.start(processes, config.multihost)
    checkpointer = Checkpointer(workdir)
    step = checkpointer.newest() if step is None else checkpointer.verified(step)
    if step is None:
        raise UserError(f"--workdir={workdir}: no checkpoint there yet")
    run = Run.open(config, workdir)
    with jax.set_mesh(run.mesh):
        state, _ = checkpointer.restore(step, jax.eval_shape(lambda: init_state(config)), run.mesh)
    console = _console()
    console.quiet = not multihost.is_lead()
    for name, result in evals.evaluate(run, state.params, step, suites).items():
        shown = "  ".join(f"{key} {value:.4f}" for key, value in result.numbers.items())
        console.print(f"[bold]{workdir} step {step} {name}[/bold]  {shown}", highlight=False)
        for sample in result.details.get("samples", []):
            console.print(sample["prompt"], style="dim", end="", markup=False, highlight=False)
            console.print(sample["completion"], markup=False, highlight=False)
            console.rule()
    return 0


def _console() -> rich.console.Console:
    """Return a console as wide as the terminal; in a file or a pipe, wide enough for the tables."""
    return rich.console.Console(width=None if sys.stdout.isatty() else 120)
