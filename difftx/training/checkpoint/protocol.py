"""Save, quarantine and remove checkpoints safely, on disks and in buckets (docs/storage_protocol.md).

Each save writes its files into a new folder inside the step's folder. If a process has lost its run and still writes,
it cannot change a checkpoint of the new owner. `manifest.json` in the step's folder names the folder of the save. It is
written last and deleted first. Except for `quarantine`, only the owner of a run may call these functions.
"""

import contextlib
import json
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from difftx.errors import RunError, UnreadableError, UserError
from difftx.files import Owner, describe_below, read_file, remove_file, stored
from difftx.json_files import read_json, with_sha256, without_sha256
from difftx.parallel.multihost import exchange, is_primary
from difftx.storage import objects
from difftx.storage.paths import AnyPath, is_bucket
from difftx.training.checkpoint import arrays
from difftx.training.checkpoint.manifest import (
    MANIFEST,
    QUARANTINED,
    describe_files,
    is_note,
    note,
    step_folders,
    unreferenced,
)


class Save:
    """A save of one checkpoint, in which all processes take part."""

    def __init__(self, owner: Owner, folder: AnyPath, contents: str, state: Any, seconds: float):
        """Prepare a save of `state` into the folder `contents`, a new name that is the same in all processes.

        `seconds` is the timeout of each phase. `state` may be donated once `copied` is set.
        """
        self._owner, self._folder, self._contents, self._seconds = owner, folder, contents, seconds
        self._state = state
        self.copied = threading.Event()
        self._generation: bytes | None = None  # Storage generation of the note.
        self._may_exist = False  # Whether the manifest may have been written.

    def write(self, describe: Callable[[dict[str, Any]], str]) -> None:
        """Write the arrays, then the manifest: the text that `describe` returns for the entries of all files.

        All processes must call this method, from any thread. If one process fails, the method raises an error in all.
        """
        folder = self._folder / self._contents

        def write_arrays() -> dict[str, Any]:
            wait = arrays.start_write(folder, self._state)
            self._state = None
            self.copied.set()
            wait()
            # If the store lists no checksums, each process reads its own files back to compute them.
            part = arrays.own_part(folder)
            return {f"{part}/{name}": entry for name, entry in describe_files(folder / part).items()}

        def commit(written: list[dict[str, Any]]) -> None:
            if is_primary():
                arrays.merge(folder)
                known = {name: entry for entries in written for name, entry in entries.items()}
                self._commit(describe(describe_files(folder, known)))

        try:
            # First write the note, and let all processes wait for it. Without it, files left by a crash would never be
            # deleted.
            exchange(f"{self._contents}, note", lambda: self._begin() if is_primary() else None, self._seconds)
            written = exchange(f"{self._contents}, files", write_arrays, self._seconds)
            exchange(f"{self._contents}, manifest", lambda: commit(written), self._seconds)
        except Exception:
            if is_primary() and self._generation is not None and not self._may_exist:
                # Free the space now, because the next save may need it. If this fails, the next start of the run
                # deletes the files.
                with contextlib.suppress(OSError, UserError, UnreadableError, RunError):
                    _clear(self._owner, self._folder, self._generation)
            raise
        finally:
            self._state = None
            self.copied.set()

    def _begin(self) -> None:
        path = self._folder / MANIFEST
        # Read this before `write_if` checks the ownership. A later read could return the note of a new owner.
        found = stored(path)
        self._generation = self._owner.write_if(path, note(self._contents), None if found is None else found.generation)
        if self._generation is None:
            raise RunError(f"{self._folder}: another process saves this checkpoint")

    def _commit(self, manifest: str) -> None:
        self._owner.push()  # Upload metrics and results first: a run that resumes from this checkpoint needs them.
        self._owner.check()  # If this raises an error, no manifest has been written.
        self._may_exist = True
        if self._owner.write_if(self._folder / MANIFEST, manifest.encode(), self._generation) is None:
            raise RunError(f"{self._folder}: another process has taken over this run, so the checkpoint was not saved")


def amend(owner: Owner, folder: AnyPath, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Commit a checkpoint again with the same arrays, but with the loader and guard state that `change` returns."""
    path = folder / MANIFEST
    found, content = stored(path), without_sha256(read_json(path))
    if content is None or found is None:
        raise RunError(f"{folder}: the checkpoint does not verify any more")
    text = json.dumps(with_sha256(content | {"loader": change(content["loader"])}), indent=1) + "\n"
    if owner.write_if(path, text.encode(), found.generation) is None:
        raise RunError(f"{folder}: another process has taken over this run")


def quarantine(owner: Owner, folder: AnyPath) -> AnyPath:
    """Rename the manifest of a step, so that no command uses the checkpoint. Return the new path. The files stay."""
    path = folder / f"quarantined-{uuid.uuid4().hex}.json"
    if is_bucket(folder):
        found = stored(folder / MANIFEST)
        owner.write_if(path, read_file(folder / MANIFEST) or b"", None)
        if found is not None:
            owner.delete_if(folder / MANIFEST, found.generation)
        return path
    owner.check()
    (folder / MANIFEST).rename(path)  # Renaming also works for a manifest that cannot be read.
    return path


def remove(owner: Owner, path: AnyPath) -> None:
    """Delete a checkpoint, given its step's folder, or its manifest if it is quarantined.

    If the folder is a symbolic link, delete only the link.
    """
    if QUARANTINED.fullmatch(path.name):
        owner.check()
        remove_file(path)
        _delete(path.parent, unreferenced(path.parent))
        _remove_if_empty(path.parent)
    elif not is_bucket(path) and path.is_symlink():
        owner.check()
        print(f"{path.name}: the link is deleted; its target {path.resolve()} stays", flush=True)
        path.unlink()
    else:
        found = stored(path / MANIFEST)
        _clear(owner, path, None if found is None else found.generation)


def remove_leftovers(owner: Owner, folder: AnyPath) -> list[str]:
    """Delete the files of unfinished saves and removals in a run's `checkpoints` folder. Return the steps' names.

    Do not call this during a save.
    """
    removed = []
    for step in step_folders(folder):
        with contextlib.suppress(UnreadableError):  # Reading the checkpoint later raises the error again.
            if _remove_leftovers(owner, step):
                removed.append(step.name)
    return removed


def _remove_leftovers(owner: Owner, folder: AnyPath) -> bool:
    """Delete the leftovers in one step's folder, and return whether there were any."""
    found = stored(folder / MANIFEST)
    if found is not None and is_note(found.content):
        return _clear(owner, folder, found.generation)
    # There is no note. If the manifest is missing too, a user deleted it, or a former owner of a run in a bucket wrote
    # late.
    if found is None or not (names := unreferenced(folder)):
        return False
    owner.check()
    _delete(folder, names)
    return True


def _clear(owner: Owner, folder: AnyPath, generation: bytes | None) -> bool:
    """Delete all files in a step's folder except those of quarantined checkpoints, then the folder if it is empty.

    Do nothing and return False if the manifest no longer has `generation`, because then another process writes here.
    """
    generation = owner.write_if(folder / MANIFEST, note(""), generation)
    if generation is None:
        return False
    _delete(folder, unreferenced(folder))
    owner.delete_if(folder / MANIFEST, generation)
    _remove_if_empty(folder)
    return True


def _remove_if_empty(folder: AnyPath) -> None:
    if not is_bucket(folder):
        with contextlib.suppress(OSError):  # The folder still has other checkpoints.
            folder.rmdir()


def _delete(folder: AnyPath, names: Iterable[str]) -> None:
    """Delete the named files and folders in a step's folder."""
    names = set(names)
    if is_bucket(folder):
        found = describe_below(folder) if names else ()
        objects.delete(folder / name for name in found if name.partition("/")[0] in names)
        return
    for name in names:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(missing_ok=True)
