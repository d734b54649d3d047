"""Runs of the studies of Transformers made differential: question 5 of docs/results.md, and docs/exploratory.md.

    python studies/differential_study.py --out=runs/study/differential --task=novels [--jobs=2]

Question 5 has the task novels, with 0.15M parameters. The exploratory study has three tasks: books with 0.8M
parameters, and recall and recall-easy with 0.1M. For each seed and task, a Transformer is trained and converted by each
method of `difftx convert --differential`. Then the arms of configs/toy_continued.py train for as many tokens again, on
new data. Each arm has its own learning rate, tuned on a seed that is not reported. Each job takes one core. An
interrupted study resumes where it stopped. The script prints the best rate of each arm.

    python studies/results.py collect --study=question-5-start runs/study/differential/start-novels-4?
    python studies/results.py collect --study=question-5 runs/study/differential/reported-novels-*
    python studies/results.py collect --study=question-5-tuning runs/study/differential/rate-novels-*

With --distill, the arms train on five other seeds, without and with their Transformer as the teacher
(studies/distillation_preregistration.md):

    python studies/differential_study.py --out=runs/study/distillation --task=novels --distill [--jobs=2]
    python studies/results.py collect --study=distillation runs/study/distillation/reported-novels-* \\
        runs/study/distillation/distilled-reported-novels-*

For the exploratory study, the names are differential-start, differential and differential-rates, with the folders of
its three tasks.
"""

import concurrent.futures
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.configs.toy_continued import ARMS, RECIPES, STEPS
from difftx.errors import UserError, run_command
from difftx.training.checkpoint.manifest import read_manifest, steps_in
from difftx.training.run import read_run_manifest
from studies import controls_study
from studies.tuning import (
    EXPLORATORY_SEEDS,
    EXPLORATORY_TUNED_SEED,
    best_rate,
    run_difftx,
    study_parser,
    sweep,
)

CONFIG = "configs/toy_continued.py"
DISTILLATION_SEEDS = tuple(range(60, 65))
NEW_DATA_SEED_OFFSET = 100  # Added to a Transformer's seed, so that the continued training reads other data.


class Task(NamedTuple):
    """Learning rates and seeds of a task."""

    first_rates: Sequence[float]  # Rates that each arm tries first.
    tuned_seed: int = EXPLORATORY_TUNED_SEED  # The seed on which an arm chooses its rate.
    reported_seeds: Sequence[int] = EXPLORATORY_SEEDS


TASKS = {
    "books-0.8m": Task((2e-3, 4e-3)),
    "recall": Task((2.5e-3, 5e-3)),
    "recall-easy": Task((2.5e-3, 5e-3)),
    "novels": Task((4e-3, 8e-3), controls_study.TUNED_SEED, tuple(range(40, 48))),
}


def main(arguments: Sequence[str]) -> int:
    """Train all arms of the tasks; return the exit code."""
    parser = study_parser(__doc__)
    parser.add_argument("--task", choices=TASKS, action="append", help="may be repeated; all by default")
    parser.add_argument("--distill", action="store_true", help="train each arm without and with its teacher")
    args = parser.parse_args(arguments)
    tasks = {task: TASKS[task] for task in args.task or TASKS}
    if args.distill:
        tasks = {name: task._replace(reported_seeds=DISTILLATION_SEEDS) for name, task in tasks.items()}
    starts = [(name, seed) for name, task in tasks.items() for seed in (task.tuned_seed, *task.reported_seeds)]
    arms = [(name, task, arm, taught) for name, task in tasks.items() for arm in ARMS for taught in (False, True)]
    arms = [arm for arm in arms if args.distill or not arm[3]]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        # The list waits for all Transformers, whose weights the arms start from, and raises the errors of failed runs.
        list(pool.map(lambda start: train_transformer(args.out, *start), starts))
        best_rates = pool.map(lambda arm: train_arm(args.out, *arm), arms)
        for (name, _, arm, taught), rate in zip(arms, best_rates, strict=True):
            print(f"{name}, {arm}{', distilled' if taught else ''}: rate {rate:g}", flush=True)
    return 0


def train_transformer(out: Path, task: str, seed: int) -> None:
    """Train the Transformer of a task and seed, and convert it by each method."""
    grid = [f"task={task}", "arm=transformer", f"seed={seed}"]
    steps = [f"--config.train.steps={STEPS[task]}", f"--config.eval.every_steps={STEPS[task]}"]
    sweep(out / f"start-{task}-{seed}", f"configs/{Path(RECIPES[task].__file__).name}", grid, steps)
    transformer = start_of(out, task, "transformer", seed)
    for method in ARMS:
        if method != "transformer":
            converted = start_of(out, task, method, seed)
            flags = [f"--differential={method}", f"--input={transformer}", f"--out={converted}"]
            run_difftx(converted, ["convert", "--from=difftx", "--to=difftx", *flags])
            require_newest_weights(converted, transformer)


def require_newest_weights(converted: Path, transformer: Path) -> None:
    """Raise `UserError` if a run directory was converted from other weights than the Transformer's newest ones."""
    source = read_run_manifest(converted).get("source_weights")  # Older versions did not record it.
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


def train_arm(out: Path, name: str, task: Task, arm: str, taught: bool) -> float:
    """Tune an arm's learning rate, train the reported seeds, and return the rate.

    If the arm is `taught`, its teacher is the Transformer from which it starts.
    """
    prefix = "distilled-" if taught else ""

    def train(folder: str, seed: int, rate: float) -> float:
        """Return the validation loss of a run."""
        grid = [f"task={name}", f"arm={arm}", f"train.seed={seed}", f"optimizer.learning_rate={rate:g}"]
        start, teacher = (start_of(out, name, of, seed).resolve() for of in (arm, "transformer"))
        flags = [f"--config.checkpoint.init_from={start}", f"--config.data.seed={seed + NEW_DATA_SEED_OFFSET}"]
        flags += [f"--config.train.teacher={teacher}"] if taught else []
        return sweep(out / f"{prefix}{folder}", CONFIG, grid, flags)

    best = best_rate(task.first_rates, lambda rate: train(f"rate-{name}-{arm}-{rate:g}", task.tuned_seed, rate))
    for seed in task.reported_seeds:
        train(f"reported-{name}-{arm}-{seed}", seed, best)
    return best


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
