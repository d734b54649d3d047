"""The protocol of saves, quarantines and removals of checkpoints, on disks and in buckets (docs/storage_protocol.md).

The files of each save lie in a folder of their own below the step's folder, so that the late writes of a process that
has lost the run cannot change a checkpoint. `manifest.json` in the step's folder names this folder. It is written last,
and deleted first. Only the owner of a run may call these functions, except `quarantine`.
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
    """A save of one checkpoint by all processes."""

    def __init__(self, owner: Owner, folder: AnyPath, contents: str, state: Any, seconds: float):
        """Prepare a save. `contents` is a name that no other save has, and that all processes know.

        `seconds` is the timeout of each phase. `state` may be donated once `copied` is set.
        """
        self._owner, self._folder, self._contents, self._seconds = owner, folder, contents, seconds
        self._state = state
        self.copied = threading.Event()
        self._generation: bytes | None = None  # The generation of the note.
        self._may_exist = False  # Whether the manifest may have been written.

    def write(self, describe: Callable[[dict[str, Any]], str]) -> None:
        """Write the arrays, and the text of the manifest that `describe` returns for the entries of all files.

        All processes must call this method, in a thread or not. It raises an error in all of them if one of them fails.
        """
        folder = self._folder / self._contents

        def write_arrays() -> dict[str, Any]:
            wait = arrays.start_write(folder, self._state)
            self._state = None
            self.copied.set()
            wait()
            # If the store lists no checksums, each process reads back the files that it has written.
            part = arrays.own_part(folder)
            return {f"{part}/{name}": entry for name, entry in describe_files(folder / part).items()}

        def commit(written: list[dict[str, Any]]) -> None:
            if is_primary():
                arrays.merge(folder)
                known = {name: entry for entries in written for name, entry in entries.items()}
                self._commit(describe(describe_files(folder, known)))

        try:
            # The other processes wait for the note, without which nobody would delete their files after a crash.
            exchange(f"{self._contents}, note", lambda: self._begin() if is_primary() else None, self._seconds)
            written = exchange(f"{self._contents}, files", write_arrays, self._seconds)
            exchange(f"{self._contents}, manifest", lambda: commit(written), self._seconds)
        except Exception:
            if is_primary() and self._generation is not None and not self._may_exist:
                # Free the space, which may be missing for the next save. Otherwise a later start deletes the files.
                with contextlib.suppress(OSError, UserError, UnreadableError, RunError):
                    _clear(self._owner, self._folder, self._generation)
            raise
        finally:
            self._state = None
            self.copied.set()

    def _begin(self) -> None:
        path = self._folder / MANIFEST
        found = stored(path)  # Read before the check of `write_if`, so that it is not that of the next owner.
        self._generation = self._owner.write_if(path, note(self._contents), None if found is None else found.generation)
        if self._generation is None:
            raise RunError(f"{self._folder}: another process saves this checkpoint")

    def _commit(self, manifest: str) -> None:
        self._owner.push()  # A run that resumes from this checkpoint keeps the rows and results before it.
        self._owner.check()  # If it fails, the manifest does not exist.
        self._may_exist = True
        if self._owner.write_if(self._folder / MANIFEST, manifest.encode(), self._generation) is None:
            raise RunError(f"{self._folder}: another process has taken over this run, so the checkpoint was not saved")


def amend(owner: Owner, folder: AnyPath, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Commit a checkpoint again, with the same arrays, and the state of loader and guard that `change` returns."""
    path = folder / MANIFEST
    found, content = stored(path), without_sha256(read_json(path))
    if content is None or found is None:
        raise RunError(f"{folder}: the checkpoint does not verify any more")
    text = json.dumps(with_sha256(content | {"loader": change(content["loader"])}), indent=1) + "\n"
    if owner.write_if(path, text.encode(), found.generation) is None:
        raise RunError(f"{folder}: another process has taken over this run")


def quarantine(owner: Owner, folder: AnyPath) -> AnyPath:
    """Rename the manifest of a step, so that no command uses the checkpoint, and return its path. The files stay."""
    path = folder / f"quarantined-{uuid.uuid4().hex}.json"
    if is_bucket(folder):
        found = stored(folder / MANIFEST)
        owner.write_if(path, read_file(folder / MANIFEST) or b"", None)
        if found is not None:
            owner.delete_if(folder / MANIFEST, found.generation)
        return path
    owner.check()
    (folder / MANIFEST).rename(path)  # A manifest that cannot be read can be renamed.
    return path


def remove(owner: Owner, path: AnyPath) -> None:
    """Delete the checkpoint in a step's folder, or the quarantined one of a manifest of `quarantined_in`.

    Of a folder behind a link, only delete the link.
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
    """Delete what unfinished saves and removals in a run's `checkpoints` have left, and return the names of the steps.

    Not during a save.
    """
    removed = []
    for step in step_folders(folder):
        with contextlib.suppress(UnreadableError):  # Reading the checkpoint raises it again.
            if _remove_leftovers(owner, step):
                removed.append(step.name)
    return removed


def _remove_leftovers(owner: Owner, folder: AnyPath) -> bool:
    """Return whether something was deleted."""
    found = stored(folder / MANIFEST)
    if found is not None and is_note(found.content):
        return _clear(owner, folder, found.generation)
    # Without a manifest, somebody has deleted it, or a former owner of a run in a bucket has written late.
    if found is None or not (names := unreferenced(folder)):
        return False
    owner.check()
    _delete(folder, names)
    return True


def _clear(owner: Owner, folder: AnyPath, generation: bytes | None) -> bool:
    """Delete all files in a step's folder but those of quarantined checkpoints, then the folder if it is empty.

    Do nothing, and return False, if the manifest no longer has the generation, because another process writes here.
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
        with contextlib.suppress(OSError):  # Other checkpoints are there.
            folder.rmdir()


def _delete(folder: AnyPath, names: Iterable[str]) -> None:
    """Delete files, and folders with all files, in a step's folder."""
    names = set(names)
    if is_bucket(folder):
        found = describe_below(folder) if names else ()
        objects.delete(folder / name for name in found if name.partition("/")[0] in names)
        return
    for name in names:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(missing_ok=True)
