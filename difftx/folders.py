"""Folders that are created completely or not at all, on disks and in buckets (docs/storage_protocol.md), and locks."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from difftx.files import remove_temporaries, size_of, temporary_path, upload
from difftx.json_files import parse_record, schema_error, with_sha256
from difftx.storage import objects
from difftx.storage.paths import AnyPath, BucketPath, is_bucket

FOLDER_MARKER = ".complete"
UPLOAD_RECORD = ".incomplete"  # Names the files of a folder in a bucket, until all of them are uploaded.


@contextlib.contextmanager
def new_folder(path: AnyPath, after_each_upload: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Create a folder under a temporary name. At the end of the block, rename it to `path`.

    If the block raises an exception, delete the folder. The next call deletes a folder that a killed process has left.
    For a bucket, the folder is a local temporary folder. At the end of the block, its files are uploaded, and then the
    record `FOLDER_MARKER` with their sizes. `after_each_upload` is called after each file. A folder without the record
    is incomplete. Raise `FileExistsError` if there are objects that no unfinished call has uploaded.
    """
    if is_bucket(path):
        with tempfile.TemporaryDirectory(prefix="difftx-") as made:
            yield Path(made)
            _upload_folder(path, Path(made), after_each_upload)
        return
    remove_temporaries(path.parent, path.name)
    temporary = temporary_path(path)
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def is_taken(path: AnyPath) -> bool:
    """Return whether `new_folder` cannot create a folder, because there is one, or objects of others in a bucket."""
    return _unfinished_upload(path) is None if is_bucket(path) else path.exists()


def is_complete(path: AnyPath) -> bool:
    """Return whether there is a folder that `new_folder` has created."""
    return size_of(path / FOLDER_MARKER) is not None if is_bucket(path) else path.is_dir()


def _upload_folder(path: BucketPath, source: Path, after_each_upload: Callable[[], None]) -> None:
    sizes = {file.relative_to(source).as_posix(): file.stat().st_size for file in source.rglob("*") if file.is_file()}
    unfinished = _unfinished_upload(path)
    if unfinished is None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    generation, left = unfinished
    record, marker = path / UPLOAD_RECORD, path / FOLDER_MARKER
    generation = objects.write_if(record, _unique_record({"files": sorted({*sizes, *left})}), generation)
    taken = FileExistsError(errno.EEXIST, "Another process writes the same folder", str(path))
    if generation is None:
        raise taken
    objects.delete(path / name for name in left)
    for name in sorted(sizes):
        upload(path / name, source / name)
        after_each_upload()
    is_ours = objects.is_current(record, generation)
    if not is_ours or objects.write_if(marker, _unique_record({"files": sizes}), None) is None:
        raise taken
    objects.delete_if(record, generation)


def _unfinished_upload(path: BucketPath) -> tuple[bytes | None, list[str]] | None:
    """Return the generation of `UPLOAD_RECORD` and the objects that it names, or None if there are others too."""
    found = objects.read(path / UPLOAD_RECORD)
    content = {"files": []} if found is None else parse_record(found.content)
    if content is None or schema_error(content, {"files": [str]}):
        return None
    names = [name for name in objects.list_below(path) if name != UPLOAD_RECORD and not name.startswith(objects.PROBE)]
    if not set(names) <= set(content["files"]):
        return None
    return None if found is None else found.generation, names


def _unique_record(content: dict[str, Any]) -> bytes:
    """Return a record that no other call returns, as `objects.write_if` requires."""
    return json.dumps(with_sha256(content | {"id": uuid.uuid4().hex})).encode()


def remove_folder(path: AnyPath) -> None:
    """Delete a folder with all files. It may be absent. In a bucket, `FOLDER_MARKER` is deleted first."""
    if is_bucket(path):
        objects.delete([path / FOLDER_MARKER])
        objects.delete(path / name for name in objects.list_below(path))
    elif path.exists():
        shutil.rmtree(path)


def lock_file(descriptor: int) -> bool:
    """Lock an open file or folder, or return False without locks there. Another owner raises `BlockingIOError`."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        # Some file systems have no locks, such as Lustre without -o flock. NFS cannot lock folders (EBADF).
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF):
            raise
        return False
