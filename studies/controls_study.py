"""Runs of the preregistered questions in docs/preregistration.md: small models on novels and on recall.

    python studies/controls_study.py --out=runs/study/controls --question=1-novels [--jobs=2]

The models have 0.15M parameters. The questions:

1. Norm, gain or second attention map: which part of differential attention changes the loss on novels, or helps on
   recall?
2. Does the need for a long warm-up depend on the model and on the optimizer?
3. Does another λ (bounded, slower or decayed) change the loss?
4. Do the differences between architectures change with the size of the model and the number of tokens? Some of these
   models have 0.43M parameters.
6. Does the second attention map help more if recall has more distractors?

The question "precision" is that of studies/low_precision_preregistration.md, at 0.15M parameters.

Question 5, Transformers made differential, is in studies/differential_study.py. Question 7, 10M to 160M parameters,
needs a GPU (`benchmarks/gpu.sh small`). Some questions have several parts; `QUESTIONS` explains the key of each.

A cell is a task, an arm, and changes of other fields. Most cells have a learning rate of their own, and some a gain of
their own: the values with the smallest validation loss on a seed that is not reported. The reported seeds then train
with these values. Each job takes one core. An interrupted study resumes where it stopped, and questions share the cells
that they have in common. The script prints the tuned rate and gain of each cell.

    python studies/results.py collect --study=question-3 runs/study/controls/novels-diff-lambda_*/reported
    python studies/results.py collect --study=question-3-tuning runs/study/controls/novels-diff-lambda_*/tune-*
"""

import concurrent.futures
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.configs.controls import DISTRACTORS, NOVELS_RATE, RECALL_RATE, WIDER
from difftx.errors import run_command
from studies.tuning import best_rate, seed_axis, study_parser, sweep

CONFIG = "configs/controls.py"
# (Whether the task is recall, optimizer) → learning rates with which `best_rate` begins. Gains are tuned at the first
# of these rates.
FIRST_RATES = {
    (False, "adamw"): (NOVELS_RATE, 2 * NOVELS_RATE),
    (False, "muon"): (1.6e-2, 3.2e-2),
    (True, "adamw"): (RECALL_RATE, RECALL_RATE / 2),
}
TUNED_SEED = 100
REPORTED_SEEDS = (10, 11, 12, 13, 14)
# Recall needs a sixth seed: in Fisher's test, 5 of 5 solved runs against 0 of 5 have p = 0.008, which is not
# significant in a family of seven contrasts.
RECALL_SEEDS = (*REPORTED_SEEDS, 15)
SEEDS_AGAIN = tuple(range(20, 30))  # The second set of runs of question 1.
GAINS = (1, 2, 4, 8)  # Gains that each arm with a tuned gain tries.
type Fields = Mapping[str, str]  # Fields of the config → values.
NO_CHANGES: Fields = MappingProxyType({})


class Cell(NamedTuple):
    """Runs of one arm with the same settings, which differ in their seeds."""

    task: str
    arm: str
    changes: Fields = NO_CHANGES  # Changes of the recipe's fields.
    is_tuned: bool = True  # Whether to tune rate and gain. If not, they are those of the recipe or of `changes`.
    takes_tuning_of: str | None = None  # Folder of an earlier cell of the question, whose tuned fields this cell takes.
    seeds: Sequence[int] = REPORTED_SEEDS

    @property
    def folder(self) -> str:
        """Name of the folder of the cell's runs."""
        changes = "".join(f"-{name.rpartition('.')[2]}-{value}" for name, value in self.changes.items())
        shared = "-shared" if self.takes_tuning_of else ""
        return f"{self.task}-{self.arm}{changes}{'-again' if self.seeds == SEEDS_AGAIN else ''}{shared}"


# Arms of question 1: with and without the second attention map, and with a norm, a gain or neither.
NORM_OR_GAIN_ARMS = (
    "transformer",
    "transformer-gain",
    "transformer-wide-norm",
    "zero-norm",
    "zero-gain",
    "diff",
    "diff-gain",
    "diff-plain",
)
# Arms of question 6.
AGAINST_NOISE = (*(arm for arm in NORM_OR_GAIN_ARMS if arm not in ("transformer", "diff-plain")), "diff-lambda_1")
AGAINST_MORE_NOISE = ("zero-norm", "zero-gain", "diff", "diff-gain", "diff-lambda_1")
# Question 3: changes of how λ is computed and trained.
LAMBDAS: Sequence[Fields] = (
    {"model.lambda_bound": "sigmoid"},
    {"model.lambda_bound": "tanh"},
    {"optimizer.lambda_learning_rate_factor": "0.1"},
    {"optimizer.lambda_weight_decay": "0.1"},
)
# Fields of the config that cells change.
RATE = "optimizer.learning_rate"
GAIN = "model.post_scale"
STEPS = "train.steps"
# Rates of question 3 on recall, which show what a diverging λ does.
DIVERGING_RATES = ("0.0025", "0.005", "0.01", "0.02")
SHORT_WARMUP = {"optimizer.warmup_steps": "0.01"}
MUON = {"optimizer.name": "muon"}
# Arms of the runs that repeat the main contrasts of question 1 on another text and with another head width.
MAIN_ARMS = ("transformer", "transformer-gain", "zero-norm", "diff")
SPARSE_OR_SIGNED = ("top_k", "signed_mask")
ATTENTION_SUITES = {"eval.suites": "loss,exact_match,attention"}
FRESH_RECALL_SEEDS = tuple(range(20, 26))
# Question "precision": what is evaluated in few bits. fp8 training takes the rates of the runs in bfloat16.
IN_BFLOAT16 = {
    "model.compute_dtype": "bfloat16",
    "eval.suites": "loss,quantize,cache",
    "eval.quantize.rounded": "products",
    "eval.cache.shares": "()",
}
PRECISION_ARMS = ("transformer", "transformer-wide-norm", "zero-norm", "diff")
# Question 4: architectures at several sizes and lengths of training.
ARCHITECTURES = ("transformer", "zero-norm", "diff", "diff_v2", "gdla", "gated")
SIZE_SEEDS = tuple(range(30, 38))
SHARED_RATE_TOKENS = 5  # Tokens per parameter at which the shared rates of question 4-shared are tuned.
# Task → tokens per parameter → number of updates of 1,024 tokens. The Transformers have 148,032 and 426,624 parameters.
LENGTHS = {"novels": {5: 723, 20: 2891, 80: 11565}, WIDER: {5: 2083, 20: 8333}}
# The arms of the runs with a shared rate that take longest: models of 426,624 parameters, and 80 tokens per parameter.
LONGEST_ARMS = ("transformer", "zero-norm", "diff")


def _length_cell(task: str, tokens: int, arm: str) -> Cell:
    """Return a cell of question 4 with a rate of its own; `tokens` is the number per parameter."""
    return Cell(task, arm, {STEPS: str(LENGTHS[task][tokens])}, seeds=SIZE_SEEDS)


def _fp8_cell(cell: Cell) -> Cell:
    """Return the cell of the same runs with products in fp8, at the same rates."""
    return cell._replace(
        changes={**cell.changes, "model.matmul": "fp8", "eval.suites": "loss"}, takes_tuning_of=cell.folder
    )


def _shared_rate_cell(task: str, tokens: int, arm: str) -> Cell:
    """Return a cell of question 4 with the rate that was tuned at `SHARED_RATE_TOKENS`."""
    cell = _length_cell(task, tokens, arm)
    if tokens == SHARED_RATE_TOKENS:
        return cell
    return cell._replace(takes_tuning_of=_length_cell(task, SHARED_RATE_TOKENS, arm).folder)


# Part of a question → its cells. A cell of the same task, arm, changes and seeds in several parts is trained once.
QUESTIONS: Mapping[str, Sequence[Cell]] = {
    # Question 1 on novels, each arm at its tuned rate and gain.
    "1-novels": [Cell("novels", arm) for arm in NORM_OR_GAIN_ARMS],
    # Question 1 on recall, with a sixth seed.
    "1-recall": [Cell("recall", arm, seeds=RECALL_SEEDS) for arm in NORM_OR_GAIN_ARMS],
    # Question 1 on novels with ten fresh seeds, at the rates and gains of 1-novels, which configs/controls.py has. The
    # arm diff-plain is missing, because the best gain of diff-gain is 1, which makes it the same model.
    "1-again": [
        Cell("novels", arm, is_tuned=False, seeds=SEEDS_AGAIN) for arm in NORM_OR_GAIN_ARMS if arm != "diff-plain"
    ],
    # Main arms of question 1 on the source code of Python's library.
    "1-stdlib": [Cell("novels", arm, {"data.path": "stdlib", "eval.suites": "loss"}) for arm in MAIN_ARMS],
    # Main arms of question 1 on novels with heads of width 32 instead of 16.
    "1-wide": [Cell("novels-wide", arm) for arm in MAIN_ARMS],
    # Question 2: each optimizer with the long warm-up of the recipe and with a short one.
    "2": [
        Cell("novels", arm, {**optimizer, **warmup})
        for arm in ("transformer", "diff")
        for optimizer in (NO_CHANGES, MUON)
        for warmup in (NO_CHANGES, SHORT_WARMUP)
    ],
    # The control of question 2 with λ = 0, with Muon.
    "2-zero": [Cell("novels", "zero-norm", {**MUON, **warmup}) for warmup in (NO_CHANGES, SHORT_WARMUP)],
    # Question 3 on novels: forms of λ, each at its tuned rate.
    "3-novels": [Cell("novels", "diff", changes) for changes in (NO_CHANGES, *LAMBDAS)],
    # Question 3 on recall: λ without norm and gain at large rates.
    "3-recall": [Cell("recall", "diff-plain", {RATE: rate}, is_tuned=False) for rate in DIVERGING_RATES],
    # Question 4 with a rate tuned for each length. The sizes come one after the other, so that an interrupted study has
    # a whole family of contrasts.
    "4": [
        _length_cell(task, tokens, arm)
        for task, lengths in LENGTHS.items()
        for tokens in lengths
        for arm in ARCHITECTURES
    ],
    # Question 4 with one rate for all lengths of a size.
    "4-shared": [
        _shared_rate_cell(task, tokens, arm)
        for task, lengths in LENGTHS.items()
        for tokens in lengths
        for arm in (LONGEST_ARMS if task == WIDER or tokens > 20 else ARCHITECTURES)
    ],
    # Question 6 with 15 and with 31 distractors.
    "6": [Cell(task, arm, seeds=RECALL_SEEDS) for task in ("recall", "recall-31") for arm in AGAINST_NOISE],
    # Question 6 with 63 distractors.
    "6-more": [Cell("recall-63", arm, seeds=RECALL_SEEDS) for arm in AGAINST_MORE_NOISE],
    # Question 6 with 63 distractors and twice the steps, on fresh seeds.
    "6-longer": [Cell("recall-63", arm, {STEPS: "5000"}, seeds=FRESH_RECALL_SEEDS) for arm in ("zero-norm", "diff")],
    # Experiments SP1, SP3 and NC3 of a review of the paper (docs/reproducing.md): top-k and signed attention, and
    # attention weights during training.
    "review": [
        *(Cell("novels", arm, seeds=SEEDS_AGAIN) for arm in SPARSE_OR_SIGNED),
        *(Cell("recall-31", arm, seeds=RECALL_SEEDS) for arm in SPARSE_OR_SIGNED),
        *(
            Cell("recall", arm, ATTENTION_SUITES, is_tuned=False, seeds=FRESH_RECALL_SEEDS)
            for arm in ("zero-norm", "diff")
        ),
    ],
    "precision": [
        each
        for cell in (Cell("novels", arm, IN_BFLOAT16) for arm in PRECISION_ARMS)
        for each in (cell, _fp8_cell(cell))
    ],
}


def main(arguments: Sequence[str]) -> int:
    """Train the cells of a question; return the exit code."""
    parser = study_parser(__doc__)
    parser.add_argument("--question", choices=QUESTIONS, action="append", help="may be repeated; all by default")
    args = parser.parse_args(arguments)
    # The key is the folder, because questions share cells, and each cell is trained once.
    todo = {cell.folder: cell for question in args.question or QUESTIONS for cell in QUESTIONS[question]}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        trained: dict[str, Future[Fields]] = {}
        # The pool starts the cells in this order, so no cell waits for one that has not started.
        for folder, cell in todo.items():
            shared_tuning = trained[cell.takes_tuning_of] if cell.takes_tuning_of else None
            trained[folder] = pool.submit(train_cell, cell, args.out, shared_tuning)
        folders = {future: folder for folder, future in trained.items()}
        for number, done in enumerate(concurrent.futures.as_completed(folders), 1):
            tuned = ", ".join(f"{name}={value}" for name, value in done.result().items())
            print(f"[{number}/{len(trained)}] {folders[done]}: {tuned}", flush=True)
    return 0


def train_cell(cell: Cell, out: Path, shared_tuning: Future[Fields] | None = None) -> Fields:
    """Train the reported seeds of a cell, and return its tuned fields with their values.

    Args:
        cell: The cell to train.
        out: Folder of all cells.
        shared_tuning: Tuned fields of the cell `cell.takes_tuning_of`. This cell then takes them and tunes nothing.
    """
    folder = out / cell.folder
    grid = [f"task={cell.task}", f"arm={cell.arm}"]
    flags = [f"--config.{name}={value}" for name, value in cell.changes.items()]
    rates = FIRST_RATES[cell.task in DISTRACTORS, cell.changes.get("optimizer.name", "adamw")]
    tuned = dict(shared_tuning.result()) if shared_tuning else {}

    def loss(name: str, value: float) -> float:
        """Return the validation loss of `TUNED_SEED` in nats per token, with one more field."""
        fields = {RATE: f"{rates[0]:g}"} | tuned | {name: f"{value:g}"}
        path = folder / "-".join(["tune", *(f"{n.rpartition('.')[2]}-{v}" for n, v in sorted(fields.items()))])
        # No other suite chooses a value.
        return sweep(
            path, CONFIG, [*grid, seed_axis([TUNED_SEED]), *_axes(fields)], [*flags, "--config.eval.suites=loss"]
        )

    is_tuned = cell.is_tuned and shared_tuning is None
    if is_tuned and cell.arm.endswith("-gain"):
        tuned[GAIN] = f"{min(GAINS, key=lambda gain: loss(GAIN, gain)):g}"
    if is_tuned:
        tuned[RATE] = f"{best_rate(rates, lambda rate: loss(RATE, rate)):g}"
    sweep(folder / "reported", CONFIG, [*grid, seed_axis(cell.seeds), *_axes(tuned)], flags)
    return tuned


def _axes(fields: Fields) -> list[str]:
    """Return the words of `difftx sweep --grid` that set fields."""
    return [f"{name}={value}" for name, value in fields.items()]


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
