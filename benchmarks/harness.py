"""The suite harness compared with slow scoring of the same items, one choice at a time with the training forward pass.

python benchmarks/harness.py --workdir=RUN [--eval.harness.data_path=FOLDER …]

Prints the accuracies and seconds of both, and the largest difference of a log-likelihood. Both truncate requests that
are longer than the context from the left.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.commands.flags import Parser
from difftx.config.build import override
from difftx.errors import run_command
from difftx.evals import run as evals
from difftx.evals.evaluation import Evaluation
from difftx.evals.harness import model as harness_model
from difftx.evals.harness import suite as harness
from difftx.evals.harness.requests import Tokens
from difftx.evals.result import Result
from difftx.inference.score import Score
from difftx.progress import Work
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.reading import Checkpoint, open_checkpoint, open_run
from difftx.training.checkpoint.restoring import restore_params
from difftx.training.run import Run, read_config
from difftx.training.state import graph

type Pair = tuple[Tokens, Tokens]  # A context and its continuation.
type Scores = dict[Pair, Score]


class SlowScorer:
    """Slow replacement of `harness_model.score_all`, which scores one continuation at a time.

    `scores` has the score of each (context, continuation) so far.
    """

    def __init__(self, evaluation: Evaluation):
        graphdef = graph(evaluation.run.config)
        self._logits = jax.jit(lambda params, row: nnx.merge(graphdef, params)(row)[0])
        self.scores: Scores = {}

    def __call__(self, evaluation: Evaluation, pairs: Sequence[Pair], *, what: str) -> list[Score]:
        """Return the score of each (context, continuation); repeated pairs are scored once."""
        for pair in evaluation.work.track(pairs, what, len(pairs)):
            if pair not in self.scores:
                self.scores[pair] = self._score(evaluation.params, *pair)
        return [self.scores[pair] for pair in pairs]

    def _score(self, params, context: Tokens, continuation: Tokens) -> Score:
        """Return the log-likelihood of a continuation in nats, computed in float64, and whether it is greedy."""
        tokens = [*context, *continuation]
        width = max(64, 2 ** (len(tokens) - 2).bit_length())  # Powers of two, so that few programs are compiled.
        row = np.zeros((1, width), np.int32)
        row[0, : len(tokens) - 1] = tokens[:-1]
        logits_TV = np.asarray(self._logits(params, row))[0, len(context) - 1 : len(tokens) - 1].astype(np.float64)
        largest_T1 = logits_TV.max(axis=1, keepdims=True)
        log_p_TV = logits_TV - largest_T1 - np.log(np.exp(logits_TV - largest_T1).sum(axis=1, keepdims=True))
        chosen = np.arange(len(continuation)), list(continuation)
        return Score(float(log_p_TV[chosen].sum()), bool((logits_TV[chosen] == largest_T1[:, 0]).all()))


class Comparison(NamedTuple):
    """Results, scores and seconds of the suite and of slow scoring."""

    result: Result
    slow_result: Result
    scores: Scores
    slow_scores: Scores
    seconds: float
    slow_seconds: float


@contextlib.contextmanager
def scored_by(score_all: Callable[..., list[Score]]) -> Iterator[None]:
    """Let the suite call `score_all` in place of `harness_model.score_all`."""
    original = harness_model.score_all
    harness_model.score_all = score_all
    try:
        yield
    finally:
        harness_model.score_all = original


def compare(run: Run, step: int, checkpoint: Checkpoint) -> Comparison:
    """Score the parameters of a checkpoint with the suite, and then slowly."""
    scores: Scores = {}
    score_all = harness_model.score_all

    def recording_score_all(evaluation: Evaluation, pairs: Sequence[Pair], *, what: str) -> list[Score]:
        new_scores = score_all(evaluation, pairs, what=what)
        scores.update(zip(pairs, new_scores, strict=True))
        return new_scores

    params = restore_params(checkpoint.manifest, run.config, run.mesh)
    with Work() as work:
        start = time.perf_counter()
        with scored_by(recording_score_all):
            result = evals.evaluate(run, params, step, ["harness"], work, checkpoint.weights, checkpoint)["harness"]
        seconds, start = time.perf_counter() - start, time.perf_counter()
        evaluation = Evaluation(run, params, work)
        with jax.set_mesh(run.mesh):
            slow_scorer = SlowScorer(evaluation)
            with scored_by(slow_scorer):
                slow_result = harness.evaluate(evaluation)
        slow_seconds = time.perf_counter() - start
    return Comparison(result, slow_result, scores, slow_scorer.scores, seconds, slow_seconds)


def print_report(step: int, comparison: Comparison) -> None:
    """Print the accuracies and seconds of both ways to score, and the differences of the log-likelihoods."""
    result, slow_result = comparison.result, comparison.slow_result
    questions, truncated = sum(result.details["questions"].values()), result.details["truncated_requests"]
    print(f"step {step}; {questions} questions, {len(comparison.scores)} different choices, {truncated} truncated")
    seconds, slow_seconds = comparison.seconds, comparison.slow_seconds
    print(f"suite {seconds:.0f} s, one at a time {slow_seconds:.0f} s, load {os.getloadavg()[0]:.1f}")
    for name, value in result.numbers.items():
        same = "equal" if value == slow_result.numbers[name] else "DIFFERS"
        print(f"{name:<32}{value:.6f}  {slow_result.numbers[name]:.6f}  {same}")
    print_differences(comparison.scores, comparison.slow_scores)


def print_differences(fast: Scores, slow: Scores) -> None:
    """Print the largest difference of a log-likelihood, and how many pairs are greedy in only one of the scorings."""
    worst = max(abs(fast[pair].loglikelihood - slow[pair].loglikelihood) for pair in fast)
    greedy = sum(fast[pair].is_greedy != slow[pair].is_greedy for pair in fast)
    print(f"largest difference of a log-likelihood {worst:.2e} nats; {greedy} differ in whether they are greedy")


def main() -> int:
    """Parse the flags, score with the suite and then slowly, and print the comparison."""
    parser = Parser(None, __doc__, "eval", "mesh", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    args, rest = parser.parse_known_args()
    changes = {"eval.harness.truncate": "true"} | parser.overrides(rest)
    checkpoints = Checkpoints(args.workdir)
    step = checkpoints.newest()
    assert step is not None, "no checkpoint"
    checkpoint = open_checkpoint(checkpoints.read(step), override(read_config(args.workdir), changes))
    comparison = compare(open_run(checkpoint, checkpoints), step, checkpoint)
    print_report(step, comparison)
    assert dataclasses.asdict(comparison.result) == dataclasses.asdict(comparison.slow_result)
    return 0


if __name__ == "__main__":
    run_command(main)
