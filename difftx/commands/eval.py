"""Evaluate runs: difftx eval --workdir=runs/quickstart/diff --suite=loss,sample."""

from collections.abc import Sequence
from typing import Any

from difftx.commands.flags import Parser, PathFlag, add_weights_flag
from difftx.evals import SUITES, check_suites, summary
from difftx.files import require_run, require_writable
from difftx.parallel import multihost


def main(arguments: Sequence[str], prog: str = "difftx eval") -> int:
    """Read the flags, then evaluate or draw. Exit codes: 0 done, 2 bad input, 1 any other error."""
    parser = Parser(prog, __doc__, "eval", "mesh", "model.attention_implementation")
    parser.add_argument("--workdir", action=PathFlag, help="directory of the run")
    parser.add_argument("--suite", help="suites to run, such as loss,sample")
    parser.add_argument("--step", metavar="N|A:B[:K]|all", help="checkpoints to evaluate; default: the newest")
    add_weights_flag(parser)
    parser.add_argument("--again", action="store_true", help="evaluate again even if there is a result")
    parser.add_argument("--curves", metavar="GLOB", help="run directories to draw, such as 'runs/quickstart/*'")
    parser.add_argument("--scaling", metavar="GLOB", help="run directories or tables of points to fit scaling laws to")
    parser.add_argument("--metric", choices=("loss", "bits_per_byte"), default="loss", help="of --curves and --scaling")
    parser.add_argument("--against", choices=("tokens", "flops", "seconds", "steps"), default="tokens", help="x-axis")
    parser.add_argument("--out", action=PathFlag, help="folder of the figures of --curves and --scaling")
    parser.add_argument("--list", action="store_true", help="list the suites")
    parser.add_argument("--trust_run_config", action="store_true", help="use and print the run's addresses, keys, code")
    multihost.add_flags(parser)
    parser.epilog = "--eval.field=, --mesh.field= and --model.attention_implementation=value change the run's config"
    args, overrides = parser.parse(arguments)
    if args.out is not None:
        require_writable(args.out)
    if args.list:
        width = max(map(len, SUITES)) + 2
        print(*(f"{name:<{width}}{summary(name)}" for name in SUITES), sep="\n")
        return 0
    if args.suite is not None:
        check_suites(args.suite.split(","))
    if args.workdir is not None:
        require_run(args.workdir)

    from difftx.commands import evaluate  # Imported after the flags are checked, because the import is slow.
    from difftx.training.checkpoint.checkpointer import Checkpoints

    if args.curves or args.scaling:
        if args.out is None:
            parser.error("--curves and --scaling need --out=DIR")
        (evaluate.draw_curves if args.curves else evaluate.fit_scaling)(args)
    elif args.workdir is None or not args.suite:
        parser.error("give --workdir=RUN --suite=loss (or another of --list), or --curves or --scaling with --out")
    else:
        options: dict[str, Any] = {"steps": args.step, "part": args.weights, "again": args.again, "flags": args}
        options |= {"trusted": args.trust_run_config, "show": evaluate.show_result}
        evaluate.run_suites(Checkpoints(args.workdir), args.suite.split(","), overrides, **options)
    return 0
