"""Write an HTML page about runs: difftx report --workdir=runs/quickstart/diff,runs/quickstart/transformer."""

from collections.abc import Sequence

from difftx.commands.flags import Parser, PathFlag, run_folders
from difftx.errors import printable
from difftx.files import require_writable_file, uploaded
from difftx.run_files import pulled

RUNS = "runs, folders of runs such as a sweep's, or quoted globs; a Transformer is the baseline, or else the first run"


def main(arguments: Sequence[str]) -> int:
    """Write the page, and print its verdict and its path."""
    parser = Parser("difftx report", __doc__)
    parser.add_argument("--workdir", required=True, metavar="RUN[,RUN…]", help=RUNS)
    parser.add_argument(
        "--out", action=PathFlag, metavar="FILE.html", help="default: report.html in the first directory"
    )
    options, _ = parser.parse(arguments)
    workdirs = run_folders(options.workdir)
    if options.out is not None:
        require_writable_file(options.out)

    from difftx.report.page import write_page  # Imported after the flags are checked, because the import is slow.

    out = options.out or workdirs[0] / "report.html"
    with uploaded(out.parent) as folder:
        found = write_page(list(map(pulled, workdirs)), folder / out.name)
    print(printable("\n".join([found.headline, *found.details, str(out)])))
    return 0
