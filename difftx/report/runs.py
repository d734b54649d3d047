"""Run directories as reports read them: configs, what was logged, what was evaluated."""

import dataclasses
import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from difftx.config import Config
from difftx.errors import UserError
from difftx.files import read_json
from difftx.model.flops import flops_per_token
from difftx.training.metrics import read_metrics
from difftx.training.run import read_config

Metric = Literal["loss", "bits_per_byte"]
X_AXES = {"steps": "steps", "tokens": "training tokens", "flops": "training FLOPs", "seconds": "seconds of training"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run directory holds; `name` is short, and its own among the runs read together."""

    name: str
    workdir: Path
    config: Config
    manifest: dict[str, Any]
    rows: list[dict[str, Any]]  # Of metrics.jsonl.
    journal: list[dict[str, Any]]  # Of journal.jsonl: what the guards did, each with its step and event.
    skipped: int  # Lines of the two that are none, as half-written ones are.

    def split(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a split: "train", "valid", "goodput", "lambda_crossing"."""
        return [row for row in self.rows if row["split"] == name]

    def evaluations(self, metric: Metric) -> list[dict[str, Any]]:
        """Return the validation rows of suite "loss" that have a metric; synthetic tasks have no bits per byte."""
        return [
            row
            for row in self.split("valid")
            if row.get("suite") == "loss" and isinstance(row.get(metric), int | float)
        ]

    def progress(self, steps: Sequence[int]) -> dict[str, list[float]]:
        """Return what the run had spent after each of some steps, for each of `X_AXES`.

        FLOPs are the model's, 6 N + 12 L T d a token; seconds those of the steps, without evaluation and saving.
        """
        model, length = self.config.model, self.config.data.sequence_length
        tokens = [float(step * self.config.train.global_batch_tokens) for step in steps]
        rate = flops_per_token(model, length, causal=False)
        return {
            "steps": [float(step) for step in steps],
            "tokens": tokens,
            "flops": [rate * count for count in tokens],
            "seconds": self._seconds(steps),
        }

    def _seconds(self, steps: Sequence[int]) -> list[float]:
        """Return the seconds until each of some ascending steps; a row stands for the steps since the row before."""
        seconds, last, found = 0.0, 0, []
        rows = iter([*self.split("train"), None])
        row = next(rows)
        for step in steps:
            while row is not None and row["step"] <= step:
                seconds += row["step_seconds"] * max(row["step"] - last, 0)
                last, row = row["step"], next(rows)
            found.append(seconds)
        return found


def match_runs(pattern: str, flag: str) -> list[RunRecord]:
    """Read the run directories that match a glob, in order of their names.

    Raises:
        UserError: none matches, or one has no config or no training steps.
    """
    workdirs = [Path(name) for name in sorted(glob.glob(pattern)) if (Path(name) / "metrics.jsonl").is_file()]
    if not workdirs:
        raise UserError(f"--{flag}={pattern!r}: no folder with a metrics.jsonl matches; quote the glob, as in 'runs/*'")
    return read_runs(workdirs)


def read_runs(workdirs: Sequence[Path]) -> list[RunRecord]:
    """Read run directories, and say what lines of their metrics were skipped.

    Raises:
        UserError: one is no run, or has no training steps.
    """
    return [_read_run(workdir, name) for workdir, name in zip(workdirs, _names(workdirs), strict=True)]


def check_comparable(runs: Sequence[RunRecord], metric: Metric) -> None:
    """Refuse to compare runs by a loss in nats a token if their tokens are not the same.

    Raises:
        UserError: two runs have different tokenizers, and the metric is not bits per byte.
    """
    if metric == "loss" and (pair := different_tokenizers(runs)):
        raise UserError(
            f"{pair[0]} and {pair[1]} have different tokenizers, so that their losses a token do not compare; "
            "use --metric=bits_per_byte"
        )


def different_tokenizers(runs: Sequence[RunRecord]) -> tuple[str, str] | None:
    """Return the names of two runs with different tokenizers, if there are any."""
    prints = [run.manifest.get("data", {}).get("tokenizer") for run in runs]
    if None in prints:  # No manifest: the name is all there is.
        prints = [run.config.data.tokenizer for run in runs]
    for run, fingerprint in zip(runs, prints, strict=True):
        if fingerprint != prints[0]:
            return runs[0].name, run.name
    return None


def read_results(workdir: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return suite → step → what `<workdir>/evals/<suite>/<step>.json` holds.

    Raises:
        UserError: one of the files is not a suite's result.
    """
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(workdir.glob("evals/*/*.json")):
        if not re.fullmatch("[0-9]{1,18}", path.stem):
            continue
        result = read_json(path)
        if not isinstance(result, dict) or not isinstance(result.get("numbers"), dict):
            raise UserError(f"{path}: not the result of a suite, it has no numbers; delete it, or run the suite again")
        results.setdefault(path.parent.name, {})[int(path.stem)] = result
    return {suite: dict(sorted(steps.items())) for suite, steps in results.items()}


def _read_run(workdir: Path, name: str) -> RunRecord:
    config = read_config(workdir)
    path = workdir / "metrics.jsonl"
    rows, skipped = read_metrics(path) if path.is_file() else ([], 0)
    if skipped:
        print(f"{path}: skipped {skipped} lines that are not metrics")
    if not any(row["split"] == "train" for row in rows):
        raise UserError(f"{path}: no training steps in it yet")
    journal, broken = _read_journal(workdir / "journal.jsonl")
    return RunRecord(
        name=name,
        workdir=workdir,
        config=config,
        manifest=_read_manifest(workdir),
        rows=rows,
        journal=journal,
        skipped=skipped + broken,
    )


def _read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    entries, broken = [], 0
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            entry = None
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and "event" in entry:
            entries.append(entry)
        else:
            broken += 1
    return entries, broken


def _read_manifest(workdir: Path) -> dict[str, Any]:
    path = workdir / "manifest.json"
    manifest = read_json(path) if path.is_file() else {}
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(k, {}), dict) for k in ("data", "devices")):
        raise UserError(f"{path}: not the description of a run; delete it, and training writes it anew")
    return manifest


def _names(workdirs: Sequence[Path]) -> list[str]:
    """Return the folders' names; whole paths where two folders have one name."""
    names = [workdir.resolve().name for workdir in workdirs]
    return [name if names.count(name) == 1 else str(workdir) for name, workdir in zip(names, workdirs, strict=True)]
