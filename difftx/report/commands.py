"""What eval.py's flags do."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console

from difftx import evals
from difftx.config import Config
from difftx.config_reader import override
from difftx.data.progress import Work
from difftx.errors import UserError
from difftx.files import read_json
from difftx.parallel import multihost
from difftx.parallel.mesh import check_divisible, make_mesh
from difftx.report.curves import format_table, write_curves
from difftx.report.runs import Metric
from difftx.report.scaling import format_study, write_scaling
from difftx.training.agreement import agree_on_command, open_run
from difftx.training.checkpoint import DECISION_SECONDS, Checkpointer, restore_params
from difftx.training.run import Run, read_config
from difftx.training.state import init_state


def list_suites() -> int:
    """Print every suite with the first line of its module."""
    width = max(map(len, evals.SUITES)) + 2
    for name, suite in evals.SUITES.items():
        print(f"{name:<{width}}{(suite.__doc__ or '').splitlines()[0]}")
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
    workdir: Path,
    suites: Sequence[str],
    steps: str | None,
    overrides: Mapping[str, str],
    again: bool,
    processes: argparse.Namespace,
) -> int:
    """Evaluate checkpoints of a run and print the numbers.

    Args:
        workdir: of the run.
        suites: names.
        steps: as `chosen_steps` reads them; None: the newest checkpoint.
        overrides: fields of the run's config.
        again: do what is done already.
        processes: all flags of the command, with those of `multihost`.

    Raises:
        UserError: bad input, in any process, or a checkpoint does not verify; the others are evaluated first.
    """
    evals.check_suites(suites)
    config = override(read_config(workdir), overrides)
    multihost.start(processes, config.multihost)
    agree_on_command(config, processes)
    checkpointer = Checkpointer(workdir)
    chosen = _choose(checkpointer, workdir, steps)
    _check_mesh(config)
    run = open_run(config, workdir, lambda run: evals.check_run(run, suites))
    damaged = []
    with Work(enabled=multihost.is_lead()) as work:
        for step in work.track(chosen, f"steps of {workdir}", len(chosen)):
            done = set() if again else _done(run, suites, step)
            todo = [suite for suite in suites if suite not in done]
            if todo:
                try:
                    checkpointer.verified(step)
                except UserError as error:
                    damaged.append(str(error))
                    multihost.say(f"{error}; skipped")
                    continue
                evals.evaluate(run, load_params(run, step), step, todo, work)
            if multihost.is_lead():
                for suite in suites:
                    _show_result(run, suite, step, fresh=suite in todo)
    if damaged:
        raise UserError(f"{len(damaged)} of {len(chosen)} steps were not evaluated: {damaged[0]}")
    return 0


def chosen_steps(text: str, there: Sequence[int]) -> list[int]:
    """Return the steps that `--step` names.

    Args:
        text: "all"; "N"; "A:B", those from A to B, both included; or "A:B:K", of these only A, A + K, A + 2 K, …
        there: steps that have a checkpoint.

    Raises:
        UserError: it names none of them.
    """
    if text == "all":
        return list(there)
    if not re.fullmatch(r"\d+(:\d+(:0*[1-9]\d*)?)?", text):
        raise UserError(f"--step={text}: write N, A:B, A:B:K or all")
    first, *rest = map(int, text.split(":"))
    last, apart = rest[0] if rest else first, rest[1] if rest[1:] else 1
    chosen = [step for step in there if first <= step <= last and (step - first) % apart == 0]
    if not chosen:
        raise UserError(f"--step={text}: no such checkpoint; there are {', '.join(map(str, there))}")
    return chosen


def _choose(checkpointer: Checkpointer, workdir: Path, steps: str | None) -> list[int]:
    """Return the steps to evaluate, the same in every process."""
    if steps is not None:
        there = multihost.decided_by_lead(checkpointer.steps, DECISION_SECONDS)
        if there:
            return chosen_steps(steps, there)
    elif (newest := checkpointer.newest()) is not None:
        return [newest]
    raise UserError(f"--workdir={workdir}: no checkpoint there yet")


def _check_mesh(config: Config) -> None:
    try:
        check_divisible(config, make_mesh(config.mesh))
    except UserError as error:
        flags = "--mesh.data=1 --mesh.fsdp=-1 --mesh.context=1 --mesh.tensor=1 --mesh.slices=1"
        raise UserError(f"{error}. On other devices than the run's, eval.py takes a mesh too: {flags}") from error


def _done(run: Run, suites: Sequence[str], step: int) -> set[str]:
    """Return which suites' results are there already; process 0 looks."""

    def look() -> list[str]:
        return [suite for suite in suites if evals.stored_result(run, suite, step) is not None]

    return set(multihost.decided_by_lead(look, DECISION_SECONDS))


def load_params(run: Run, step: int) -> Any:
    """Return the parameters of a verified checkpoint, on the run's mesh."""
    with jax.set_mesh(run.mesh):
        abstract = jax.eval_shape(lambda: init_state(run.config)).params
    return restore_params(run.workdir.resolve() / "checkpoints" / str(step), abstract, run.mesh)


def _show_result(run: Run, suite: str, step: int, *, fresh: bool) -> None:
    """Print a result that was written, and draw its charts, which the training loop does not."""
    path = evals.result_path(run.workdir, suite, step)
    result, figures = read_json(path), path.with_suffix("")
    console = _console()
    shown = "  ".join(f"{key} {value:.4f}" for key, value in result["numbers"].items())
    console.print(f"[bold]{run.workdir} step {step} {suite}[/bold]  {shown}", highlight=False)
    if not fresh:
        print(f"skipped, {path} was made with the same settings; --again makes it anew")
    for sample in result["details"].get("samples", []):
        console.print(sample["prompt"], style="dim", end="", markup=False, highlight=False)
        console.print(sample["completion"], markup=False, highlight=False)
        console.rule()
    if result["charts"] and (fresh or not figures.is_dir()):
        from difftx.report.charts import draw_chart  # matplotlib is slow to import.

        for chart in result["charts"]:
            print(*draw_chart(chart, figures), sep="\n")


def _console() -> rich.console.Console:
    """Return a console as wide as the terminal; in a file or a pipe, wide enough for the tables."""
    return rich.console.Console(width=None if sys.stdout.isatty() else 120)
