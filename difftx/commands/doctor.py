"""Check whether training can start on this machine, and measure how fast it will be.

difftx doctor [--config=FILE.py[:ARG]] [--workdir=DIR] [--json]

The command measures the devices, the attention kernels, and the folder or bucket of the run.
Its exit code is 1 if training cannot start. Start it on every host of a job with the flags of `difftx train` to
check all of them.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from difftx.commands.flags import Parser, config_of
from difftx.console import protected
from difftx.data.tokenizers import with_vocabulary
from difftx.errors import EXIT_FAILED
from difftx.parallel import multihost
from difftx.storage.paths import path_of


def main(arguments: Sequence[str]) -> int:
    """Print the findings as a page, or as JSON with --json. Exit codes: 0 a run can start, 1 it cannot, 2 bad input."""
    parser = Parser("difftx doctor", __doc__.splitlines()[0], "config")
    parser.add_argument("--config", metavar="FILE.py[:ARG]", help="also check this config, and estimate its speed")
    parser.add_argument("--workdir", default=".", help="folder of the run, or gs://… or s3://…; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    multihost.add_flags(parser)
    options, overrides = parser.parse(arguments)
    options.workdir = path_of("--workdir", options.workdir)
    from difftx.training.fit import fit  # Imported after the flags are checked, because the import is slow.

    config = None if options.config is None else fit(with_vocabulary(config_of(options.config, overrides)))
    out = protected(os.fdopen(os.dup(sys.stdout.fileno()), "w", closefd=False))
    if options.json:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Libraries such as Gloo print to standard output.

    from difftx.commands import examination

    findings = examination.examine(options, config)
    if multihost.is_primary() and options.json:
        found = dataclasses.asdict(findings) | {"ok": not findings.problems}
        print(json.dumps(found, indent=2), file=out, flush=True)
    elif multihost.is_primary():
        examination.show(findings)
    return EXIT_FAILED if findings.problems else 0
