"""Folders that are created completely or not at all, on disks and in buckets."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from difftx.files import remove_temporaries, size_of, temporary_path, upload
from difftx.storage import objects
from difftx.storage.paths import AnyPath, BucketPath, is_bucket


@contextlib.contextmanager
def new_folder(path: AnyPath, last: str, after_each_upload: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Create a folder under a temporary name. At the end of the block, rename it to `path`.

    If the block raises an exception, delete the folder. The next call deletes a folder that a killed process has left.
    For a bucket, the folder is a local temporary folder. At the end of the block, its files are uploaded, the file
    `last` at the end: without it, no command uses the folder. `after_each_upload` is called after each file. A killed
    process leaves objects that the same command replaces. Raise `FileExistsError` if there are others.
    """
    if is_bucket(path):
        with tempfile.TemporaryDirectory(prefix="difftx-") as made:
            yield Path(made)
            _upload_folder(path, Path(made), last, after_each_upload)
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


def is_taken(path: AnyPath, last: str) -> bool:
    """Return whether there is a folder, so that `new_folder` cannot create it."""
    return size_of(path / last) is not None if is_bucket(path) else path.exists()


def _upload_folder(path: BucketPath, source: Path, last: str, after_each_upload: Callable[[], None]) -> None:
    files = {file.relative_to(source).as_posix(): file for file in source.rglob("*") if file.is_file()}
    objects_there = (name for name in objects.describe_below(path) if not name.startswith(objects.PROBE))
    if other := next((name for name in objects_there if name not in files or name == last), None):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path / other))
    content = files.pop(last).read_bytes()
    for name in sorted(files):
        upload(path / name, files[name])
        after_each_upload()
    if objects.write_if(path / last, content, None) is None:
        raise FileExistsError(errno.EEXIST, "Another process has written the same folder", str(path))


def remove_folder(path: AnyPath) -> None:
    """Delete a folder with all files. It may be absent."""
    if is_bucket(path):
        objects.delete(path / name for name in objects.describe_below(path))
    elif path.exists():
        shutil.rmtree(path)
