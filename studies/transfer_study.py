"""Runs of the study of learning rates across sizes in docs/exploratory.md: 0.1M and 3M parameters, with and without µP.

    python studies/transfer_study.py --out=runs/study/transfer [--jobs=2]

For each model, the study finds the best learning rate on a grid of factors of two. It tries rates until the best one is
between two others. Models of 0.1M train with three seeds at each rate, because their losses differ little. Each job
takes one core. An interrupted study resumes where it stopped. The script prints the best rate of each model.

    python studies/results.py collect --study=transfer runs/study/transfer/*/rate-*
"""

import concurrent.futures
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.configs.transfer import ARCHITECTURES, MUP
from difftx.errors import run_command
from studies.tuning import best_rate, seed_axis, study_parser, sweep

SEEDS: Mapping[str, Sequence[int]] = {"0.1m": (0, 1, 2), "3m": (0,)}  # Size → seeds.
SMALL_RATES = (8e-3, 1.6e-2)  # Rates that a model of 0.1M, or a larger one with µP, tries first.
# Rates that a model of 3M without µP tries first. The last one is the best rate at 0.1M.
LARGE_RATES = (1e-3, 2e-3, 8e-3)
# (size, arm) → rates that it tries first. The longest runs are first. At 0.1M, µP changes nothing.
FIRST_RATES = {
    **{("3m", name + MUP): SMALL_RATES for name in ARCHITECTURES},
    **{("3m", name): LARGE_RATES for name in ARCHITECTURES},
    **{("0.1m", name): SMALL_RATES for name in ARCHITECTURES},
}


def main(arguments: Sequence[str]) -> int:
    """Train all models; return the exit code."""
    args = study_parser(__doc__).parse_args(arguments)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        best_rates = pool.map(lambda model: tune(args.out, *model), FIRST_RATES)
        for (size, arm), rate in zip(FIRST_RATES, best_rates, strict=True):
            print(f"{size}, {arm}: rate {rate:g}", flush=True)
    return 0


def tune(out: Path, size: str, arm: str) -> float:
    """Train a model at each learning rate that it tries, and return the best rate."""

    def train(rate: float) -> float:
        grid = [f"task={size}", f"arm={arm}", seed_axis(SEEDS[size]), f"optimizer.learning_rate={rate:g}"]
        return sweep(out / f"{size}-{arm}" / f"rate-{rate:g}", "configs/transfer.py", grid, [])

    return best_rate(FIRST_RATES[size, arm], train)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
