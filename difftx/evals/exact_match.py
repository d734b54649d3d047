"""Suite `exact_match`: accuracy on the validation examples of a synthetic task (docs/suites.md)."""
# Axes of arrays: B = rows, T = tokens of a row

from collections.abc import Mapping

import numpy as np

from difftx.data.synthetic import SyntheticRows
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Number, Result
from difftx.evals.suite import Suite
from difftx.training.run import Run


def evaluate(evaluation: Evaluation) -> Result:
    """Compare the most likely token with each answer. The numbers are unweighted means over validation sets."""
    tasks = synthetic_sets(evaluation.run)
    sets = {name: _score_set(evaluation, name, rows) for name, rows in tasks.items()}
    chance = _chance(tasks, sets)
    numbers = {
        name: Number(np.mean([s[name] for s in sets.values()]), "share", "higher", chance=chance.get(name))
        for name in ("accuracy", "exact_match")
    }
    return Result(numbers=numbers, details={"sets": sets})


def _chance(tasks: Mapping[str, SyntheticRows], sets: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the numbers of a model that guesses each answer independently.

    All examples of a task have the same number of answers.
    """
    guesses = {name: rows.chance for name, rows in tasks.items() if rows.chance is not None}
    if len(guesses) < len(tasks):
        return {}
    all_right = [guess ** (sets[name]["answers"] / sets[name]["examples"]) for name, guess in guesses.items()]
    return {"accuracy": float(np.mean(list(guesses.values()))), "exact_match": float(np.mean(all_right))}


def synthetic_sets(run: Run) -> dict[str, SyntheticRows]:
    """Return the validation sets with synthetic tasks, by name. Raise `UserError` if there are none."""
    tasks = {name: rows for name, rows in run.data.valid.items() if isinstance(rows, SyntheticRows)}
    if not tasks:
        raise UserError("suite 'exact_match': no data path is a synthetic task, such as data.path='synthetic:mqar'")
    return tasks


def _score_set(evaluation: Evaluation, name: str, source: SyntheticRows) -> dict[str, float]:
    _, is_best_BT = evaluation.scores(source, source.tokens, f"examples of {name}")
    answers = right = right_examples = 0
    for index, is_best_T in enumerate(is_best_BT):
        right_answers = is_best_T[source[index]["loss_mask"] > 0]
        answers, right = answers + len(right_answers), right + int(right_answers.sum())
        right_examples += bool(right_answers.all())
    return {
        "accuracy": right / answers,
        "exact_match": right_examples / len(source),
        "answers": answers,
        "examples": len(source),
    }


SUITE = Suite(
    evaluate=evaluate,
    check=synthetic_sets,
    title="Synthetic task",
    explanation="Share of right answers (accuracy), and of examples in which every answer is right (exact match).",
)
