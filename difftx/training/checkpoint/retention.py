"""Select the checkpoints that a run keeps."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from difftx.config import CheckpointConfig
from difftx.errors import UserError
from difftx.files import size_of
from difftx.json_files import read_json
from difftx.training.checkpoint.manifest import Manifest

# How a result was measured: the fields of the config group `eval`, and the fingerprints of the validation sets.
Basis = Mapping[str, Any]
VALID = "validation sets"
ROLLING = "rolling"  # Key in the loader's state that marks the manifest of a rolling checkpoint.


def is_comparable(basis: Basis, other: Basis) -> bool:
    """Return whether two results may be compared: every entry that both bases have is equal."""
    return all(basis[name] == other[name] for name in basis.keys() & other.keys())


def newest_and_every(config: CheckpointConfig, steps: Sequence[int]) -> set[int]:
    """Return the steps that `checkpoint.keep` and `checkpoint.keep_every_steps` keep. `steps` must be ascending."""
    every = config.keep_every_steps
    return {*steps[-config.keep :], *(step for step in steps if every is not None and step % every == 0)}


def steps_to_keep(config: CheckpointConfig, checkpoints: Mapping[int, Manifest], files: Path) -> set[int]:
    """Return the steps whose checkpoints the config keeps. `files` is the folder with the run's small files.

    A rolling checkpoint (`checkpoint.every_minutes`) is kept only while it is the newest one, and does not count
    towards `checkpoint.keep`.

    `checkpoint.keep_best` only compares results with the same validation sets and `eval` fields (`Basis`) as the newest
    checkpoint, because a user may have evaluated on another text.
    """
    steps = sorted(step for step, checkpoint in checkpoints.items() if ROLLING not in checkpoint.loader)
    # A rewind needs a regular checkpoint, so also keep the newest `keep` regular ones.
    regular = [step for step in steps if is_regular(checkpoints[step])]
    kept = newest_and_every(config, steps) | {*regular[-config.keep :]}
    if config.keep_best is not None and steps:
        manifest = checkpoints[steps[-1]]
        basis = {**manifest.config["eval"], VALID: manifest.loader.get("valid")}
        found = {step: number_of(files, step, config.keep_best) for step in reversed(steps)}
        numbers = {step: each[0] for step, each in found.items() if each is not None and is_comparable(basis, each[1])}
        if numbers:
            best = min if config.keep_best_mode == "min" else max
            kept.add(best(numbers, key=numbers.__getitem__))  # If several steps are equally good, keep the newest.
    return kept | {max(checkpoints)} if checkpoints else kept


def is_regular(checkpoint: Manifest) -> bool:
    """Return whether a rewind may use a checkpoint: an uninterrupted run would have written it too.

    It is regular if its step is a multiple of `checkpoint.every_steps`, or if a branch began with it. `every_steps` is
    read from the checkpoint, because the run's value may have changed since. Checkpoints written after a signal or at
    the end of training are usually not regular.
    """
    step, every_steps = checkpoint.step, checkpoint.config["checkpoint"]["every_steps"]
    guard = checkpoint.loader.get("guard", {})
    return step == guard.get("first_regular") or step % every_steps == 0


def number_of(files: Path, step: int, name: str) -> tuple[float, Basis] | None:
    """Return a result such as "loss/perplexity" after a step, and its basis.

    Return None if there is no result, or if it is not finite.
    """
    suite, number = name.split("/")
    path = files / "evals" / suite / f"{step}.json"
    if size_of(path) is None:
        return None
    result = read_json(path)
    numbers = result["numbers"]
    if number not in numbers:
        known = ", ".join(numbers) or "none"
        raise UserError(f"checkpoint.keep_best={name!r}: {path} has no number {number!r}; it has {known}")
    value = numbers[number]
    is_finite = isinstance(value, int | float) and math.isfinite(value)
    basis = {**result.get("options", {}).get("eval", {}), VALID: result.get("valid")}
    return (float(value), basis) if is_finite else None
