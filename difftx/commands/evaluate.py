"""Actions of `difftx eval`: evaluate checkpoints, draw curves and fit scaling laws."""

import argparse
import contextlib
import dataclasses
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import rich.box
import rich.console
import rich.markup
import rich.table

from difftx.config import Config, MeshConfig
from difftx.config.build import override
from difftx.config.eval import JudgeConfig
from difftx.errors import UserError, printable
from difftx.evals import explanation_of
from difftx.evals import run as evals
from difftx.evals.harness.suite import LOCAL_TASKS
from difftx.evals.result import Number, format_value, read_numbers
from difftx.evals.throughput import pair
from difftx.files import UNLOCKED, Owner, list_folder, require_writable, uploaded
from difftx.json_files import read_json
from difftx.parallel import multihost
from difftx.parallel.mesh import make_mesh
from difftx.progress import Work
from difftx.run_files import small_files
from difftx.training import kernel_choice
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import Manifest, WeightsPart
from difftx.training.checkpoint.reading import data_changes, open_checkpoint, open_run
from difftx.training.checkpoint.restoring import restore_params
from difftx.training.fit import fit
from difftx.training.run import Run, agree_on_command, read_config, recorded_rankings

TRUST = "--trust_run_config"
# lm-eval tasks that only read data files from the Hugging Face Hub. Other tasks may execute code.
PLAIN_TASKS = {path.stem for path in LOCAL_TASKS.glob("[!_]*.yaml")}


def run_suites(
    checkpoints: Checkpoints,
    suites: Sequence[str],
    overrides: Mapping[str, Any],
    *,
    steps: str | None = None,
    part: WeightsPart = "params",
    again: bool = False,
    trusted: bool | None = None,
    flags: argparse.Namespace = multihost.ALONE,
    devices: Sequence[jax.Device] | None = None,
    show: Callable[..., None] | None = None,
) -> dict[int, dict[str, Mapping[str, Number]]]:
    """Evaluate steps of a run. Return step → suite → name → number, in the primary process.

    Args:
        checkpoints: The checkpoints of the run.
        suites: Names of the suites.
        overrides: Fields of the config with other values than those of the run.
        steps: The steps, as `chosen_steps` reads them. None: the newest valid one.
        part: The weights of each checkpoint.
        again: Whether to run suites that have a result.
        trusted: As in `confirm_outward`.
        flags: Those of `multihost.add_flags`. All flags must be the same in all processes.
        devices: The devices of a mesh with one axis, in place of all devices with the mesh of the config.
        show: Called as `show(run, suite, step, part, fresh=…)` after a suite has a result.
    """
    workdir = checkpoints.workdir
    config = fit(override(read_config(workdir), overrides))
    if devices is not None:
        config = dataclasses.replace(config, mesh=MeshConfig(fsdp=len(devices)))
    compared = pair(config).values() if "throughput" in suites else ()
    multihost.join(flags, config.multihost)
    agree_on_command(config, flags)
    kernel_choice.choose([config, *compared], recorded_rankings(workdir))
    confirm_outward(config, str(workdir / "config.json"), suites, overrides, trusted=trusted)

    files = small_files(workdir) if multihost.is_primary() else contextlib.nullcontext(UNLOCKED)
    with files as owner, Work(enabled=multihost.is_primary()) as work:
        evaluator = _Evaluator(checkpoints, config, suites, part, again, owner, devices, show)
        if steps is None and (evaluate := checkpoints.read_newest(evaluator.load)) is not None:
            return evaluate(work)
        available = [] if steps is None else multihost.decide_on_primary(checkpoints.steps)
        if steps is None or not available:
            raise UserError(f"--workdir={workdir}: no checkpoint there yet")
        chosen, results = chosen_steps(steps, available), {}
        for step in work.track(chosen, f"steps of {workdir}", len(chosen)):
            results |= evaluator.load(checkpoints.read(step))(work)
    return results


def chosen_steps(text: str, available: Sequence[int]) -> list[int]:
    """Return the available steps that the flag `--step` selects. Raise `UserError` if it selects none.

    The flag is "all", "N", "A:B" (steps from A to B, both included) or "A:B:K" (A, A + K, A + 2 K, … up to B).
    """
    if text == "all":
        return list(available)
    if not re.fullmatch(r"\d+(:\d+(:0*[1-9]\d*)?)?", text):
        raise UserError(f"--step={text}: write N, A:B, A:B:K or all")
    first, *rest = map(int, text.split(":"))
    last, stride = rest[0] if rest else first, rest[1] if rest[1:] else 1
    chosen = [step for step in available if first <= step <= last and (step - first) % stride == 0]
    if not chosen:
        raise UserError(f"--step={text}: no such checkpoint; there are {', '.join(map(str, available))}")
    return chosen


@dataclasses.dataclass
class _Evaluator:
    """Evaluate steps of a run, each with its checkpoint's config. Steps with equal configs and data share `run`."""

    checkpoints: Checkpoints
    config: Config
    suites: Sequence[str]
    part: WeightsPart
    again: bool
    owner: Owner  # Writes the results.
    devices: Sequence[jax.Device] | None
    show: Callable[..., None] | None
    run: Run | None = None
    run_config: Config | None = None  # Config of the checkpoint with which `run` was opened.

    def load(self, manifest: Manifest) -> Callable[[Work], dict[int, dict[str, Mapping[str, Number]]]]:
        """Load a checkpoint. Return a function that runs the suites without a result, and returns all results."""
        step, suites, part, run = manifest.step, self.suites, self.part, self.run
        checkpoint = open_checkpoint(manifest, self.config, part)
        if run is None or self.run_config != checkpoint.config or data_changes(checkpoint, run.data.signature):
            try:
                mesh = make_mesh(checkpoint.config.mesh, self.devices)
                fit(checkpoint.config, mesh)
            except UserError as error:
                flags = "--mesh.data=1 --mesh.fsdp=-1 --mesh.context=1 --mesh.tensor=1 --mesh.slices=1"
                advice = f"If these are not the devices of the training, choose a mesh: {flags}"
                raise UserError(f"{error}. {advice}") from error
            self.run = run = dataclasses.replace(open_run(checkpoint, self.checkpoints, mesh), owner=self.owner)
            multihost.agree(
                "the checks",
                lambda: evals.check_run(run, suites),
                lambda _: evals.settings_sha256_by_suite(run, suites),
                run.config.multihost.barrier_timeout_seconds,
            )
            self.run_config = checkpoint.config

        def is_missing(suite: str) -> bool:
            return (evals.stored_result(run, suite, step, part) or {}).get("weights") != checkpoint.weights

        todo = suites if self.again else multihost.decide_on_primary(lambda: list(filter(is_missing, suites)))
        if todo:
            require_writable(run.workdir)
            self.checkpoints.require_valid(step)
        params = restore_params(manifest, run.config, run.mesh, part) if todo else None

        def evaluate(work: Work) -> dict[int, dict[str, Mapping[str, Number]]]:
            evals.evaluate(run, params, step, todo, work, checkpoint.weights, checkpoint)
            results: dict[str, Mapping[str, Number]] = {}
            for suite in suites if multihost.is_primary() else ():
                results[suite] = read_numbers(read_json(evals.result_path(run.files, suite, step, part)))
                if self.show is not None:
                    self.show(run, suite, step, part, fresh=suite in todo)
            return {step: results}

        return evaluate


def confirm_outward(
    config: Config, file: str, suites: Sequence[str], overrides: Mapping[str, str], *, trusted: bool | None
) -> None:
    """Raise `UserError` if a suite would contact an address, send a secret or execute code without confirmation.

    The config `file` may come from another person. So such a field is accepted only from the command line
    (`overrides`), or with --trust_run_config, which prints its value. `trusted` is that flag, or None if the command
    does not have it. The data of `PLAIN_TASKS` and tiktoken vocabularies need no confirmation, because their addresses
    are fixed.
    """
    fields, settings, judge = [], config.eval, config.eval.judge  # Field, value and effect.
    names = {name for suite in suites for name in evals.with_inner(config, suite)}
    if "hallucination" in names and settings.hallucination.judge_model is not None:
        # If the command line names a judge model but no endpoint, the user expects the default endpoint.
        if judge.base_url != JudgeConfig.base_url or "eval.hallucination.judge_model" not in overrides:
            fields.append(("eval.judge.base_url", judge.base_url, "send documents and answers to that address"))
        if judge.key_variable is not None and judge.key_variable != JudgeConfig.key_variable:
            effect = "send the content of that environment variable"
            fields.append(("eval.judge.key_variable", judge.key_variable, effect))
    if "harness" in names and settings.harness.include_path is not None:
        fields.append(("eval.harness.include_path", settings.harness.include_path, "execute code of that folder"))
    if "harness" in names and not set(settings.harness.tasks) <= PLAIN_TASKS:
        effect = "download data of those tasks, and execute their code"
        fields.append(("eval.harness.tasks", ",".join(settings.harness.tasks), effect))
    for field, value, effect in (row for row in fields if row[0] not in overrides):
        source = f"{field}={value!r} in {file}"
        if not trusted:
            flag = shlex.quote(f"--{field}={value}")
            all_fields = "" if trusted is None else f", or {TRUST} for all such fields"
            raise UserError(f"{source} would {effect}; to allow it, add {flag}{all_fields}")
        multihost.print_on_primary(f"{TRUST}: {source} is trusted to {effect}")


def show_result(run: Run, suite: str, step: int, part: WeightsPart, *, fresh: bool) -> None:
    """Print a suite's stored result. Draw its charts if the result is fresh or they do not exist yet."""
    path = evals.result_path(run.files, suite, step, part)
    result, figures = read_json(path), path.with_suffix("")
    console = _console()
    where = f"{run.workdir}, step {step}{'' if part == 'params' else f', {part}'}"
    title = printable(f"{explanation_of(suite)[0]} (suite {suite}): {where}")
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(format_numbers(result))
    if not fresh:
        print(f"skipped, {printable(str(path))} was made with the same settings; --again evaluates the suite again")
    for sample in result["details"].get("samples", []):
        console.print(printable(sample["prompt"]), style="dim", end="", markup=False, highlight=False)
        console.print(printable(sample["completion"]), markup=False, highlight=False)
        console.rule()
    if result["charts"] and (fresh or not list_folder(figures)):
        from difftx.report.charts import draw_chart  # matplotlib is slow to import.

        for chart in result["charts"]:
            print(*(printable(str(figure)) for figure in draw_chart(chart, figures)), sep="\n")


def format_numbers(result: Mapping[str, Any]) -> rich.table.Table:
    """Format a result's numbers as a table with units, and with the values of guessing if there are any."""
    numbers = read_numbers(result)
    has_chance = any(number.chance is not None for number in numbers.values())
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("number", overflow="fold")  # Wrap long names, because they differ at their ends.
    table.add_column("value", justify="right", no_wrap=True)
    if has_chance:
        table.add_column("by guessing", justify="right", no_wrap=True)
    table.add_column("unit")
    table.add_column("better")
    for name, number in numbers.items():
        guess = [format_value(number.chance)] if has_chance else []
        cells = [name, format_value(number), *guess, number.unit, number.better or ""]
        table.add_row(*map(rich.markup.escape, cells))
    return table


def draw_curves(options: argparse.Namespace) -> None:
    """Draw the curves of the runs that match a glob. Print their table, notes, and the paths of the figures."""
    from difftx.report.curves import format_table, write_curves  # matplotlib is slow to import.

    with uploaded(options.out) as out:
        rows, files, notes = write_curves(options.curves, out, options.metric, options.against)
    _console().print(format_table(rows))
    for note in notes:
        print(printable(f"note: {note}"))
    print(*(printable(str(file)) for file in files), sep="\n")


def fit_scaling(options: argparse.Namespace) -> None:
    """Fit scaling laws to the runs or tables that match a glob. Print the results and the paths of the files."""
    from difftx.report.scaling import format_study, write_scaling  # scipy and matplotlib are slow to import.

    with uploaded(options.out) as out:
        studies, files = write_scaling(options.scaling, out, options.metric)
    for study in studies:
        _console().print(*format_study(study), sep="\n")
        for note in study.notes:
            print(printable(f"note: {note}"))
    print(*(printable(str(file)) for file in files), sep="\n")


def _console() -> rich.console.Console:
    """Return a console as wide as the terminal, or 120 characters wide for a file or pipe."""
    return rich.console.Console(width=None if sys.stdout.isatty() else 120)
