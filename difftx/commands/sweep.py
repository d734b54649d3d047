"""Run a grid of configs: difftx sweep --config=scaling --grid size=830m,1.4b seed=0,1 --out=runs/scaling."""

from collections.abc import Sequence

from difftx import console
from difftx.commands.flags import Parser, add_config_flag
from difftx.errors import UserError, printable
from difftx.files import require_writable
from difftx.launch import jobs
from difftx.launch.grid import make_points, parse_grid
from difftx.model.matching import matching_warning
from difftx.storage.paths import path_of, scheme_of


def main(arguments: Sequence[str]) -> int:
    """Train the grid's runs, or write their job files. Exit codes: 0 done, 1 a run failed, 75 stopped by a signal."""
    parser = Parser("difftx sweep", __doc__, "config")
    add_config_flag(parser)
    values = "values of a name in the file's ARG, of `seed`, or of a config field; all combinations run"
    parser.add_argument("--grid", required=True, nargs="+", metavar="NAME=VALUE,VALUE", help=values)
    parser.add_argument("--out", required=True, help="directory of the runs; unfinished runs are resumed")
    parser.add_argument("--launcher", metavar="NAME", help=f"write job files for: {', '.join(jobs.LAUNCHERS)}")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings for the job files")
    parser.epilog = "--config.path.to.field=value changes a field of every run"
    args, overrides = parser.parse(arguments)
    if args.launcher is None or scheme_of("--out", args.out) is None:  # With a launcher, only the jobs use a bucket.
        require_writable(path_of("--out", args.out))
    grid = parse_grid(args.grid)
    points = make_points(args.config, grid, overrides, args.extension)
    for point in points:
        if warning := matching_warning(point.config):
            print(printable(f"{point.name}: {warning}"), flush=True)
    if args.launcher is not None:
        jobs.write_jobs(args.launcher, points, args.out, jobs.parse_settings(args.set))
        return 0
    if args.set:
        raise UserError(f"--set {args.set[0]} requires --launcher")

    from difftx.launch.runner import Sweep  # Imported after the flags are checked, because the import is slow.

    console.Output.is_needed = False
    return Sweep(
        points, path_of("--out", args.out), {"config": args.config, "overrides": overrides, "grid": grid}
    ).run()
