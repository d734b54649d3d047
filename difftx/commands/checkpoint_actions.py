"""Actions of `difftx checkpoint`: list, verify, compare and delete the checkpoints of a run."""

import contextlib
import sys
import time

import numpy as np
import rich.console
import rich.markup
import rich.table

from difftx.errors import UnreadableError, UserError, printable
from difftx.files import list_folder
from difftx.json_files import read_json
from difftx.run_files import lock_workdir, pulled
from difftx.storage.paths import AnyPath, path_of
from difftx.training.checkpoint import arrays, manifest, protocol
from difftx.training.checkpoint.restoring import config_of
from difftx.training.checkpoint.retention import steps_to_keep
from difftx.training.resume import changed_fields
from difftx.training.run import read_config

PLAIN_WIDTH = 160  # Width in characters of a table in a file or pipe, enough for the reasons for failures.


def list_checkpoints(folder: AnyPath) -> None:
    """Print a table of all steps, including quarantined checkpoints."""
    table = rich.table.Table()
    for title, justify in (("step", "right"), ("size", "right"), ("state", "left")):
        table.add_column(title, justify=justify, overflow="fold")
    quarantined = manifest.quarantined_in(folder)
    others = {path.parent for path in quarantined} - {folder / str(step) for step in manifest.steps_in(folder)}
    states = {path: _problem(path, content=False) for path in manifest.step_folders(folder) if path not in others}
    for path, why in (states | dict.fromkeys(quarantined, "quarantined")).items():
        cells = _name(path), _size(path), "sizes match" if why is None else str(why)
        table.add_row(*(rich.markup.escape(printable(cell)) for cell in cells))
    rich.console.Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(table)


def verify(folder: AnyPath) -> None:
    """Compare the checksums of all checkpoints and print the results. Raise an error if a checkpoint is invalid."""
    steps, corrupt, unreadable = manifest.steps_in(folder), [], []
    for step in steps:
        began = time.perf_counter()
        why = _problem(folder / str(step), content=True)
        found = why or f"every checksum is right ({time.perf_counter() - began:.1f} s)"
        print(printable(f"{step}: {found}"), flush=True)
        if why is not None:
            (unreadable if isinstance(why, UnreadableError) else corrupt).append(str(step))
    if corrupt:
        raise UserError(f"{folder}: {len(corrupt)} of {len(steps)} checkpoints do not verify: {', '.join(corrupt)}")
    if unreadable:
        names = ", ".join(unreadable)
        raise UnreadableError(f"{folder}: {len(unreadable)} of {len(steps)} checkpoints cannot be read: {names}")


def diff(a: AnyPath, b: AnyPath, values: bool) -> None:
    """Print how two checkpoints differ in config, names, shapes and dtypes, and optionally in `values`."""
    for folder in (a, b):
        if why := manifest.why_invalid(folder, content=values):
            raise UserError(f"{folder}: does not verify: {why}")
    before, after = manifest.read_manifest(a), manifest.read_manifest(b)
    lines = [f"config {change}" for change in changed_fields(config_of(before), config_of(after))]
    old, new = before.arrays, after.arrays
    lines += [f"{name}: only in {a}" for name in old if name not in new]
    lines += [f"{name}: only in {b}" for name in new if name not in old]
    common = [name for name in old if name in new]
    changed = [name for name in common if old[name] != new[name]]
    lines += [f"{name}: {old[name][0]} {old[name][1]} → {new[name][0]} {new[name][1]}" for name in changed]
    for name in common if values else ():
        if old[name][0] == new[name][0]:
            folders = (before.contents, after.contents)
            x, y = (np.asarray(arrays.read_part(f, arrays.open_array(f, name)), np.float64) for f in folders)
            norm = np.linalg.norm(y - x)
            if norm > 0 or not np.isfinite(norm):
                norms = f"‖before‖ {np.linalg.norm(x):.4g}, ‖after‖ {np.linalg.norm(y):.4g}"
                lines.append(f"{name}: ‖difference‖ {norm:.4g}, {norms}")
    none = "no difference" if values else "no difference in config, names, shapes and dtypes"
    print(*map(printable, lines or [none]), sep="\n")


def prune(workdir: AnyPath, keep: int | None, yes: bool) -> None:
    """Print quarantined checkpoints, and valid ones that need not be kept. With `yes`, delete them.

    Keep the newest `keep` valid checkpoints, or if `keep` is None, those that the run's config keeps. Keep checkpoints
    that are invalid or cannot be read. If no checkpoint is valid, delete none. With `yes`, raise `UserError` while
    training uses the directory.
    """
    config, folder = read_config(workdir), workdir / "checkpoints"
    takeover = config.multihost.lock_takeover_seconds
    lock = lock_workdir(workdir, takeover, wait_seconds=0) if yes else contextlib.nullcontext()
    with lock as owner:
        reasons = {step: _problem(folder / str(step), content=True) for step in manifest.steps_in(folder)}
        verified = [step for step, why in reasons.items() if why is None]
        for step, why in reasons.items():
            if why is not None:
                print(printable(f"{step}: kept, because it does not verify: {why}"))
        if not verified:
            raise UserError(f"{folder}: no checkpoint verifies, so none is deleted")
        checkpoints = {step: manifest.read_manifest(folder / str(step)) for step in verified}
        kept = set(verified[-keep:]) if keep else steps_to_keep(config.checkpoint, checkpoints, pulled(workdir))
        to_delete = [folder / str(step) for step in verified if step not in kept] + manifest.quarantined_in(folder)
        print(f"kept: {', '.join(map(str, sorted(kept)))}")
        for path in to_delete:
            print(printable(f"{'deleted' if yes else 'would be deleted'}: {_name(path)} ({_size(path)})"))
        if owner is not None:
            for path in to_delete:
                protocol.remove(owner, path)
        elif to_delete:
            print("add --yes to delete")


def _problem(folder: AnyPath, *, content: bool) -> str | UnreadableError | None:
    """Return None if a checkpoint is valid, the error if it cannot be read, or the reason why it is invalid."""
    try:
        return manifest.why_invalid(folder, step=int(folder.name), content=content)
    except UnreadableError as error:
        return error


def find(folder: AnyPath, name: str) -> AnyPath:
    """Return the folder of the checkpoint with the step or path `name`."""
    steps = manifest.steps_in(folder)
    if name.isdecimal() and int(name) in steps:
        return folder / str(int(name))
    if not name.isdecimal() and (names := list_folder(path := path_of("checkpoint", name))):
        if "checkpoints" in names:
            raise UserError(f"{name}: the folder of a run, not of a checkpoint; give {path / 'checkpoints' / 'STEP'}")
        return path
    raise UserError(f"{name!r}: no such checkpoint; {folder} has the steps {', '.join(map(str, steps)) or '(none)'}")


def _name(path: AnyPath) -> str:
    """Return the name of a checkpoint for a table. For a quarantined one, this includes the step."""
    return f"{path.parent.name}/{path.name}" if manifest.QUARANTINED.fullmatch(path.name) else path.name


def _size(path: AnyPath) -> str:
    """Return the total size of the files in a checkpoint's manifest."""
    path = path if manifest.QUARANTINED.fullmatch(path.name) else path / manifest.MANIFEST
    try:
        size = sum(file["bytes"] for file in read_json(path)["files"].values())
    except (UserError, UnreadableError, OSError, LookupError, TypeError, AttributeError):
        return "of unknown size"
    return f"{size / 2**20:,.1f} MiB"
