"""Train a model: python train.py --config=configs/quickstart.py:diff --workdir=runs/quickstart/diff."""

import sys

from difftx.errors import run_command


def main() -> int:
    """Run `difftx train` and return its exit code."""
    from difftx.commands import train  # Import here, so that `run_command` can explain a missing package.

    return train.main(sys.argv[1:], prog="train.py")


if __name__ == "__main__":
    run_command(main)
