"""Retention of checkpoints: which ones a run keeps, and how it deletes or quarantines the rest."""

import dataclasses
import datetime
import itertools
import math
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as orbax

from difftx.config import CheckpointConfig
from difftx.errors import RunError, UserError
from difftx.files import list_folder, read_json
from difftx.training.checkpoint.manifest import QUARANTINED

REMOVED = ".removed"
# Names of folders that an interrupted save or removal leaves behind.
LEFTOVER = re.compile(rf"\d+({re.escape(ocp.step.TMP_DIR_SUFFIX)}.*|{re.escape(REMOVED)})")


@dataclasses.dataclass
class Candidate:
    """A checkpoint in the form that orbax's preservation policies expect."""

    step: int
    metrics: dict[str, Any] | None
    time: datetime.datetime = datetime.datetime.min  # Required by orbax; the policies used here ignore it.


def steps_to_keep(config: CheckpointConfig, steps: Sequence[int], workdir: Path) -> set[int]:
    """Return the subset of the verified `steps` that the config keeps, empty only if `steps` is empty."""
    policies: list[orbax.PreservationPolicy] = [orbax.LatestN(config.keep)]
    if config.keep_every_steps is not None:
        policies.append(orbax.EveryNSteps(config.keep_every_steps))
    best = config.keep_best
    if best is not None:
        reverse = config.keep_best_mode == "min"  # Orbax sorts the metrics and takes the last one as the best.
        options = {"reverse": reverse, "n": 1, "keep_checkpoints_without_metrics": False}
        policies.append(orbax.BestN(get_metric_fn=lambda metrics: metrics[best], **options))
    candidates = [Candidate(step, metrics_of(workdir, step, best) if best else None) for step in sorted(steps)]
    if not candidates:
        return set()
    kept = orbax.AnyPreservationPolicy(policies).should_preserve(candidates, context=orbax.PreservationContext())
    # Also keep the newest `config.keep` regular checkpoints, because a rewind uses only these (guards.py).
    regular = [step for step in sorted(steps) if step % config.every_steps == 0][-config.keep :]
    return {candidate.step for candidate, keep in zip(candidates, kept, strict=True) if keep} | set(regular)


def metrics_of(workdir: Path, step: int, name: str) -> dict[str, Any] | None:
    """Return `{name: value}` for a number such as "loss/perplexity" after a step, None if it is absent or not finite.

    Raises:
        UserError: the suite was evaluated, and its file does not contain the number.
    """
    suite, number = name.split("/")
    path = workdir / "evals" / suite / f"{step}.json"
    if not path.exists():
        return None
    result = read_json(path)
    numbers = result.get("numbers") if isinstance(result, dict) else None
    if not isinstance(numbers, dict) or number not in numbers:
        known = ", ".join(numbers) if isinstance(numbers, dict) else "none"
        raise UserError(f"checkpoint.keep_best={name!r}: {path} has no number {number!r}; it has {known}")
    value = numbers[number]
    return {name: float(value)} if isinstance(value, int | float) and math.isfinite(value) else None


def quarantine(folder: Path) -> Path:
    """Quarantine a checkpoint: rename its folder, and return the new path."""
    first = f"{folder.name}{QUARANTINED}"
    names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(2)))
    path = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
    return rename(folder, path)


def rename(folder: Path, to: Path) -> Path:
    """Rename a checkpoint, and return the new path; raise `RunError` if this fails."""
    try:
        return folder.rename(to)
    except OSError as error:
        raise RunError(f"{folder} cannot be renamed {to.name}: {error.strerror}") from error


def quarantine_order(path: Path) -> tuple[int, int]:
    """Return the step of a quarantined checkpoint, -1 if its name has none, and its number among those of the step."""
    found = re.fullmatch(rf"(\d+){re.escape(QUARANTINED)}(?:\.(\d+))?", path.name)
    return (int(found[1]), int(found[2] or 1)) if found else (-1, 0)


def remove(folders: Iterable[Path]) -> None:
    """Delete checkpoints. Rename each one first, so that a kill never leaves a partial checkpoint under a valid name.

    If a checkpoint is a symbolic link, only the link is deleted: the user who moved the files decides about them.
    """
    for folder in folders:
        renamed = folder.with_name(f"{folder.name}{REMOVED}")
        folder.rename(renamed)
        _delete(renamed)


def remove_leftovers(folder: Path) -> list[str]:
    """Delete the folders of interrupted saves and removals, and return their names; print those that remain."""
    removed = []
    for name in sorted(filter(LEFTOVER.fullmatch, list_folder(folder))):
        try:
            _delete(folder / name)
        except OSError as error:
            print(f"{folder / name}: an unfinished save or removal cannot be deleted: {error.strerror}", flush=True)
        else:
            removed.append(name)
    return removed


def _delete(path: Path) -> None:
    if path.is_symlink():
        print(f"{path.name}: the link was deleted; its target {path.resolve()} stays", flush=True)
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
