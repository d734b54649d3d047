"""Train a model: difftx train --config=quickstart:diff --workdir=runs/quickstart/diff."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from difftx.config import Config
    from difftx.storage.paths import AnyPath
    from difftx.training.run import Run


def main(arguments: Sequence[str], prog: str = "difftx train") -> int:
    """Read the flags and train. Exit codes: 0 done, 2 bad input, 75 stopped by a signal, 1 any other error."""
    began = time.perf_counter()
    # Imported here, so that the start-up time includes the imports.
    from difftx import compilation_cache, console
    from difftx.commands.flags import Parser, PathFlag, add_config_flag, config_of
    from difftx.files import require_writable
    from difftx.parallel import multihost

    parser = Parser(prog, __doc__, "config")
    add_config_flag(parser)
    parser.add_argument("--workdir", action=PathFlag, help="directory of the run; an existing run is resumed")
    parser.add_argument("--print_config", action="store_true", help="print the config and exit")
    parser.add_argument("--dry_run", action="store_true", help="check config, model and data, print the cost, exit")
    parser.add_argument("--allow_config_change", action="store_true", help="resume even if model or data changed")
    multihost.add_flags(parser)
    args, overrides = parser.parse(arguments)
    config = checked(config_of(args.config, overrides))
    compilation_cache.enable(config.train.compilation_cache)
    if args.print_config:
        print(config.to_json(), end="")
        return 0
    if args.workdir is None and not args.dry_run:
        parser.error("--workdir=DIR is needed to train; --dry_run does without")
    if args.workdir is not None:
        require_writable(args.workdir)
    if not args.dry_run:
        console.Output.is_needed = False
    options = {"began": began, "allow_config_change": args.allow_config_change, "dry_run": args.dry_run}
    return train(config, args.workdir, args, **options)


def checked(config: "Config") -> "Config":
    """Return the config. Raise `UserError` if its groups contradict each other, or a suite or module is missing."""
    check_extras(config)
    from difftx.training.fit import fit  # The import is slow.

    return fit(config)


def train(
    config: "Config",
    workdir: "AnyPath | None",
    flags: "argparse.Namespace",
    *,
    began: float,
    allow_config_change: bool = False,
    dry_run: bool = False,
) -> int:
    """Join the other processes, check the data and the devices, and train. Return the exit code.

    `flags` has those of `multihost.add_flags`. All flags must be the same in all processes. With `dry_run`, do not
    train; `workdir` may then be None. `began` is the value of `time.perf_counter()` at the start of the process.
    """
    # Imported after the flags are checked, because the imports are slow.
    from difftx.commands.cost import format_cost, format_data
    from difftx.data.tokenizers import with_vocabulary
    from difftx.evals import run as evals
    from difftx.interop import exports
    from difftx.launch.topology import take_gpu_memory
    from difftx.model.architectures import ARCHITECTURES
    from difftx.model.matching import matching_warning
    from difftx.parallel import multihost
    from difftx.training import kernel_choice, loop
    from difftx.training.run import Run, agree_on_command, fit_to_devices, recorded_rankings

    config = with_vocabulary(config)
    take_gpu_memory()
    multihost.join(flags, config.multihost)
    agree_on_command(config, flags)
    kernel_choice.choose([config], recorded_rankings(workdir) if workdir else {})
    config = fit_to_devices(config)
    multihost.print_on_primary(format_cost(config))
    if warning := matching_warning(config):
        multihost.print_on_primary(warning)
    run = Run.open(config, workdir or Path())
    check_run(run)
    multihost.print_on_primary(format_data(run))
    if dry_run or ARCHITECTURES.extension_of(config.model.architecture):
        trace(run)
    if dry_run:
        return 0
    return loop.train(run, evals.evaluate, exports, began=began, allow_config_change=allow_config_change)


def check_extras(config: "Config") -> None:
    """Raise `UserError` if a suite or tracker in the config does not exist, or if its package is missing."""
    from difftx.evals import check_suites

    check_suites(config.eval.suites)
    from difftx.training.trackers import check_trackers  # This import is slow, and not needed if a suite is invalid.

    check_trackers(config.logging.trackers, installed_only=True)


def check_run(run: "Run") -> None:
    """Raise `UserError` in every process if a suite, the exports or the trackers cannot work, or files differ."""
    from difftx.evals import run as evals
    from difftx.interop import exports
    from difftx.parallel.multihost import agree, is_primary
    from difftx.training.trackers import check_trackers

    suites, trackers = run.config.eval.suites, run.config.logging.trackers
    agree(
        "the checks",
        lambda: (exports.check_run(run), evals.check_run(run, suites), is_primary() and check_trackers(trackers)),
        lambda _: evals.settings_sha256_by_suite(run, suites),
        run.config.multihost.barrier_timeout_seconds,
    )


def trace(run: "Run") -> None:
    """Trace the model's Python code on abstract arrays, as in training. For an extension, also trace inference.

    Errors name the line of code.
    """
    from difftx.inference.decode import trace_inference
    from difftx.launch.estimate import trace_step
    from difftx.model.architectures import ARCHITECTURES
    from difftx.registry import one_line_errors

    name = run.config.model.architecture
    with one_line_errors(ARCHITECTURES[name]):
        trace_step(run.config, run.mesh)
        if ARCHITECTURES.extension_of(name):  # Tests cover inference with difftx's own architectures.
            trace_inference(run.config, run.mesh, run.tokenizer)
