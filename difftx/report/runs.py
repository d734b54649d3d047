"""Run directories as reports read them: configs, logged metrics and results of suites."""

import contextlib
import dataclasses
import functools
import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from difftx.config import Config
from difftx.errors import UserError, printable
from difftx.files import parse_json_lines, read_file, read_json, require_local
from difftx.model.flops import flops_per_token
from difftx.training.checkpoint.manifest import read_manifest, steps_in
from difftx.training.checkpoint.reading import open_checkpoint
from difftx.training.metrics import read_metrics
from difftx.training.run import read_config

Metric = Literal["loss", "bits_per_byte"]
Results = dict[str, dict[int, dict[str, Any]]]  # Suite → step → result, both ascending.
X_AXES = {"steps": "steps", "tokens": "training tokens", "flops": "training FLOPs", "seconds": "seconds of training"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of a run directory."""

    name: str  # Short name, unique among the runs that are read together.
    workdir: Path
    config: Config  # Model and data of the newest checkpoint; other fields from config.json.
    steps: int  # Steps that the run is configured to train.
    manifest: dict[str, Any]  # Contents of manifest.json.
    rows: list[dict[str, Any]]  # Rows of metrics.jsonl.
    journal: list[dict[str, Any]]  # Entries of journal.jsonl: actions of the guards, each with its step and event.
    skipped: int  # Number of invalid lines in these two files, such as half-written ones.

    @property
    def results(self) -> Results:
        """The results of the suites, without those in `outdated`."""
        return self._results_and_outdated[0]

    @property
    def outdated(self) -> list[tuple[str, int]]:
        """(Suite, step) of each result that was computed with other weights than that step's checkpoint has now."""
        return self._results_and_outdated[1]

    @functools.cached_property
    def _results_and_outdated(self) -> tuple[Results, list[tuple[str, int]]]:
        return _read_results(self.workdir)

    def split(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a split, such as "train", "valid" or "goodput"."""
        return [row for row in self.rows if row["split"] == name]

    def evaluations(self, metric: Metric) -> list[dict[str, Any]]:
        """Return the rows of suite "loss" that have the metric; synthetic tasks have no bits per byte."""
        rows = [row for row in self.split("valid") if row.get("suite") == "loss"]
        return [row for row in rows if isinstance(row.get(metric), int | float)]

    def progress(self, steps: Sequence[int]) -> dict[str, list[float]]:
        """Return the run's progress after each step, for each quantity of `X_AXES`.

        FLOPs are model FLOPs, 6 N + 12 L T d per token. Seconds count training steps, without evaluation and saving.
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
        """Return the seconds of training until each of the steps, which must be ascending.

        A row's `step_seconds` holds for all steps since the row before it.
        """
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
    """Read the run directories that match a glob, in the order of their names.

    Args:
        pattern: Glob. Directories without a metrics.jsonl are ignored.
        flag: Name of the flag that gives the glob, for messages.

    Raises:
        UserError: No run matches, or a run has no config or no training steps.
    """
    require_local(f"--{flag}", pattern)
    workdirs = [Path(name) for name in sorted(glob.glob(pattern)) if (Path(name) / "metrics.jsonl").exists()]
    if not workdirs:
        raise UserError(f"--{flag}={pattern!r}: no folder with a metrics.jsonl matches; quote the glob, as in 'runs/*'")
    return read_runs(workdirs)


def read_runs(workdirs: Sequence[Path]) -> list[RunRecord]:
    """Read run directories, and print how many invalid lines of their metrics are skipped.

    Raises:
        UserError: A directory is not a run, or has no training steps.
    """
    return [_read_run(workdir, name) for workdir, name in zip(workdirs, _unique_names(workdirs), strict=True)]


def check_comparable(runs: Sequence[RunRecord], metric: Metric) -> None:
    """Raise `UserError` if the metric is the loss in nats per token and two runs have different tokenizers."""
    if metric == "loss" and (pair := different_tokenizers(runs)):
        raise UserError(
            f"{pair[0]} and {pair[1]} have different tokenizers, so their losses per token cannot be compared; "
            "use --metric=bits_per_byte"
        )


def different_tokenizers(runs: Sequence[RunRecord]) -> tuple[str, str] | None:
    """Return the names of two runs with different tokenizers, or None if all are the same."""
    prints = [run.manifest.get("data", {}).get("tokenizer") for run in runs]
    if None in prints:  # Without a manifest, only the tokenizers' names can be compared.
        prints = [run.config.data.tokenizer for run in runs]
    for run, fingerprint in zip(runs, prints, strict=True):
        if fingerprint != prints[0]:
            return runs[0].name, run.name
    return None


def printable_json(value: Any) -> Any:
    """Return a JSON value with `printable` applied to all strings, including the names of fields."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_json(item) for item in value]
    if isinstance(value, dict):
        return {printable(name): printable_json(item) for name, item in value.items()}
    return value


def _read_results(workdir: Path) -> tuple[Results, list[tuple[str, int]]]:
    """Read all `<workdir>/evals/<suite>/<step>.json`; return `RunRecord.results` and `RunRecord.outdated`.

    Raises:
        UserError: A file is not a suite's result.
    """
    results: Results = {}
    outdated = []
    weights_of_step = functools.cache(lambda step: _weights(workdir, step))
    paths = [path for path in workdir.glob("evals/*/*.json") if re.fullmatch("[0-9]{1,18}", path.stem)]
    for path in sorted(paths, key=lambda path: (path.parent.name, int(path.stem))):
        suite, step = path.parent.name, int(path.stem)
        result = printable_json(read_json(path))
        if not isinstance(result, dict) or not isinstance(result.get("numbers"), dict):
            raise UserError(f"{path}: not the result of a suite, it has no numbers; delete it, or run the suite again")
        if weights_of_step(step) in (None, result.get("weights")):
            results.setdefault(suite, {})[step] = result
        else:
            outdated.append((suite, step))
    return results, outdated


def _weights(workdir: Path, step: int) -> str | None:
    """Return the identifier of the parameters in a step's checkpoint, or None if no readable checkpoint exists."""
    try:
        return read_manifest(workdir / "checkpoints" / str(step)).weights
    except UserError:
        return None


def _config_of_newest_checkpoint(workdir: Path, now: Config) -> Config:
    """Return the config of the newest readable checkpoint, or `now`, the config in config.json, if there is none.

    The two may differ, because a restart with another config writes config.json before its first checkpoint.
    """
    folder = workdir / "checkpoints"
    for step in reversed(steps_in(folder)):
        with contextlib.suppress(UserError):  # `difftx checkpoint verify` reports the reason.
            return open_checkpoint(folder / str(step), now).config
    return now


def _read_run(workdir: Path, name: str) -> RunRecord:
    now, path = read_config(workdir), workdir / "metrics.jsonl"
    config = _config_of_newest_checkpoint(workdir, now)
    rows, skipped = read_metrics(path)
    if skipped:
        print(printable(f"{path}: skipped {skipped} lines that are not metrics"))
    if not any(row["split"] == "train" for row in rows):
        raise UserError(f"{path}: no training steps in it yet")
    content = read_file(workdir / "journal.jsonl") or b""
    entries = parse_json_lines(content, {"step": int, "event": object})
    return RunRecord(
        name=name,
        workdir=workdir,
        config=config,
        steps=now.train.steps,
        manifest=_read_manifest(workdir),
        rows=[row if row["split"] == "train" else printable_json(row) for row in rows],
        journal=printable_json([entry for entry in entries if entry is not None]),
        skipped=skipped + entries.count(None),
    )


def _read_manifest(workdir: Path) -> dict[str, Any]:
    path = workdir / "manifest.json"
    manifest = printable_json(read_json(path)) if path.exists() else {}
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(k, {}), dict) for k in ("data", "devices")):
        raise UserError(f"{path}: not the description of a run; delete it, and training writes it again")
    return manifest


def _unique_names(workdirs: Sequence[Path]) -> list[str]:
    """Return the name of each folder, or its whole path if two folders have the same name."""
    names = [printable(workdir.resolve().name) for workdir in workdirs]
    whole = [printable(str(workdir)) for workdir in workdirs]
    return [name if names.count(name) == 1 else path for name, path in zip(names, whole, strict=True)]
