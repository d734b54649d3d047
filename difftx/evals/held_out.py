"""Suite `test`: other suites on a test text instead of the validation text (docs/suites.md)."""

import dataclasses

from difftx.data.packing import PackedRows
from difftx.data.sources import open_split, pack, require_row
from difftx.data.store import read_meta
from difftx.errors import UserError
from difftx.evals import SUITES
from difftx.evals.evaluation import Evaluation
from difftx.evals.inner import named
from difftx.evals.result import Result
from difftx.evals.suite import Suite
from difftx.training.run import Run

FIELD = "eval.test.path"


def evaluate(evaluation: Evaluation) -> Result:
    """Run `eval.test.suites` on the test text at `eval.test.path`."""
    run = evaluation.run
    # The suites share one forward pass over the test text.
    on_test = Evaluation(_on_test(run, test_rows(run)), evaluation.params, evaluation.work)
    results = {suite: SUITES[suite].evaluate(on_test) for suite in run.config.eval.test.suites}

    return Result(
        numbers={name: x for suite, result in results.items() for name, x in named(suite, result.numbers).items()},
        details={suite: result.details for suite, result in results.items()},
        charts=[
            dataclasses.replace(chart, name=f"test_{chart.name}", title=f"Test text: {chart.title}")
            for result in results.values()
            for chart in result.charts
        ],
    )


def test_rows(run: Run) -> PackedRows:
    """Return the rows of the test text, packed like the training data.

    Raise `UserError` if `eval.test.path` is not a store with the run's vocabulary. Also raise it if the store has two
    splits, because one might be training data.
    """
    path = run.config.eval.test.path
    if path is None:
        raise UserError(
            f"suite 'test': {FIELD} is not set; make a store of the test text with `difftx prepare "
            "--input=… --valid_fraction=0` and set it to that folder"
        )
    store = open_split(run.config.data, path, "train", run.tokenizer, FIELD)
    if held_out := read_meta(path)["splits"]["valid"]["documents"]:
        raise UserError(
            f"{FIELD}={path!r}: {held_out} documents of this store are held out for validation, so it is not only a "
            "test text; prepare the test text with --valid_fraction=0"
        )
    require_row(store, run.config.data, f"{FIELD}={path!r}", "test")
    return pack(store, run.config.data)


def check(run: Run) -> None:
    """Raise `UserError` if the test text is invalid (`test_rows`), or if a suite cannot evaluate it."""
    on_test = _on_test(run, test_rows(run))
    for suite in run.config.eval.test.suites:
        SUITES[suite].check(on_test)


def _on_test(run: Run, rows: PackedRows) -> Run:
    """Return the run with the test text instead of its validation sets."""
    return dataclasses.replace(run, data=dataclasses.replace(run.data, valid={"test": rows}))


SUITE = Suite(
    evaluate=evaluate,
    inner=lambda config: config.eval.test.suites,
    check=check,
    quantizable=False,
    title="Test text",
    explanation="Other suites on a text that neither the training nor the choice of settings has used.",
)
