"""Read run directories for reports: configs, logged metrics and results of suites."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from difftx.config import Config
from difftx.errors import UserError, printable
from difftx.files import matching_folders
from difftx.json_files import read_json
from difftx.model.flops import flops_per_token
from difftx.registry import require_extensions
from difftx.run_files import pulled
from difftx.training.checkpoint.manifest import read_manifest, steps_in
from difftx.training.checkpoint.reading import open_checkpoint
from difftx.training.metrics import read_metrics
from difftx.training.run import read_config, read_run_manifest

Metric = Literal["loss", "bits_per_byte"]
METRIC_UNITS: dict[Metric, str] = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
Results = dict[str, dict[int, dict[str, Any]]]  # Suite → step → result, suites and steps in ascending order.
XAxis = Literal["tokens", "flops", "seconds", "steps"]
X_AXES: dict[XAxis, str] = {
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "seconds": "seconds of training",
    "steps": "steps",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of a run directory."""

    name: str  # Short name, unique among the runs read together.
    workdir: Path  # Local folder with the run's small files (`pulled`).
    config: Config  # Config of the newest checkpoint. Fields that do not affect its numbers are from config.json.
    steps: int  # Number of steps in config.json.
    manifest: dict[str, Any]  # Content of manifest.json.
    rows: list[dict[str, Any]]  # Rows of metrics.jsonl.
    results: Results  # Results of all suites, without those in `outdated`.
    outdated: list[tuple[str, int]]  # (Suite, step) of results for weights other than the checkpoint's.

    @property
    def tokens(self) -> int:
        """The number of training tokens up to the last logged step."""
        return self.split("train")[-1]["tokens"]

    def tokens_after(self, steps: Sequence[int]) -> list[float]:
        """Return the number of training tokens after each step. The batch size may change within a run."""
        rows = [{"step": 0, "tokens": 0}, *self.split("train")]
        logged, tokens = ([row[name] for row in rows] for name in ("step", "tokens"))
        later = np.maximum(np.subtract(steps, logged[-1]), 0) * self.config.train.global_batch_tokens
        return (np.interp(steps, logged, tokens) + later).tolist()

    def split(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a split, such as "train", "valid" or "goodput"."""
        return [row for row in self.rows if row["split"] == name]

    def validations(self) -> dict[int, dict[str, Any]]:
        """Return the numbers of each validation by the suite "loss", by ascending step.

        A result of `difftx eval` replaces the row from training, whose settings may be older.
        """
        logged = {row["step"]: row for row in self.split("valid") if row.get("suite") == "loss"}
        results = {step: result["numbers"] for step, result in self.results.get("loss", {}).items()}
        return dict(sorted((logged | results).items()))

    def last_validation(self) -> tuple[int, dict[str, Any]]:
        """Return the step and the numbers of the newest validation. Without one, the step is -1."""
        return next(reversed(self.validations().items()), (-1, {}))

    def last_value(self, number: str) -> float | None:
        """Return a number from the last validation, or None if it is missing or not finite.

        Do not use an earlier finite value, because it would hide that the run has diverged since.
        """
        value = self.last_validation()[1].get(number)
        return value if isinstance(value, int | float) and np.isfinite(value) else None

    def evaluations(self, number: str) -> dict[int, float]:
        """Return a number from each validation that has it, by step. Synthetic tasks have no bits per byte.

        Leave out step 0, because a logarithmic axis cannot show it.
        """
        found = {step: numbers.get(number) for step, numbers in self.validations().items() if step > 0}
        return {step: value for step, value in found.items() if isinstance(value, int | float)}

    def progress(self, steps: Sequence[int]) -> dict[XAxis, list[float]]:
        """Return the value of each quantity in `X_AXES` after each of the given ascending steps.

        FLOPs are model FLOPs, 6 N + 12 L T d_model per token. Seconds only include training steps, not evaluation or
        saving.
        """
        rows = self.split("train")
        logged = np.array([row["step"] for row in rows])
        # A row's `step_seconds` apply to each step since the previous row. The first row has the split "goodput". Its
        # step is where the run started, which is not 0 for a branch of another run.
        start = [row["step"] for row in self.rows[:1] if row["split"] == "goodput"] or [0]
        steps_of_row = np.maximum(np.diff(logged, prepend=start), 0)
        seconds = np.cumsum(steps_of_row * [row["step_seconds"] for row in rows])
        rate = flops_per_token(self.config.model, self.config.data.sequence_length, causal=False)
        tokens = self.tokens_after(steps)
        return {
            "steps": [float(step) for step in steps],
            "tokens": tokens,
            "flops": [rate * count for count in tokens],
            "seconds": np.append(0.0, seconds)[np.searchsorted(logged, steps, side="right")].tolist(),
        }


def match_runs(pattern: str, flag: str) -> list[RunRecord]:
    """Read all folders with a metrics.jsonl that match a glob. `flag` is the command's flag, for error messages."""
    workdirs = matching_folders(f"--{flag}", pattern, "metrics.jsonl")
    if not workdirs:
        raise UserError(f"--{flag}={pattern!r}: no folder with a metrics.jsonl matches; quote the glob, as in 'runs/*'")
    return read_runs(list(map(pulled, workdirs)))


def read_runs(workdirs: Sequence[Path]) -> list[RunRecord]:
    """Read folders from `pulled`. A run is named like its folder, or by its path if two folders share a name."""
    names = [PurePosixPath(printable(str(workdir.resolve()))).name for workdir in workdirs]
    paths = [printable(str(workdir)) for workdir in workdirs]
    names = [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]
    return list(map(_read_run, workdirs, names))


def baselines_first(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Sort Transformers first. Curves and page use the same order, so that a model has the same colour in both."""
    return sorted(runs, key=lambda run: run.config.model.architecture != "transformer")


def check_comparable(runs: Sequence[RunRecord], metric: Metric) -> None:
    """Raise `UserError` if the metric is the loss in nats per token and two runs have different tokenizers."""
    if metric == "loss" and (pair := different_tokenizers(runs)):
        raise UserError(
            f"{pair[0]} and {pair[1]} have different tokenizers, so their losses per token cannot be compared; "
            "use --metric=bits_per_byte"
        )


def different_tokenizers(runs: Sequence[RunRecord]) -> tuple[str, str] | None:
    """Return the names of two runs with different tokenizers, or None if all have the same."""
    first, *others = runs
    other = next(
        (run for run in others if run.manifest["data"]["tokenizer"] != first.manifest["data"]["tokenizer"]), None
    )
    return None if other is None else (first.name, other.name)


def data_content(run: RunRecord) -> dict[str, Any]:
    """Return identifiers for the content of each training source."""
    return {name: value for name, value in run.manifest["data"].items() if name.startswith("source ")}


def data_notes(runs: Sequence[RunRecord]) -> list[str]:
    """Return a note for each way in which the runs' data makes their losses incomparable, with two runs as examples."""
    notes = []
    # With different tokenizers, the same text has different tokens, so contents cannot be compared.
    others = [] if different_tokenizers(runs) else [r for r in runs if data_content(r) != data_content(runs[0])]
    if others:
        notes.append(f"{runs[0].name} and {others[0].name} have other data at data.path or data.sources")
    for field, what in (("data.sequence_length", "tokens per row"), ("eval.loss_tokens", "tokens to validate on")):
        group, name = field.split(".")
        values = {run.name: getattr(getattr(run.config, group), name) for run in runs}
        (first, value), *others = values.items()
        if other := next(((run, changed) for run, changed in others if changed != value), None):
            notes.append(f"{first} and {other[0]} differ in {field}: {value:,} and {other[1]:,} {what}")
    return [f"{note}, so their losses are not comparable" for note in notes]


def _read_results(workdir: Path) -> tuple[Results, list[tuple[str, int]]]:
    """Return the fields `results` and `outdated` of a `RunRecord`."""
    results: Results = {}
    outdated = []

    @functools.cache
    def weights_of_step(step: int) -> str | None:
        with contextlib.suppress(UserError):  # Without a readable checkpoint, nothing is outdated.
            return read_manifest(workdir / "checkpoints" / str(step)).weights

    paths = [path for path in workdir.glob("evals/*/*.json") if re.fullmatch("[0-9]{1,18}", path.stem)]
    for path in sorted(paths, key=lambda path: (path.parent.name, int(path.stem))):
        suite, step, result = path.parent.name, int(path.stem), read_json(path)
        if weights_of_step(step) in (None, result.get("weights")):
            results.setdefault(suite, {})[step] = result
        else:
            outdated.append((suite, step))
    return results, outdated


def _config_of_newest_checkpoint(workdir: Path, run_config: Config, manifest: Mapping[str, Any]) -> Config:
    """Return the config of the newest readable checkpoint. If there is none, return `run_config`, from config.json.

    Raise `UserError` if an extension has changed since that checkpoint, or since the run's `manifest` if there is none.
    """
    for step in reversed(steps_in(workdir / "checkpoints")):
        folder = workdir / "checkpoints" / str(step)
        try:
            checkpoint = read_manifest(folder)
        except UserError:  # `difftx checkpoint verify` reports why.
            continue
        require_extensions(checkpoint.extensions, str(folder))
        with contextlib.suppress(UserError):
            return open_checkpoint(checkpoint, run_config).config
    require_extensions(manifest["extensions"], f"--workdir={workdir}")
    return run_config


def _read_run(workdir: Path, name: str) -> RunRecord:
    run_config, manifest, path = read_config(workdir), read_run_manifest(workdir), workdir / "metrics.jsonl"
    rows = list(read_metrics(path))  # Skips invalid lines, such as a half-written one.
    if not any(row["split"] == "train" for row in rows):
        raise UserError(f"{path}: no training steps in it yet")
    results, outdated = _read_results(workdir)
    return RunRecord(
        name=name,
        workdir=workdir,
        config=_config_of_newest_checkpoint(workdir, run_config, manifest),
        steps=run_config.train.steps,
        manifest=manifest,
        rows=rows,
        results=results,
        outdated=outdated,
    )
