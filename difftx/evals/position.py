"""Suite `position`: average loss up to each position (Figure 4 of the Differential Transformer paper)."""
# Axes of arrays: N = documents, T = tokens of a row

import dataclasses
import statistics

import numpy as np

from difftx.data.packing import Row
from difftx.data.store import TokenStore
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation, text_sets
from difftx.evals.result import LineChart, Number, Result, Series
from difftx.evals.suite import Suite
from difftx.training.run import Run

POINTS = 64  # Maximum number of points per curve, evenly spaced, because long positions matter most.
ERRORS = statistics.NormalDist().inv_cdf(0.975)  # Half-width of a 95 % confidence interval, in standard errors.


class DocumentStarts:
    """The first T tokens of documents with more than T tokens, as a `RowSource`.

    If there are more than `limit` such documents, take evenly spaced ones.
    """

    def __init__(self, store: TokenStore, sequence_length: int, limit: int):
        offsets = store.offsets.view(np.int64)
        lengths = np.diff(offsets)
        found = offsets[:-1][lengths > sequence_length]  # T inputs and T targets take T + 1 tokens.
        count = min(limit, len(found))
        self.store, self.name, self.fingerprint = store, store.name, store.fingerprint
        self.sequence_length, self.threads = sequence_length, store.threads
        self.longer, self.longest = len(found), int(lengths.max(initial=0))
        self.tokens = count * sequence_length
        self._starts = found[np.arange(count) * len(found) // max(count, 1)].tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        start = self._starts[index]
        tokens = self.store.slice(start, start + self.sequence_length + 1).astype(np.int32)
        ones = np.ones(self.sequence_length, np.float32)
        return {"tokens": tokens[:-1], "targets": tokens[1:], "loss_mask": ones}

    def row_tokens(self, index: int) -> int:
        return self.sequence_length


def evaluate(evaluation: Evaluation) -> Result:
    """Average the loss over the first 1, 2, … T targets of long documents. `loss` is the average over all T."""
    sources, length = long_documents(evaluation.run), evaluation.run.config.data.sequence_length
    # The averages over the first few targets are several times larger, and would set the scale of the y-axis.
    positions = np.unique(np.ceil(np.linspace(0, length, POINTS + 1)[1:]).astype(int))
    sets, series = {}, []
    for name, source in sources.items():
        sets[name] = {"documents": len(source), "documents_that_are_longer": source.longer, "tokens": source.tokens}
        if len(source):
            nll_NT, _ = evaluation.scores(source, source.tokens, f"long documents of {name}")
            curve = _curve(name, nll_NT, positions)
            sets[name]["loss"] = curve.y[-1]
            series.append(curve)
    chart = LineChart(
        name="loss_by_position",
        title="Loss up to a position",
        x_label="position, tokens",
        y_label="cumulative average loss, nats per token",
        series=series,
    )
    band = f"95 %, normal approximation: the mean over documents ± {ERRORS:.2f} of its standard errors"
    numbers = {
        "loss": Number(np.mean([curve.y[-1] for curve in series]), "nats per token", "lower"),
        "documents": Number(sum(map(len, sources.values())), "documents"),
    }
    return Result(numbers=numbers, details={"sets": sets, "band": band}, charts=[chart])


def long_documents(run: Run) -> dict[str, DocumentStarts]:
    """Return the long documents in each validation set with text. Raise `UserError` if there are none."""
    length, limit = run.config.data.sequence_length, run.config.eval.position_documents
    sources = {name: DocumentStarts(rows.store, length, limit) for name, rows in text_sets(run, "position").items()}
    if not any(len(source) for source in sources.values()):
        longest = max(source.longest for source in sources.values())
        raise UserError(
            f"suite 'position': no document to evaluate is longer than data.sequence_length={length} tokens, the "
            f"longest has {longest}; remove this suite, or use longer documents"
        )
    return sources


def _curve(name: str, nll_NT: np.ndarray, positions: np.ndarray) -> Series:
    """Return the average loss up to each of `positions`, which count from 1. If N > 1, add a 95 % band."""
    averages = np.cumsum(nll_NT, axis=1, dtype=np.float64)[:, positions - 1] / positions
    mean = averages.mean(axis=0)
    curve = Series(name=name, x=positions.astype(float).tolist(), y=mean.tolist())
    if len(averages) < 2:
        return curve
    half = ERRORS * averages.std(axis=0, ddof=1) / np.sqrt(len(averages))
    return dataclasses.replace(curve, low=(mean - half).tolist(), high=(mean + half).tolist())


SUITE = Suite(
    evaluate=evaluate,
    check=long_documents,
    title="Loss by position",
    explanation="Mean loss over the first tokens of long documents. A model that uses a long context falls further. "
    "The band of one run is a 95 % interval over documents.",
)
