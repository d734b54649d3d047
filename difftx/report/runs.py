"""Run directories as reports read them: configs, what was logged, what was evaluated."""

import contextlib
import dataclasses
import functools
import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from difftx.config import Config
from difftx.errors import UserError, printable
from difftx.files import read_file, read_json, require_local
from difftx.model.flops import flops_per_token
from difftx.training.manifest import read_manifest, steps_in
from difftx.training.metrics import read_metrics
from difftx.training.reading import open_checkpoint
from difftx.training.run import read_config

Metric = Literal["loss", "bits_per_byte"]
X_AXES = {"steps": "steps", "tokens": "training tokens", "flops": "training FLOPs", "seconds": "seconds of training"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run directory holds; `name` is short, and its own among the runs read together."""

    name: str
    workdir: Path
    config: Config  # Model and data of the newest checkpoint; all else of config.json.
    steps: int  # That the training shall have.
    manifest: dict[str, Any]
    rows: list[dict[str, Any]]  # Of metrics.jsonl.
    journal: list[dict[str, Any]]  # Of journal.jsonl: what the guards did, each with its step and event.
    skipped: int  # Lines of the two that are none, as half-written ones are.

    @functools.cached_property
    def results(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Suite → step → result, without those in `outdated`."""
        kept = {
            suite: {step: result for step, result in steps.items() if (suite, step) not in self.outdated}
            for suite, steps in self._all_results.items()
        }
        return {suite: steps for suite, steps in kept.items() if steps}

    @functools.cached_property
    def outdated(self) -> list[tuple[str, int]]:
        """Suite and step of results whose weights are not those of that step's checkpoint."""
        steps = {step for of_suite in self._all_results.values() for step in of_suite}
        weights = {step: _weights_of(self.workdir, step) for step in steps}
        return [
            (suite, step)
            for suite, of_suite in self._all_results.items()
            for step, result in of_suite.items()
            if weights[step] not in (None, result.get("weights"))
        ]

    @functools.cached_property
    def _all_results(self) -> dict[str, dict[int, dict[str, Any]]]:
        return read_results(self.workdir)

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
    require_local(f"--{flag}", pattern)
    workdirs = [Path(name) for name in sorted(glob.glob(pattern)) if (Path(name) / "metrics.jsonl").exists()]
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
        result = printable_json(read_json(path))
        if not isinstance(result, dict) or not isinstance(result.get("numbers"), dict):
            raise UserError(f"{path}: not the result of a suite, it has no numbers; delete it, or run the suite again")
        results.setdefault(path.parent.name, {})[int(path.stem)] = result
    return {suite: dict(sorted(steps.items())) for suite, steps in results.items()}


def printable_json(value: Any) -> Any:
    """Return a JSON value with every text in it, names too, as `printable` returns it."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_json(item) for item in value]
    if isinstance(value, dict):
        return {printable(name): printable_json(item) for name, item in value.items()}
    return value


def _weights_of(workdir: Path, step: int) -> str | None:
    """Return the identity of the parameters in a step's checkpoint; None where there is none that can be read."""
    try:
        return read_manifest(workdir / "checkpoints" / str(step)).weights
    except UserError:
        return None


def _config_of_run(workdir: Path) -> tuple[Config, int]:
    """Return the config of the newest checkpoint, and the steps that the run shall have by its config.json.

    A start with another config writes config.json before there is a checkpoint of it. Without a checkpoint, config.json
    decides everything.
    """
    now = read_config(workdir)
    folder = workdir / "checkpoints"
    for step in reversed(steps_in(folder)):
        with contextlib.suppress(UserError):  # `difftx checkpoint verify` says what is wrong with it.
            return open_checkpoint(folder / str(step), now).config, now.train.steps
    return now, now.train.steps


def _read_run(workdir: Path, name: str) -> RunRecord:
    config, steps = _config_of_run(workdir)
    path = workdir / "metrics.jsonl"
    rows, skipped = read_metrics(path)
    if skipped:
        print(printable(f"{path}: skipped {skipped} lines that are not metrics"))
    if not any(row["split"] == "train" for row in rows):
        raise UserError(f"{path}: no training steps in it yet")
    journal, broken = _read_journal(workdir / "journal.jsonl")
    return RunRecord(
        name=name,
        workdir=workdir,
        config=config,
        steps=steps,
        manifest=_read_manifest(workdir),
        rows=[row if row["split"] == "train" else printable_json(row) for row in rows],
        journal=printable_json(journal),
        skipped=skipped + broken,
    )


def _read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    entries, broken = [], 0
    for line in (read_file(path) or b"").decode(errors="replace").splitlines():
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
    manifest = printable_json(read_json(path)) if path.exists() else {}
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(k, {}), dict) for k in ("data", "devices")):
        raise UserError(f"{path}: not the description of a run; delete it, and training writes it anew")
    return manifest


def _names(workdirs: Sequence[Path]) -> list[str]:
    """Return the folders' names; whole paths where two folders have one name."""
    names = [printable(workdir.resolve().name) for workdir in workdirs]
    whole = [printable(str(workdir)) for workdir in workdirs]
    return [name if names.count(name) == 1 else path for name, path in zip(names, whole, strict=True)]
