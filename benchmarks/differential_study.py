"""Runs of the study of Transformers made differential in docs/exploratory.md.

    python benchmarks/differential_study.py --out=runs/study/differential [--jobs=2]

There are three tasks: books with 0.8M parameters, and recall and recall-easy with 0.1M. For each seed and task, a
Transformer is trained and converted by each method of `difftx convert --differential`. Then the arms of
configs/toy_continued.py train for as many tokens again, on new data. Each arm has its own learning rate, tuned on a
seed that is not reported. Each job takes one core. An interrupted study continues where it stopped.

    python benchmarks/results.py collect --study=differential-start runs/study/differential/start-*-[012]
    python benchmarks/results.py collect --study=differential runs/study/differential/reported-*
    python benchmarks/results.py collect --study=differential-rates runs/study/differential/rate-*
"""

import argparse
import concurrent.futures
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tuning import REPORTED_SEEDS, TUNED_SEED, best_rate, run_difftx, sweep
from difftx.configs.toy_continued import ARMS, STEPS
from difftx.errors import run_command

# Rates that each arm tries first.
RATES = {"books-0.8m": (2e-3, 4e-3), "recall": (2.5e-3, 5e-3), "recall-easy": (2.5e-3, 5e-3)}
NEW_DATA = 100  # Added to a Transformer's seed, so that its data come in another order.


def main(arguments: Sequence[str]) -> int:
    """Train all arms of all tasks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time (%(default)s)")
    args = parser.parse_args(arguments)
    seeds = (TUNED_SEED, *REPORTED_SEEDS)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda at: train_transformer(args.out, *at), [(task, seed) for seed in seeds for task in STEPS]))
        arms = [(task, arm) for arm in ARMS for task in STEPS]
        for (task, arm), rate in zip(arms, pool.map(lambda at: train_arm(args.out, *at), arms), strict=True):
            print(f"{task}, {arm}: rate {rate:g}", flush=True)
    return 0


def train_transformer(out: Path, task: str, seed: int) -> None:
    """Train the Transformer of a seed, and convert it by each method."""
    grid = [f"task={task}", "arm=transformer", f"seed={seed}"]
    steps = [f"--config.train.steps={STEPS[task]}", f"--config.eval.every_steps={STEPS[task]}"]
    folder = out / f"start-{task}-{seed}"
    sweep(folder, "configs/toy.py", grid, steps)
    for method in ARMS:
        if method != "transformer":
            to = start_of(out, task, method, seed)
            flags = [f"--differential={method}", f"--input={start_of(out, task, 'transformer', seed)}", f"--out={to}"]
            run_difftx(to, ["convert", "--from=difftx", "--to=difftx", *flags])


def start_of(out: Path, task: str, arm: str, seed: int) -> Path:
    """Return the run directory whose weights an arm starts from."""
    name = f"{task}-transformer-seed{seed}"
    return out / f"start-{task}-{seed}" / (name if arm == "transformer" else arm)


def train_arm(out: Path, task: str, arm: str) -> float:
    """Tune an arm's learning rate, train the reported seeds, and return the rate."""

    def train(folder: str, seed: int, rate: float) -> float:
        grid = [f"task={task}", f"arm={arm}", f"train.seed={seed}", f"optimizer.learning_rate={rate:g}"]
        start = start_of(out, task, arm, seed).resolve()
        flags = [f"--config.checkpoint.init_from={start}", f"--config.data.seed={seed + NEW_DATA}"]
        return sweep(out / folder, "configs/toy_continued.py", grid, flags)

    best = best_rate(RATES[task], lambda rate: train(f"rate-{task}-{arm}-{rate:g}", TUNED_SEED, rate))
    for seed in REPORTED_SEEDS:
        train(f"reported-{task}-{arm}-{seed}", seed, best)
    return best


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
