"""Read points for scaling laws, (architecture, size, tokens, loss), from run directories or tables."""

import csv
import dataclasses
import glob
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from difftx.config.build import parse_text
from difftx.config.fields import Positive
from difftx.errors import UserError, did_you_mean
from difftx.files import is_glob
from difftx.model.abstract import count_parameters
from difftx.report.arms import EQUAL_SIZES, training_changes
from difftx.report.runs import Metric, RunRecord, check_comparable, data_notes, match_runs


@dataclasses.dataclass(frozen=True)
class LossPoint:
    """The loss of a run at one of its validations."""

    architecture: str
    size: float  # Number of parameters, including the embedding, as in Table 10 of the paper.
    tokens: float  # Number of training tokens so far.
    loss: float  # Value of the metric, in nats per token or bits per byte.
    is_last: bool  # Whether the run ended here. Before, its learning rate had not fully decayed.


def read_points(pattern: str, metric: Metric) -> tuple[list[LossPoint], list[str]]:
    """Return the points of the tables (*.csv) or run directories that match a glob, and notes on runs.

    A note is about an unfinished run, about fields in which runs of one architecture, size and length differ, or about
    runs with different data (`data_notes`).

    A table has the columns `architecture`, `size` (parameters), `tokens`, `loss` (or `bits_per_byte`) and optionally
    `seed`. Rows with equal architecture, size and seed are one run.
    """
    points: list[LossPoint] = []
    if pattern.endswith(".csv"):  # Tables are local files.
        for name in sorted(glob.glob(pattern if is_glob(Path(pattern)) else glob.escape(pattern))):
            points += _points_of_table(Path(name), metric)
        if not points:
            raise UserError(f"--scaling={pattern!r}: no points there")
        return points, []
    runs = match_runs(pattern, "scaling")
    check_comparable(runs, metric)
    notes = [*_pooled_arms(runs), *data_notes(runs)]
    for run in runs:
        found, note = _points_of_run(run, metric)
        points += found
        notes += [note] if note else []
    if not points:
        raise UserError(f"--scaling={pattern!r}: no run has a validation in {metric} yet")
    return points, notes


def _pooled_arms(runs: Sequence[RunRecord]) -> list[str]:
    """Return a note per architecture with runs of similar size and length that differ in more than seeds."""
    pooled: dict[str, dict[str, None]] = {}  # Architecture → fields, in the order found.
    for first, second in itertools.combinations(runs, 2):
        architecture = first.config.model.architecture
        if second.config.model.architecture != architecture:
            continue
        sizes = [count_parameters(run.config.model).total for run in (first, second)]
        tokens = [run.tokens_after([run.steps])[0] for run in (first, second)]
        if all(max(pair) <= EQUAL_SIZES * min(pair) for pair in (sizes, tokens)):
            fields = pooled.setdefault(architecture, {})
            fields |= dict.fromkeys(change.field for change in training_changes(first, second))
    return [
        f"{architecture}: runs of about the same size and length differ in {', '.join(fields)}, and the fit pools "
        "them; match one arm per architecture, and one learning rate per size"
        for architecture, fields in pooled.items()
        if fields
    ]


def _points_of_run(run: RunRecord, metric: Metric) -> tuple[list[LossPoint], str | None]:
    """Return a run's points, and a note if the run has no validation at its last configured step."""
    losses = {step: loss for step, loss in run.evaluations(metric).items() if loss > 0}
    architecture, size = run.config.model.architecture, float(count_parameters(run.config.model).total)
    points = [
        LossPoint(architecture, size, tokens, loss, is_last=step == run.steps)
        for (step, loss), tokens in zip(losses.items(), run.tokens_after([*losses]), strict=True)
    ]
    if points and points[-1].is_last:
        return points, None
    step, numbers = run.last_validation()
    reason = f"its last validation is at step {step:,}, of {run.steps:,}"
    if metric not in numbers:
        reason = f"it has no validation in {metric}"
    elif run.last_value(metric) is None:
        reason = f"the loss of its last validation, at step {step:,}, is not finite"
    return points, f"{run.name}: {reason}: not a point of loss against size"


def _points_of_table(path: Path, metric: Metric) -> list[LossPoint]:
    runs: dict[tuple[Any, ...], list[LossPoint]] = {}
    for where, row in _rows(path):
        size, tokens, loss = (_positive_number(row, name, where) for name in ("size", "tokens", metric))
        point = LossPoint(str(row["architecture"]), size, tokens, loss, is_last=False)
        runs.setdefault((point.architecture, size, str(row.get("seed"))), []).append(point)
    points = []
    for run in runs.values():
        *earlier, last = sorted(run, key=lambda point: point.tokens)
        points += [*earlier, dataclasses.replace(last, is_last=True)]
    return points


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (position, row) for each row of a table. Error messages use the position."""
    try:
        # Excel writes a byte order mark, which would become part of the first column's name.
        rows = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig")))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from error
    return [(f"{path}: line {number}", row) for number, row in enumerate(rows, 2)]


def _positive_number(row: dict[str, Any], name: str, where: str) -> float:
    for required in ("architecture", name):
        if row.get(required) in (None, ""):
            raise UserError(f"{where} has no {required!r}.{did_you_mean(required, map(str, row))}")
    return parse_text(str(row[name]), Positive[float], f"{where}: {name}")
