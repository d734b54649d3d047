"""Data sets and models of the Hugging Face Hub, at a commit.

`HF_ENDPOINT` names the hub, and `HF_TOKEN` or `hf auth login` the account. The library retries 429, 5xx, lost
connections and timeouts.
"""

import contextlib
import dataclasses
import glob
import io
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from difftx.errors import UnreadableError, UserError, import_extra
from difftx.storage.reading import ObjectReader

SCHEME = "hf://"
REQUEST_BYTES = 4 * 2**20  # Largest part of a file that one request reads.
# References with a slash are names of revisions too. The hub quotes the slash of others as %2F.
ADDRESS = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?")


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file of a data set."""

    repository: str  # ORG/NAME
    commit: str
    path: str
    size: int  # In bytes.
    content: str  # SHA-256, or identifier of the Git blob if the file is small.

    def __str__(self) -> str:
        return f"{SCHEME}datasets/{self.repository}@{self.commit[:12]}/{self.path}"

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.path).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix


def library() -> Any:
    """Import `huggingface_hub`."""
    return import_extra("huggingface_hub", "hub")


def list_files(field: str, pattern: str, commit: str | None) -> list[HubFile]:
    """Return the files of a data set that `hf://datasets/ORG/NAME[@REVISION]/PATTERN` names, sorted by path.

    `commit` replaces the revision. `field` is the flag that has the pattern, for messages.
    """
    where = f"{field}={pattern}"
    if (found := ADDRESS.fullmatch(pattern)) is None:
        raise UserError(f"{where}: write hf://datasets/ORG/NAME@REVISION/PATTERN, such as …/NAME@main/**/*.parquet")
    repository, revision, rest = found[1], urllib.parse.unquote(found[2] or "") or None, (found[3] or "").rstrip("/")
    parts = rest.split("/")
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    api = library().HfApi()
    with explained(where, repository, revision):
        commit = commit or str(api.dataset_info(repository, revision=revision).sha)
        entries = api.list_repo_tree(
            repository, "/".join(parts[:fixed]) or None, recursive=True, revision=commit, repo_type="dataset"
        )
        listed = {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}  # Without folders.
    from fsspec.utils import glob_translate

    patterns = rest if glob.has_magic(rest) else f"{glob.escape(rest)}/**" if rest else "**"
    matches = re.compile(glob_translate(patterns)).match
    # As on local disks, names that begin with a dot are left out.
    chosen = [path for path in sorted(listed) if path == rest or (matches(path) and not re.search(r"(^|/)\.", path))]
    if not chosen:
        raise UserError(f"{where}: no file of commit {commit[:12]} matches; {len(listed)} others are in that folder")
    return [
        HubFile(repository, commit, path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for path, entry in ((path, listed[path]) for path in chosen)
    ]


def open_file(file: HubFile) -> io.RawIOBase:
    """Open a file for reading. Each read sends requests for exactly its bytes."""
    return _HubReader(file)


class _HubReader(ObjectReader):
    """A file of the hub, read by ranges."""

    def __init__(self, file: HubFile):
        super().__init__(file, file.size)
        hub = library()
        self._file, self._utils = file, hub.utils
        self._url = hub.hf_hub_url(file.repository, file.path, repo_type="dataset", revision=file.commit)

    def _read(self, start: int, stop: int) -> bytes:
        headers = self._utils.build_hf_headers() | {"range": f"bytes={start}-{stop - 1}", "accept-encoding": "identity"}
        with explained(str(self._file), self._file.repository, self._file.commit):
            reply = self._utils.http_backoff("GET", self._url, headers=headers, timeout=30)
            self._utils.hf_raise_for_status(reply)
        if (size := len(reply.content)) != stop - start:
            what = f"the hub sent {size:,} bytes in place of bytes {start:,} to {stop:,}"
            raise UnreadableError(f"{self._file} cannot be read: {what}; run the same command again")
        return reply.content


@contextlib.contextmanager
def explained(where: str, repository: str, revision: str | None = None) -> Iterator[None]:
    """Turn the errors of the library into one line. `where` is the flag or the file that is meant."""
    errors = import_extra("huggingface_hub.errors", "hub")
    import httpx2

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise UserError(
            f"{where}: HF_HUB_OFFLINE forbids requests to the hub; unset it, or name a local path"
        ) from error
    except errors.GatedRepoError as error:
        fix = "accept its terms on its page, and log in with `hf auth login`"
        raise UserError(f"{where}: access to {repository} is restricted; {fix}") from error
    except errors.RepositoryNotFoundError as error:
        fix = "check the name; if it is private, log in with `hf auth login`"
        raise UserError(f"{where}: the hub shows no {repository} to this account; {fix}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{where}: {repository} has no revision {revision!r}; name a branch, a tag or a commit"
        ) from error
    except errors.EntryNotFoundError as error:
        raise UserError(f"{where}: {repository} has no such file or folder; check the path") from error
    except errors.HFValidationError as error:
        raise UserError(f"{where}: {error}") from error
    except (httpx2.HTTPError, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if status in (401, 403):
            fix = "log in with `hf auth login`, and give the token access"
            raise UserError(
                f"{where}: this account may not do that with {repository} (HTTP {status}); {fix}"
            ) from error
        cause = f"HTTP {status}" if status else next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UnreadableError(f"{where}: the hub cannot be used ({cause}); run the same command again") from error
