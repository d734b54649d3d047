"""Run evaluation suites on a model, write their results, and find stored results that can be reused."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from difftx.config import Config
from difftx.config.eval import EvalConfig
from difftx.config.fields import types_of, values_of
from difftx.errors import UserError
from difftx.evals import SUITES
from difftx.evals.evaluation import Evaluation, ItemJournal
from difftx.evals.inputs import with_contents
from difftx.evals.result import Result
from difftx.files import size_of
from difftx.json_files import json_sha256, read_json
from difftx.parallel.multihost import is_primary
from difftx.progress import Work
from difftx.training.checkpoint.manifest import WeightsPart
from difftx.training.checkpoint.reading import Checkpoint
from difftx.training.run import Run

# Entries of `dependencies` that a result records, so that the report can compare those of two runs.
OPTIONS = ("eval", "extensions", "devices", "revision")


def check_run(run: Run, suites: Sequence[str]) -> None:
    """Raise `UserError` if one of the suites cannot evaluate the run. Nothing is computed."""
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

    `weights` is the identity of `params`, as in `Checkpoint`. `checkpoint` is None during training, which evaluates the
    parameters before it saves. Raise `RunError`, and do not write the suite's result, if `checkpoint` is deleted or
    replaced during the evaluation.
    """
    SUITES.check(suites)
    evaluation = Evaluation(run, params, work or Work(enabled=False))
    part = "params" if checkpoint is None else checkpoint.part
    source = {"weights": weights, "checkpoint": checkpoint and checkpoint.sha256}
    results = {}
    with jax.set_mesh(run.mesh):
        for name in suites:
            path, depends = result_path(run.files, name, step, part), dependencies(run, name)
            digest = json_sha256(depends)
            if is_primary():
                run.owner.check()
                if link := next((p for p in path.parents[:2] if p.is_symlink()), None):
                    raise UserError(f"{link} is a link, behind which no results are written; move the folder there")
                path.parent.mkdir(parents=True, exist_ok=True)
            evaluation.journal = ItemJournal(path, digest, weights, run.owner)
            results[name] = result = SUITES[name].evaluate(evaluation)
            if checkpoint is not None:
                checkpoint.require_unchanged()
            if not is_primary():
                continue
            options = {option: depends[option] for option in OPTIONS if option in depends}
            if endpoints := _endpoints(run.config, name):
                options["endpoints"] = endpoints
            content = {"suite": name, "step": step, "settings": digest, "options": options}
            content |= {"valid": run.data.valid_fingerprints} | source | dataclasses.asdict(result)
            content["measures"] = {number: vars(value) for number, value in result.numbers.items()}
            run.owner.write(path, json.dumps(content, indent=2, default=_as_json) + "\n")
            evaluation.journal.remove()
            run.owner.push()
    return results


def result_path(folder: Path, suite: str, step: int, part: WeightsPart = "params") -> Path:
    """Return the path of the JSON file with a suite's result for a step's parameters, or for their average.

    `folder` is `Run.files`.
    """
    return folder / "evals" / suite / (f"{step}.json" if part == "params" else f"{step}.{part}.json")


def stored_result(run: Run, suite: str, step: int, part: WeightsPart = "params") -> dict[str, Any] | None:
    """Return the JSON of a stored result, or None if there is none or it was computed with other settings."""
    path = result_path(run.files, suite, step, part)
    if size_of(path) is None:
        return None
    content = read_json(path)
    if not isinstance(content, dict) or content.get("settings") != settings_sha256(run, suite):
        return None
    # `settings_sha256` leaves endpoints out, because a suite may resume with the model's answers and ask another judge.
    options = content.get("options")
    recorded = options.get("endpoints", []) if isinstance(options, dict) else None
    return content if recorded == _endpoints(run.config, suite) else None


def settings_sha256(run: Run, suite: str) -> str:
    """Return the SHA-256 of `dependencies`."""
    return json_sha256(dependencies(run, suite))


def dependencies(run: Run, suite: str) -> dict[str, Any]:
    """Return everything, except the parameters, that a suite's result depends on, as JSON."""
    config = run.config
    settings = with_contents(EvalConfig, values_of(config.eval), fields_of(config, suite))
    depends: dict[str, Any] = {
        "suite": suite,
        "eval": settings,
        "model": values_of(config.model),
        "data": run.data.signature,
        "valid": run.data.valid_fingerprints,
        "seed": config.train.seed,
    }
    suites = with_inner(config, suite)
    if extensions := [extension.sha256 for name in suites if (extension := SUITES.extension_of(name))]:
        depends["extensions"] = extensions
    # Revisions only increase, so their sum changes with each of them.
    if revision := sum(SUITES[name].revision for name in suites):
        depends["revision"] = revision
    if SUITES[suite].measures_device:
        device = run.mesh.devices.flat[0].device_kind
        depends["devices"] = [device, dict(run.mesh.shape), run.microbatch_rows]
    return depends


def settings_sha256_by_suite(run: Run, suites: Sequence[str]) -> dict[str, str]:
    """Return `settings_sha256` of each suite, by a name for messages. Processes with other files have other values."""
    return {f"settings and files of suite {suite}": settings_sha256(run, suite) for suite in suites}


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
    """Return the names of a suite and of the suites that it runs in turn, as suite `quantize` does."""
    return (suite, *SUITES[suite].inner(config))


def _as_json(value: Any) -> Any:
    """Return an array or a scalar of NumPy or JAX, which `json` does not know, as values of Python."""
    if not hasattr(value, "tolist"):
        raise UserError(f"details or charts of a suite contain {value!r}, which is not JSON; convert it in the suite")
    return value.tolist()


def _endpoints(config: Config, suite: str) -> list[str]:
    """Return the addresses of the services that a suite asks."""
    return [address for name in with_inner(config, suite) if (address := SUITES[name].endpoint(config)) is not None]
