"""Runs of the studies of Transformers made differential: question 5 of docs/results.md, and docs/exploratory.md.

    python benchmarks/differential_study.py --out=runs/study/differential --task=novels [--jobs=2]

Question 5 has the task novels, with 0.15M parameters. The exploratory study has three tasks: books with 0.8M
parameters, and recall and recall-easy with 0.1M. For each seed and task, a Transformer is trained and converted by each
method of `difftx convert --differential`. Then the arms of configs/toy_continued.py train for as many tokens again, on
new data. Each arm has its own learning rate, tuned on a seed that is not reported. Each job takes one core. An
interrupted study continues where it stopped.

    python benchmarks/results.py collect --study=question-5-start runs/study/differential/start-novels-4?
    python benchmarks/results.py collect --study=question-5 runs/study/differential/reported-novels-*
    python benchmarks/results.py collect --study=question-5-tuning runs/study/differential/rate-novels-*

For the exploratory study, the names are differential-start, differential and differential-rates, with the folders of
its three tasks.
"""

import argparse
import concurrent.futures
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import controls_study
from benchmarks.tuning import EXPLORATORY_SEEDS, EXPLORATORY_TUNED_SEED, best_rate, run_difftx, sweep
from difftx.configs.toy_continued import ARMS, RECIPES, STEPS
from difftx.errors import UserError, run_command
from difftx.training.checkpoint.manifest import read_manifest, steps_in
from difftx.training.run import read_description

CONFIG = "configs/toy_continued.py"
NEW_DATA = 100  # Added to a Transformer's seed, so that its data come in another order.


class Task(NamedTuple):
    """Learning rates and seeds of a task."""

    rates: Sequence[float]  # Rates that each arm tries first.
    tuned_seed: int = EXPLORATORY_TUNED_SEED
    seeds: Sequence[int] = EXPLORATORY_SEEDS


TASKS = {
    "books-0.8m": Task((2e-3, 4e-3)),
    "recall": Task((2.5e-3, 5e-3)),
    "recall-easy": Task((2.5e-3, 5e-3)),
    "novels": Task((4e-3, 8e-3), controls_study.TUNED_SEED, tuple(range(40, 48))),
}


def main(arguments: Sequence[str]) -> int:
    """Train all arms of the tasks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--task", choices=TASKS, action="append", help="may be repeated; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time (%(default)s)")
    args = parser.parse_args(arguments)
    tasks = args.task or [*TASKS]
    starts = [(task, seed) for task in tasks for seed in (TASKS[task].tuned_seed, *TASKS[task].seeds)]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda at: train_transformer(args.out, *at), starts))
        arms = [(task, arm) for task in tasks for arm in ARMS]
        for (task, arm), rate in zip(arms, pool.map(lambda at: train_arm(args.out, *at), arms), strict=True):
            print(f"{task}, {arm}: rate {rate:g}", flush=True)
    return 0


def train_transformer(out: Path, task: str, seed: int) -> None:
    """Train the Transformer of a seed, and convert it by each method."""
    grid = [f"task={task}", "arm=transformer", f"seed={seed}"]
    steps = [f"--config.train.steps={STEPS[task]}", f"--config.eval.every_steps={STEPS[task]}"]
    folder = out / f"start-{task}-{seed}"
    sweep(folder, f"configs/{Path(RECIPES[task].__file__).name}", grid, steps)
    for method in ARMS:
        if method != "transformer":
            to = start_of(out, task, method, seed)
            flags = [f"--differential={method}", f"--input={start_of(out, task, 'transformer', seed)}", f"--out={to}"]
            run_difftx(to, ["convert", "--from=difftx", "--to=difftx", *flags])
            require_newest_weights(to, start_of(out, task, "transformer", seed))


def require_newest_weights(converted: Path, transformer: Path) -> None:
    """Raise `UserError` if a folder was converted from other weights than those that the Transformer has now."""
    source = read_description(converted).get("source_weights")  # Older versions did not record it.
    checkpoints = transformer / "checkpoints"
    newest = read_manifest(checkpoints / str(steps_in(checkpoints)[-1])).weights
    if source not in (None, newest):
        raise UserError(
            f"{converted} was converted from other weights than those of {transformer}, which was trained again; "
            f"remove {converted} and the runs that started from it"
        )


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
        return sweep(out / folder, CONFIG, grid, flags)

    best = best_rate(TASKS[task].rates, lambda rate: train(f"rate-{task}-{arm}-{rate:g}", TASKS[task].tuned_seed, rate))
    for seed in TASKS[task].seeds:
        train(f"reported-{task}-{arm}-{seed}", seed, best)
    return best


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
