"""Write an HTML page about runs: difftx report --workdir=runs/quickstart/diff,runs/quickstart/transformer."""

import argparse
from collections.abc import Sequence

from difftx.commands.flags import PathFlag, add_extension_flag, prepare_process
from difftx.files import require_run, require_writable_file
from difftx.storage.paths import path_of


def main(arguments: Sequence[str]) -> int:
    """Write the page and print its path. All other runs are compared with the first one."""
    parser = argparse.ArgumentParser(prog="difftx report", description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", required=True, metavar="RUN[,RUN…]", help="directories of the runs")
    parser.add_argument(
        "--out", action=PathFlag, metavar="FILE.html", help="default: report.html in the first directory"
    )
    add_extension_flag(parser)
    options = parser.parse_args(arguments)
    prepare_process(options)
    workdirs = [path_of("--workdir", name) for name in options.workdir.split(",")]
    for workdir in workdirs:
        require_run(workdir)
    if options.out is not None:
        require_writable_file(options.out)

    from difftx.commands import evaluate  # Imported after the flags are checked, because the import is slow.

    evaluate.write_report(workdirs, options.out)
    return 0
