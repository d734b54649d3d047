"""Selection of the checkpoints that a run keeps, and deletion and quarantine of checkpoints."""

import dataclasses
import itertools
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from difftx.config import CheckpointConfig
from difftx.errors import RunError, UserError, printable
from difftx.files import UNLOCKED, Owner, list_folder, size_of
from difftx.json_files import read_json, schema_error
from difftx.storage.paths import AnyPath, is_bucket
from difftx.training.checkpoint import bucket
from difftx.training.checkpoint.manifest import (
    CONFIG_FILE,
    LOADER_FILE,
    QUARANTINED,
    QUARANTINED_FOLDER,
    contents_of,
    why_invalid,
)
from difftx.training.checkpoint.restoring import config_values

REMOVED = ".removed"  # Ending of the name of a folder that is being deleted.
# Names of folders that an interrupted save or removal leaves behind.
LEFTOVER = re.compile(rf"\d+({re.escape(ocp.step.TMP_DIR_SUFFIX)}.*|{re.escape(REMOVED)})")


@dataclasses.dataclass(frozen=True)
class Basis:
    """The validation data and the `eval` settings with which a number was measured."""

    valid: Any  # Fingerprint of each validation set, by name.
    fields: Mapping[str, Any]  # Fields of the config group `eval`.

    def is_comparable(self, other: "Basis") -> bool:
        """Return whether nothing shows that two numbers were measured differently."""
        common = self.fields.keys() & other.fields.keys()
        return self.valid == other.valid and all(self.fields[name] == other.fields[name] for name in common)


def steps_to_keep(config: CheckpointConfig, steps: Sequence[int], workdir: AnyPath) -> set[int]:
    """Return those of the `steps` whose checkpoints the config keeps.

    `checkpoint.keep_best` considers only results that are comparable with a reference basis (`Basis`). The reference is
    the newest checkpoint: its validation sets and its fields of `eval`. If no result is comparable with it, the
    reference is the newest result, which is not the first choice, because a user may have evaluated another text.
    """
    newest_first = sorted(steps, reverse=True)
    kept = set(newest_first[: config.keep])
    # A rewind uses only regular checkpoints, so some of them are kept too.
    regular = (step for step in newest_first if is_regular(workdir / "checkpoints" / str(step)))
    kept.update(itertools.islice(regular, config.keep))
    if config.keep_every_steps is not None:
        kept.update(step for step in steps if step % config.keep_every_steps == 0)
    if config.keep_best is not None:
        found = {step: number_of(workdir, step, config.keep_best) for step in newest_first}
        results = {step: result for step, result in found.items() if result is not None}
        if results:
            bases = {step: basis for step, (_, basis) in results.items()}
            files = contents_of(workdir / "checkpoints" / str(newest_first[0]))
            own = Basis(read_json(files / LOADER_FILE).get("valid"), read_json(files / CONFIG_FILE)["eval"])
            basis = own if any(map(own.is_comparable, bases.values())) else next(iter(bases.values()))
            numbers = {step: number for step, (number, _) in results.items() if basis.is_comparable(bases[step])}
            best = min if config.keep_best_mode == "min" else max
            kept.add(best(numbers, key=numbers.__getitem__))  # Among equally good steps, keep the newest one.
    return kept


def is_regular(folder: AnyPath) -> bool:
    """Return whether a rewind may use a checkpoint, because an uninterrupted run would have written it too.

    Its step is a multiple of `checkpoint.every_steps` in its own config, because the run may since have continued with
    another value, or it is the step with which the run began as a branch. A signal and the end of training also write
    other checkpoints. A checkpoint with corrupt JSON files is not regular.
    """
    try:
        every_steps = config_values(folder)["checkpoint"]["every_steps"]
        guard = read_json(contents_of(folder) / LOADER_FILE).get("guard", {})
    except UserError:
        return False
    step = int(folder.name)
    return step == guard.get("first_regular") or (step > 0 and step % every_steps == 0)


def number_of(workdir: AnyPath, step: int, name: str) -> tuple[float, Basis] | None:
    """Return an evaluated number such as "loss/perplexity" after a step, and its basis.

    Return None if there is no result, or if it is corrupt, or if the number is not finite.
    """
    suite, number = name.split("/")
    path = workdir / "evals" / suite / f"{step}.json"
    if size_of(path) is None:
        return None
    try:
        result = read_json(path)
        if why := schema_error(result, {"numbers": dict}):
            raise UserError(f"{path}: {why}")
    except UserError as error:
        print(printable(f"checkpoint.keep_best leaves out a corrupt result: {error}"), flush=True)
        return None
    numbers = result["numbers"]
    if number not in numbers:
        known = ", ".join(numbers) or "none"
        raise UserError(f"checkpoint.keep_best={name!r}: {path} has no number {number!r}; it has {known}")
    value = numbers[number]
    is_finite = isinstance(value, int | float) and math.isfinite(value)
    options = result.get("options")
    fields = options.get("eval") if isinstance(options, dict) else None
    basis = Basis(result.get("valid"), fields if isinstance(fields, dict) else {})
    return (float(value), basis) if is_finite else None


def quarantine(folder: AnyPath, owner: Owner = UNLOCKED) -> AnyPath:
    """Rename a checkpoint's folder so that no command uses the checkpoint, and return the new path.

    In a bucket, rename its manifest.
    """
    if is_bucket(folder):
        return bucket.quarantine(folder, owner)
    owner.check()
    first = f"{folder.name}{QUARANTINED}"
    names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(2)))
    path = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
    return rename(folder, path)


def rename(folder: Path, to: Path) -> Path:
    """Rename a checkpoint, and return the new path. Raise `RunError` if this fails."""
    try:
        return folder.rename(to)
    except OSError as error:
        raise RunError(f"{folder} cannot be renamed {to.name}: {error.strerror}") from error


def take_back(path: AnyPath, step: int, owner: Owner, run_id: str | None) -> str | None:
    """Undo `quarantine` if the checkpoint verifies. Return None, or why it does not verify."""
    if is_bucket(path):
        return bucket.take_back(path, owner, run_id)
    if (why := why_invalid(path, step=step, run_id=run_id, content=True)) is None:
        owner.check()
        rename(path, path.with_name(str(step)))
    return why


def quarantine_order(path: AnyPath) -> tuple[int, int]:
    """Return the step and the number in the name of a quarantined checkpoint of `quarantined_in`."""
    found = QUARANTINED_FOLDER.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 1)) if found else (int(path.parent.name), 0)  # Else in a bucket.


def remove(folders: Iterable[AnyPath], owner: Owner = UNLOCKED) -> None:
    """Delete checkpoints. Rename each one first, so that an interruption leaves no incomplete checkpoint."""
    for folder in folders:
        if is_bucket(folder):
            bucket.remove(folder, owner)
            continue
        owner.check()
        _delete(folder.rename(folder.with_name(f"{folder.name}{REMOVED}")))


def remove_leftovers(folder: AnyPath, owner: Owner) -> list[str]:
    """Delete the folders of interrupted saves and removals, and return the names of the deleted folders."""
    if is_bucket(folder):
        return bucket.remove_leftovers(folder, owner)
    owner.check()
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
