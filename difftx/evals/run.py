"""Run evaluation suites on a model, write their results, and find stored results to reuse."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from difftx.config import Config
from difftx.config.affects import Effect
from difftx.config.eval import EvalConfig
from difftx.config.fields import entry_type, marks_of, types_of, values_of
from difftx.config.flag import Flag
from difftx.data.sources import may_be_store, text_files
from difftx.data.store import META
from difftx.errors import UserError
from difftx.evals import SUITES
from difftx.evals.evaluation import Evaluation, journal_of
from difftx.evals.result import Result
from difftx.files import open_file, sha256_of, size_of
from difftx.json_files import json_sha256, read_json
from difftx.parallel.multihost import is_primary
from difftx.progress import Work
from difftx.storage.paths import path_of
from difftx.training.checkpoint.manifest import WeightsPart
from difftx.training.checkpoint.reading import Checkpoint
from difftx.training.run import Run

# Entries of `dependencies` to store in a result, so that the report can compare them between two runs.
OPTIONS = ("eval", "extensions", "devices", "revision")
HEADER_BYTES = 2**20  # A large file is identified by its first line, up to this length.


def check_run(run: Run, suites: Sequence[str]) -> None:
    """Raise `UserError` if one of the suites cannot evaluate the run. Do not compute anything."""
    for suite in suites:
        with_inner(run.config, suite)
        SUITES[suite].check(run)


def evaluate(
    run: Run,
    params: Any,
    step: int,
    suites: Sequence[str],
    work: Work | None = None,
    weights: str | None = None,
    checkpoint: Checkpoint | None = None,
) -> dict[str, Result]:
    """Run suites on the parameters of a step, and write each result to `result_path`.

    `weights` is the identifier of `params`, as in `Checkpoint`. `checkpoint` is None during training, because
    parameters are evaluated before they are saved.
    """
    SUITES.check(suites)
    evaluation = Evaluation(run, params, work or Work(enabled=False))
    part = "params" if checkpoint is None else checkpoint.part
    source = {"weights": weights, "checkpoint": checkpoint and checkpoint.manifest.sha256}
    results = {}
    with jax.set_mesh(run.mesh):
        for name in suites:
            path, depends = result_path(run.files, name, step, part), dependencies(run, name)
            digest = json_sha256(depends)
            if is_primary():
                run.owner.check()
                path.parent.mkdir(parents=True, exist_ok=True)
            evaluation.journal = journal_of(path, digest, weights, run.owner)
            results[name] = result = SUITES[name].evaluate(evaluation)
            if not is_primary():
                continue
            options = {option: depends[option] for option in OPTIONS}
            content = {"suite": name, "step": step, "settings": digest, "options": options}
            content |= {"valid": run.data.valid_fingerprints} | source | dataclasses.asdict(result)
            content["measures"] = {number: vars(value) for number, value in result.numbers.items()}
            run.owner.write(path, json.dumps(content, indent=2, default=_as_json) + "\n")
            evaluation.journal.remove()
            run.owner.push()
    return results


def result_path(folder: Path, suite: str, step: int, part: WeightsPart = "params") -> Path:
    """Return the path of a suite's result for a step, as JSON. `part` selects the parameters or their average.

    `folder` is `Run.files`.
    """
    return folder / "evals" / suite / (f"{step}.json" if part == "params" else f"{step}.{part}.json")


def stored_result(run: Run, suite: str, step: int, part: WeightsPart = "params") -> dict[str, Any] | None:
    """Return a stored result as JSON, or None if there is none or it was computed with other settings."""
    path = result_path(run.files, suite, step, part)
    if size_of(path) is None:
        return None
    content = read_json(path)
    return content if content.get("settings") == json_sha256(dependencies(run, suite)) else None


def dependencies(run: Run, suite: str) -> dict[str, Any]:
    """Return everything that a suite's result depends on, except the parameters, as JSON."""
    config = run.config
    suites = with_inner(config, suite)
    devices = [run.mesh.devices.flat[0].device_kind, dict(run.mesh.shape), run.microbatch_rows]
    return {
        "suite": suite,
        "eval": with_contents(EvalConfig, values_of(config.eval), fields_of(config, suite)),
        "model": values_of(config.model),
        "data": run.data.signature,
        "valid": run.data.valid_fingerprints,
        "seed": config.train.seed,
        "extensions": [extension.sha256 for name in suites if (extension := SUITES.extension_of(name))],
        "revision": sum(SUITES[name].revision for name in suites),  # Revisions only increase.
        "devices": devices if SUITES[suite].measures_device else None,
    }


def with_contents(group: type, values: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a config group that affect results. Replace paths by a hash of the files' contents."""
    found = {}
    for name in fields:
        kind, value = types_of(group)[name], values[name]
        marks = marks_of(kind)
        if Effect.NOTHING in marks:
            continue
        if value is not None and Flag.LOCATION in marks:
            value = _content(value, is_large=Flag.HEADER in marks)
        elif dataclasses.is_dataclass(kind):
            value = with_contents(kind, value, value)
        elif entry := entry_type(kind):
            value = [with_contents(entry, item, item) for item in value]
        found[name] = value
    return found


def _content(path: str, *, is_large: bool) -> Any:
    """Return an identifier for the content of a file, glob, folder or store.

    If it cannot be read, return the path, and let the suite's `check` report the error.
    """
    try:
        root = path_of("path", path)
        if is_large:
            with open_file(root) as file:
                return json_sha256(file.readline(HEADER_BYTES).decode(errors="replace"))
        if not may_be_store(root):
            # Include the suffix, because readers choose the format by it.
            return [sha256_of(file) + file.suffix for file in text_files(path)]
        if size_of(root / META) is not None:  # It has the hashes of the store's other files.
            return sha256_of(root / META)
        files = [file for file in Path(path).rglob("*") if file.is_file() and file.parent.name != "__pycache__"]
        return {str(file.relative_to(path)): sha256_of(file) for file in sorted(files)}
    except (OSError, UserError):
        return path


def settings_sha256_by_suite(run: Run, suites: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of each suite's `dependencies`, by a name for messages. It changes when files change."""
    return {f"settings and files of suite {suite}": json_sha256(dependencies(run, suite)) for suite in suites}


def fields_of(config: Config, suite: str) -> tuple[str, ...]:
    """Return the fields of the config group `eval` that affect a suite's result."""
    names = with_inner(config, suite)
    read = {field for name in names for field in SUITES[name].reads}
    return tuple(
        field
        for field in types_of(EvalConfig)
        if field in read or any(field == name or field.startswith(f"{name}_") for name in names)
    )


def with_inner(config: Config, suite: str) -> tuple[str, ...]:
    """Return the names of a suite and of the suites that it runs, as `quantize` does."""
    return (suite, *SUITES[suite].inner(config))


def _as_json(value: Any) -> Any:
    """Convert a NumPy or JAX array or scalar to Python values for `json`."""
    if not hasattr(value, "tolist"):
        raise UserError(f"details or charts of a suite contain {value!r}, which is not JSON; convert it in the suite")
    return value.tolist()
