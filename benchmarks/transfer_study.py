"""Runs of the study of learning rates across sizes in docs/exploratory.md: 0.1M and 3M parameters, with and without µP.

    python benchmarks/transfer_study.py --out=runs/study/transfer [--jobs=2]

For each model, the study finds the best learning rate on a grid of factors of two. It tries rates until the best one is
between two others. Models of 0.1M train with three seeds at each rate, because their losses differ little. Each job
takes one core. An interrupted study continues where it stopped.

    python benchmarks/results.py collect --study=transfer runs/study/transfer/*/rate-*
"""

import argparse
import concurrent.futures
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tuning import best_rate, sweep
from difftx.configs.transfer import ARCHITECTURES, MUP
from difftx.errors import run_command

SEEDS: Mapping[str, Sequence[int]] = {"0.1m": (0, 1, 2), "3m": (0,)}  # Size → seeds.
# Rates that a model tries first. A large model without µP also tries the best one at 0.1M.
SMALL_RATES, LARGE_RATES = (8e-3, 1.6e-2), (1e-3, 2e-3, 8e-3)
# (size, arm) → rates that it tries first. The longest runs are first. At 0.1M, µP changes nothing.
RATES = {
    **{("3m", name + MUP): SMALL_RATES for name in ARCHITECTURES},
    **{("3m", name): LARGE_RATES for name in ARCHITECTURES},
    **{("0.1m", name): SMALL_RATES for name in ARCHITECTURES},
}


def main(arguments: Sequence[str]) -> int:
    """Train all models; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time (%(default)s)")
    args = parser.parse_args(arguments)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for (size, arm), rate in zip(RATES, pool.map(lambda of: tune(args.out, *of), RATES), strict=True):
            print(f"{size}, {arm}: rate {rate:g}", flush=True)
    return 0


def tune(out: Path, size: str, arm: str) -> float:
    """Return the best learning rate of a model."""
    seeds = f"seed={','.join(map(str, SEEDS[size]))}"

    def train(rate: float) -> float:
        grid = [f"task={size}", f"arm={arm}", seeds, f"optimizer.learning_rate={rate:g}"]
        return sweep(out / f"{size}-{arm}" / f"rate-{rate:g}", "configs/transfer.py", grid, [])

    return best_rate(RATES[size, arm], train)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
