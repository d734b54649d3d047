"""Comparison of the records of a run with those of an uninterrupted run."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.proto import event_pb2

# Fields that are compared. The other fields of a row depend on time.
TRAIN = ("loss", "grad_norm", "learning_rate", "tokens", "lambda", "skipped")
EVENT = ("split", "step", "reason", "bad_steps", "skipped_examples", "rewinds")


def rows_of(metrics: Path, split: str) -> list[dict[str, Any]]:
    rows = []
    text = metrics.read_text(errors="replace") if metrics.exists() else ""  # A fault may come before the first row.
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("split") == split:
            rows.append(row)
    return rows


def check_metrics(run: Path, uninterrupted: Path, *, until: int) -> None:
    """Assert that metrics.jsonl has each step from 1 to `until` once and in order, with the numbers of `uninterrupted`.

    Args:
        run: a workdir.
        uninterrupted: the workdir of the uninterrupted run.
        until: the last step whose row is required. Later rows are compared if they exist.
    """
    ours, theirs = ({}, {})
    for workdir, found in ((run, ours), (uninterrupted, theirs)):
        rows = rows_of(workdir / "metrics.jsonl", "train")
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps)), f"{workdir}: steps twice or out of order: {steps}"
        found.update({row["step"]: [row.get(name) for name in TRAIN] for row in rows})
    newest = max(ours, default=0)
    missing = sorted(set(range(1, max(until, newest) + 1)) - set(ours))
    assert not missing, f"{run}: no rows of steps {missing}"
    for step, values in ours.items():
        assert values == theirs[step], f"{run}: step {step} has {values}, uninterrupted it has {theirs[step]}"
    evaluations = [
        {
            (row["step"], row["suite"]): {k: v for k, v in row.items() if "second" not in k and k != "attempt"}
            for row in rows_of(workdir / "metrics.jsonl", "valid")
        }
        for workdir in (run, uninterrupted)
    ]
    for key, values in evaluations[0].items():
        assert values == evaluations[1][key], f"{run}: evaluation {key}: {values}, not {evaluations[1][key]}"
    due = {key for key in evaluations[1] if key[0] <= until}
    assert due <= evaluations[0].keys(), f"{run}: no evaluation {sorted(due - evaluations[0].keys())}"


def check_rewinds(run: Path, uninterrupted: Path) -> None:
    """Assert that the same steps were bad and the same data were skipped."""
    ours, theirs = (
        [{name: row.get(name) for name in EVENT} for split in ("rewind", "stop") for row in rows_of(metrics, split)]
        for metrics in (run / "metrics.jsonl", uninterrupted / "metrics.jsonl")
    )
    assert ours == theirs, f"{run}: rewinds and stops {ours}, uninterrupted {theirs}"


def check_tensorboard(run: Path, uninterrupted: Path) -> None:
    """Assert that TensorBoard shows the loss of every step of `uninterrupted` once."""
    expected = [
        (row["step"], float(np.float32(row["loss"])))
        for row in rows_of(uninterrupted / "metrics.jsonl", "train")
        if row["loss"] is not None
    ]
    shown = tensorboard_scalars(run / "tensorboard", "train/loss")
    assert shown == expected, f"{run}: TensorBoard shows {_difference(shown, expected)}"


def tensorboard_scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return step and value of a tag, as TensorBoard does: file by file, without the points that a restart voids."""
    values: list[tuple[int, float]] = []
    for path in sorted(folder.iterdir()):
        for event in _events_in(path.read_bytes()):
            if event.session_log.status == event_pb2.SessionLog.START:
                values = [value for value in values if value[0] < event.step]
            values += [(event.step, value.simple_value) for value in event.summary.value if value.tag == tag]
    return values


def _events_in(content: bytes) -> list[Any]:
    """Return a file's records. The last record is omitted if it is incomplete."""
    found, position = [], 0
    while position + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        record = content[position + 12 : position + 12 + length]
        position += 12 + length + 4
        if position > len(content):
            break
        found.append(event_pb2.Event.FromString(record))
    return found


def _difference(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> str:
    return f"{sorted(set(ours) - set(theirs))} too much, lacks {sorted(set(theirs) - set(ours))}, {len(ours)} in all"
