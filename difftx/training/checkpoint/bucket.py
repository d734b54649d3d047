"""Checkpoints in buckets: saves without renames, quarantine, deletion and leftovers (docs/storage_protocol.md).

The files of each save lie in a folder of their own below the step's folder, so that the late writes of a process that
has lost the lock cannot change a checkpoint. `manifest.json` in the step's folder names this folder.
"""

import contextlib
import json
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from difftx.errors import RunError, UnreadableError, UserError
from difftx.files import Owner, list_folder
from difftx.parallel.multihost import exchange, is_primary
from difftx.storage import objects
from difftx.training.checkpoint import arrays
from difftx.training.checkpoint.manifest import (
    COMMIT_MARKERS,
    MANIFEST,
    QUARANTINED_MANIFEST,
    RESERVED,
    describe_objects,
    is_reservation,
    why_invalid,
)

if TYPE_CHECKING:
    from etils import epath


class Save:
    """A save of one checkpoint by all processes."""

    def __init__(self, folder: "epath.Path", contents: str, state: Any, owner: Owner, seconds: float):
        """Copy the arrays to the host. `contents` is a name that no other save has, and that all processes know.

        `seconds` is the timeout of each phase.
        """
        self._folder, self._contents, self._seconds = folder, contents, seconds
        self._owner = owner
        self._shards = arrays.copy_shards(state)
        self._generation: bytes | None = None  # The generation of the reservation.
        self._may_exist = False  # Whether the manifest may be in the bucket.

    def write(self, records: dict[str, Any], describe: Callable[[dict[str, Any], str], str]) -> None:
        """Write the arrays, the JSON files `records` by path, and the text of the manifest that `describe` returns.

        `describe` gets the entries of all files and the name of their folder. All processes must call this method, in
        a thread or not. It raises an error in all processes if one of them fails.
        """
        folder = self._folder / self._contents

        def write_files() -> dict[str, Any]:
            if is_primary():
                self._reserve()
            arrays.write_shards(folder, self._shards)
            if is_primary():
                for name, value in records.items():
                    objects.write(folder / name, json.dumps(value).encode())
                return {}
            # If the store lists no checksums, each process reads back the files that it has written.
            part = arrays.own_part()
            return {f"{part}/{name}": entry for name, entry in describe_objects(folder / part).items()}

        def commit(described: list[dict[str, Any]]) -> None:
            if not is_primary():
                return
            arrays.merge(folder)
            known = {name: entry for entries in described for name, entry in entries.items()}
            files = {f"{self._contents}/{name}": entry for name, entry in describe_objects(folder, known).items()}
            self._commit(describe(files, self._contents))

        try:
            described = exchange(f"{self._contents}, files", write_files, self._seconds)
            exchange(f"{self._contents}, manifest", lambda: commit(described), self._seconds)
        except Exception:
            if is_primary() and not self._may_exist:
                with contextlib.suppress(UserError, UnreadableError):  # Otherwise a later start deletes the files.
                    objects.delete(folder / name for name in objects.list_below(folder))
            raise
        finally:
            self._shards = {}

    def _reserve(self) -> None:
        path = self._folder / MANIFEST
        # Read before `check`, so that the manifest is not one of the next owner of the lock.
        found = objects.read(path)
        self._owner.check()
        content = json.dumps({RESERVED: self._contents}).encode()
        self._generation = objects.write_if(path, content, None if found is None else found.generation)
        if self._generation is None:
            raise RunError(f"{self._folder}: another process saves this checkpoint")
        _delete_unused(self._folder)

    def _commit(self, manifest: str) -> None:
        self._owner.check()
        self._may_exist = True
        if objects.write_if(self._folder / MANIFEST, manifest.encode(), self._generation) is None:
            raise RunError(f"{self._folder}: another process has taken over this run, so the checkpoint was not saved")


def quarantine(folder: "epath.Path", owner: Owner) -> "epath.Path":
    """Move the manifest of a step to an object of another name, and return its path. The files stay."""
    path = folder / f"{QUARANTINED_MANIFEST}{uuid.uuid4().hex}.json"
    found = objects.read(folder / MANIFEST)
    if found is None:
        raise UserError(f"{folder}: no such checkpoint")
    owner.check()
    objects.write(path, found.content)
    objects.delete_if(folder / MANIFEST, found.generation)
    return path


def take_back(path: "epath.Path", owner: Owner, run_id: str | None) -> str | None:
    """Undo a quarantine if the checkpoint verifies. Return None, or why it does not verify."""
    folder, found = path.parent, objects.read(path)
    owner.check()
    generation = None if found is None else objects.write_if(folder / MANIFEST, found.content, None)
    if generation is None:
        return f"{folder} has another checkpoint"
    is_valid = False
    try:
        why = why_invalid(folder, step=int(folder.name), run_id=run_id, content=True)
        is_valid = why is None
    finally:
        if is_valid:
            objects.delete([path])
        else:
            objects.delete_if(folder / MANIFEST, generation)
    return why


def remove(path: "epath.Path", owner: Owner) -> None:
    """Delete a checkpoint, its manifest first. Of a quarantined one, `path` is the manifest, else the step's folder."""
    if path.name.startswith(QUARANTINED_MANIFEST):
        objects.delete([path])
        _delete_unused(path.parent)
        return
    found = objects.read(path / MANIFEST)
    owner.check()
    if found is not None:
        objects.delete_if(path / MANIFEST, found.generation)
    _delete_unused(path)


def remove_leftovers(folder: "epath.Path", owner: Owner) -> list[str]:
    """Delete the reservations, and the files that no manifest refers to. Return the names of the steps' folders.

    Only the owner of the run's lock may call this, and not during a save.
    """
    removed = []
    for name, is_folder in list_folder(folder).items():
        if not is_folder or not name.isdecimal():
            continue
        found = objects.read(folder / name / MANIFEST)
        if is_reserved := found is not None and is_reservation(found.content):
            owner.check()
            objects.delete_if(folder / name / MANIFEST, found.generation)
        if _delete_unused(folder / name) or is_reserved:
            removed.append(name)
    return sorted(removed, key=int)


def _delete_unused(folder: "epath.Path") -> bool:
    """Delete the files in a step's folder that no manifest and no reservation refers to. Return if there were any.

    If a manifest cannot be parsed, nothing is deleted, since it may be the only trace of a corrupt checkpoint.
    """
    # The order of these requests matters, because other processes may write meanwhile. A save writes its reservation
    # before its files, so the manifest is read after the files are listed. A quarantine writes its manifest before it
    # deletes the first one, so quarantined manifests are listed last. An unused file stays unused, because only its own
    # save could commit it.
    names = objects.list_below(folder)
    manifests = [objects.read(folder / MANIFEST)]  # Not from the listing, which would be fatal if it were stale.
    quarantined = [name for name in objects.list_below(folder) if name.startswith(QUARANTINED_MANIFEST)]
    manifests += objects.read_all(folder / name for name in quarantined)
    used = {MANIFEST, *quarantined, *(COMMIT_MARKERS if manifests[0] is not None else ())}
    for found in manifests:
        try:
            content = json.loads(found.content) if found is not None else {}
            used |= {name.partition("/")[0] for name in content.get("files", {})} | {content.get(RESERVED)}
        except (ValueError, TypeError, AttributeError):
            return False
    unused = [name for name in names if name.partition("/")[0] not in used]
    objects.delete(folder / name for name in unused)
    return bool(unused)
