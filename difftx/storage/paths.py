"""Paths of local files, and of objects in buckets: gs://bucket/name and s3://bucket/name."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from difftx.errors import UserError, import_extra, require_extra

if TYPE_CHECKING:
    from etils import epath
    from typing_extensions import TypeIs

type BucketPath = epath.Path  # `type` does not evaluate it, so `etils` is imported later.
type AnyPath = Path | BucketPath

# Scheme → the library that lists the store, and the extra in pyproject.toml that installs it.
LIBRARIES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}


def path_of(field: str, text: str) -> AnyPath:
    """Convert a path in a flag or field: gs:// and s3:// to an `etils.epath.Path`, local paths to a `pathlib.Path`.

    Raise `UserError` if the path is invalid (see `scheme_of`) or the store's library is not installed.
    """
    scheme = scheme_of(field, text)
    if scheme is not None:
        require_extra(*LIBRARIES[scheme])
        # By default, gcsfs asks a second service for the kind of each bucket, and prints a line if that fails.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        return import_extra("etils.epath", LIBRARIES[scheme][1]).Path(text)
    return Path(text)


def scheme_of(field: str, text: str) -> str | None:
    """Return the scheme of a path in a bucket, or None for a local path.

    Raise `UserError` if the scheme is unknown, or if the bucket or the two slashes are missing.
    """
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)", text)
    if found is None:
        scheme, _, rest = text.partition(":")
        if rest and scheme in LIBRARIES:  # For example gs:bucket, which would be a local folder.
            address = f"{scheme}://{rest.lstrip('/')}"
            raise UserError(f"{field}={text}: write {address} for a bucket, or ./{text} for a file")
        return None
    scheme, bucket = found.groups()
    if scheme not in LIBRARIES:
        raise UserError(f"{field}={text}: stores of type {scheme} are not supported; use gs://, s3:// or a local path")
    if not bucket:
        raise UserError(f"{field}={text}: no bucket is named; write {scheme}://bucket/folder")
    return scheme


def is_bucket(path: AnyPath) -> "TypeIs[epath.Path]":
    """Return whether a path is in a bucket."""
    return not isinstance(path, Path)


def glob_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that tests whether an object's name matches a glob.

    As on local disks, only "**" matches "/", and wildcards do not match names that begin with a dot.
    """
    from fsspec.utils import glob_translate

    matches = re.compile(glob_translate(pattern)).match
    return lambda name: matches(name) is not None and not re.search(r"(^|/)\.", name)
