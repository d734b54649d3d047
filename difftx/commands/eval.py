"""Evaluate runs: difftx eval --workdir=runs/quickstart/diff --suite=loss,sample."""

import argparse
from collections.abc import Sequence

from difftx.commands.flags import PathFlag, add_weights_flag, parse_command, run_folders
from difftx.evals import SUITES, check_suites, summary
from difftx.files import require_run, require_writable, require_writable_file
from difftx.parallel import multihost
from difftx.storage.paths import path_of


def main(arguments: Sequence[str], prog: str = "difftx eval") -> int:
    """Read the flags and evaluate or draw. Exit codes: 0 done, 2 bad input, 1 any other error."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", help="directory of the run; with --report as in difftx report")
    parser.add_argument("--suite", help="suites to run, such as loss,sample")
    parser.add_argument("--step", metavar="N|A:B[:K]|all", help="checkpoints to evaluate; default: the newest")
    add_weights_flag(parser)
    parser.add_argument("--again", action="store_true", help="evaluate again even if there is a result")
    parser.add_argument("--curves", metavar="GLOB", help="run directories to draw, such as 'runs/quickstart/*'")
    parser.add_argument("--scaling", metavar="GLOB", help="run directories or tables of points to fit scaling laws to")
    parser.add_argument("--metric", choices=("loss", "bits_per_byte"), default="loss", help="of --curves and --scaling")
    parser.add_argument("--against", choices=("tokens", "flops", "seconds", "steps"), default="tokens", help="x-axis")
    parser.add_argument("--report", action="store_true", help="write an HTML page about --workdir")
    parser.add_argument(
        "--out", action=PathFlag, help="folder of the figures, or file of the report (WORKDIR/report.html)"
    )
    parser.add_argument("--list", action="store_true", help="list the suites")
    parser.add_argument("--trust_run_config", action="store_true", help="use and print the run's addresses, keys, code")
    multihost.add_flags(parser)
    parser.epilog = "--eval.field=, --mesh.field= and --model.attention_implementation=value change the run's config"
    args, overrides = parse_command(parser, arguments, "eval", "mesh", "model")
    if args.out is not None:
        (require_writable_file if args.report else require_writable)(args.out)
    if args.list:
        width = max(map(len, SUITES)) + 2
        print(*(f"{name:<{width}}{summary(name)}" for name in SUITES), sep="\n")
        return 0
    if args.suite is not None:
        check_suites(args.suite.split(","))
    workdirs = run_folders(args.workdir) if args.workdir and args.report else []
    if args.workdir is not None and not args.report:
        args.workdir = path_of("--workdir", args.workdir)
        require_run(args.workdir)

    from difftx.commands import evaluate  # Imported after the flags are checked, because the import is slow.

    if args.curves or args.scaling:
        if args.out is None:
            parser.error("--curves and --scaling need --out=DIR")
        (evaluate.draw_curves if args.curves else evaluate.fit_scaling)(args)
    elif workdirs:
        evaluate.write_report(workdirs, args.out)
    elif args.workdir is None or not args.suite:
        parser.error("give --workdir and --suite, --workdir and --report, --curves or --scaling and --out, or --list")
    else:
        evaluate.run_suites(args, overrides)
    return 0
