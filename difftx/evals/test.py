"""Suite `test`: other suites on a test text in place of the validation text (docs/suites.md)."""

import dataclasses
from typing import Any

from difftx.config.suites import SUITES
from difftx.data.packing import PackedRows
from difftx.data.sources import open_split, pack, require_row
from difftx.data.store import META, read_meta
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Result
from difftx.evals.suite import Suite
from difftx.storage.paths import path_of
from difftx.training.run import Run

FIELD = "eval.test.path"
TEST_SET = "test"  # Name of the test text in the details of the results.


def evaluate(evaluation: Evaluation) -> Result:
    """Run `eval.test.suites` on the test text at `eval.test.path`."""
    run = evaluation.run
    data = dataclasses.replace(run.data, valid={TEST_SET: test_rows(run)})
    # The suites share a forward pass over the test text.
    on_test = Evaluation(dataclasses.replace(run, data=data), evaluation.params, evaluation.work)
    results = {suite: SUITES[suite].evaluate(on_test) for suite in run.config.eval.test.suites}

    def of_all(field: str) -> dict[str, Any]:
        return {f"{suite}_{name}": x for suite, result in results.items() for name, x in getattr(result, field).items()}

    return Result(
        numbers=of_all("numbers"),
        chance=of_all("chance"),
        measures=of_all("measures"),
        details={suite: result.details for suite, result in results.items()},
        charts=[
            dataclasses.replace(chart, name=f"test_{chart.name}", title=f"Test text: {chart.title}")
            for result in results.values()
            for chart in result.charts
        ],
    )


def test_rows(run: Run) -> PackedRows:
    """Return the rows of the test text, packed as the rows of the training data.

    Raise `UserError` if `eval.test.path` is not a store of the run's vocabulary, or if the store has two splits, of
    which one might be training data.
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


SUITE = Suite(
    evaluate=evaluate,
    reads=("test",),
    files=lambda config: [] if config.eval.test.path is None else [path_of(FIELD, config.eval.test.path) / META],
    inner=lambda config: config.eval.test.suites,
    check=test_rows,
    quantizable=False,
)
