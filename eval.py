"""Evaluate runs: python eval.py --workdir=runs/quickstart/diff --suite=loss,sample."""

import sys

from difftx.errors import run_command


def main() -> int:
    """Run `difftx eval` and return its exit code."""
    from difftx.commands import eval as command  # Import here, so that `run_command` can explain a missing package.

    return command.main(sys.argv[1:], prog="eval.py")


if __name__ == "__main__":
    run_command(main)
