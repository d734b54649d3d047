"""Suite `test`: other suites on a test text instead of the validation text (docs/suites.md)."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import xxhash

from difftx.data.packing import PackedRows
from difftx.data.sources import open_split, pack, require_row
from difftx.data.store import TokenStore, read_meta
from difftx.errors import UserError
from difftx.evals import SUITES
from difftx.evals.evaluation import Evaluation
from difftx.evals.inner import named
from difftx.evals.result import Result
from difftx.evals.suite import Suite
from difftx.parallel.multihost import print_on_primary
from difftx.training.run import Run

FIELD = "eval.test.path"
# If both texts together have more tokens, they are not compared, because every process would read all of them.
MAX_COMPARED_TOKENS = 2**28
CHUNK_TOKENS = 2**22  # Tokens of whole documents to read at a time.


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
    """Raise `UserError` if the test text is invalid (`test_rows`), is also training text, or does not suit a suite.

    Only whole documents with equal tokens are found. Texts of more than `MAX_COMPARED_TOKENS` are not compared.
    """
    rows = test_rows(run)
    on_test, settings = _on_test(run, rows), run.config.eval.test
    for suite in settings.suites:
        try:
            SUITES[suite].check(on_test)
        except UserError as error:
            raise UserError(f"eval.test.suites on the test text, {FIELD}={settings.path!r}: {error}") from error
    test = rows.store
    training = [rows.store.unsampled for rows in run.data.train.values() if isinstance(rows, PackedRows)]
    if (tokens := sum(map(len, [test, *training]))) > MAX_COMPARED_TOKENS:
        print_on_primary(
            f"suite 'test': not checked whether documents of {FIELD} are in the training text: both have {tokens:,} "
            f"tokens, more than {MAX_COMPARED_TOKENS:,}"
        )
        return
    index_of = {digest: index for index, digest in enumerate(_digests(test))}
    shared = {index_of[digest] for store in training for digest in _digests(store) if digest in index_of}
    if shared:
        raise UserError(
            f"{FIELD}={run.config.eval.test.path!r}: {len(shared)} of its {len(index_of)} documents are also training "
            f"documents, first its document {min(shared)} (counted from 0); prepare the test text without them"
        )


def _on_test(run: Run, rows: PackedRows) -> Run:
    """Return the run with the test text instead of its validation sets."""
    return dataclasses.replace(run, data=dataclasses.replace(run.data, valid={"test": rows}))


def _digests(store: TokenStore) -> Iterator[bytes]:
    """Yield a hash of the tokens of each document."""
    offsets = store.offsets.view(np.int64)
    first = 0
    while first < len(offsets) - 1:
        last = max(first + 1, int(offsets.searchsorted(offsets[first] + CHUNK_TOKENS, side="right")) - 1)
        # One dtype, because stores of one vocabulary may have different ones.
        tokens = store.slice(int(offsets[first]), int(offsets[last])).astype("<u4")
        for start, stop in itertools.pairwise((offsets[first : last + 1] - offsets[first]).tolist()):
            yield xxhash.xxh3_128_digest(tokens[start:stop])
        first = last


SUITE = Suite(
    evaluate=evaluate,
    inner=lambda config: config.eval.test.suites,
    check=check,
    quantizable=False,
    title="Test text",
    explanation="Other suites on a text that neither the training nor the choice of settings has used.",
)
