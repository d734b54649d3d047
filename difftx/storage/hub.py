"""Data sets and models on the Hugging Face Hub, at fixed commits.

`HF_ENDPOINT` selects the hub, and `HF_TOKEN` or `hf auth login` the account. The library `huggingface_hub` retries 429,
5xx, lost connections and timeouts.
"""

import contextlib
import dataclasses
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftx.errors import RunError, UnreadableError, UserError, import_extra
from difftx.storage.paths import glob_matcher
from difftx.storage.reading import ObjectReader

SCHEME = "hf://"
AGAIN = "run the same command again"
REQUEST_BYTES = 4 * 2**20  # Largest number of bytes that one request reads.
# Revisions refs/convert/… and refs/pr/… contain slashes. Other revisions must write a slash as %2F.
ADDRESS = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?/(.+)")
LOGIN = "log in with `hf auth login`"


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file in a data set on the hub."""

    repository: str  # ORG/NAME
    commit: str
    path: str
    size: int  # In bytes.
    content: str  # SHA-256 of the content, or the id of the Git blob if the file is small.

    def __str__(self) -> str:
        return f"{SCHEME}datasets/{self.repository}@{self.commit[:12]}/{self.path}"


def library() -> Any:
    """Import and return `huggingface_hub`, which the extra `hub` installs."""
    return import_extra("huggingface_hub", "hub")


def list_files(field: str, pattern: str, commit: str | None) -> list[HubFile]:
    """Return the files that match `hf://datasets/ORG/NAME[@REVISION]/PATTERN`, sorted by path.

    If `commit` is given, it replaces the revision. `field` is the flag with the pattern, for messages.
    """
    where = f"{field}={pattern}"
    if (found := ADDRESS.fullmatch(pattern)) is None:
        raise UserError(f"{where}: write hf://datasets/ORG/NAME@REVISION/PATTERN, such as …/NAME@main/**/*.parquet")
    repository, revision, rest = found[1], urllib.parse.unquote(found[2] or "") or None, found[3]
    folder = re.split(r"[*?[]", rest)[0].rpartition("/")[0]
    api = library().HfApi()
    with explained(where, repository, revision):
        commit = commit or str(api.dataset_info(repository, revision=revision).sha)
        options: Any = {"recursive": True, "revision": commit, "repo_type": "dataset"}
        entries = list(api.list_repo_tree(repository, folder or None, **options))
    matches = glob_matcher(rest)
    files = [
        HubFile(repository, commit, entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in sorted(entries, key=lambda entry: entry.path)
        if hasattr(entry, "blob_id") and matches(entry.path)  # Only files have a `blob_id`.
    ]
    if not files:
        raise UserError(f"{where}: no file of commit {commit[:12]} matches; check the pattern, such as **/*.parquet")
    return files


class HubReader(ObjectReader):
    """A file in a data set, opened for reading. Each read requests exactly the bytes that it returns."""

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
            raise UnreadableError(f"{self._file} cannot be read: {what}; {AGAIN}")
        return reply.content


def download(where: str, repository: str, revision: str | None, patterns: list[str]) -> tuple[Path, str]:
    """Download a model's files to the library's cache. Return their folder and the commit of the revision.

    Raise `UserError` if a file's checksum differs from the checksum that the hub lists.
    """
    hub = library()
    api = hub.HfApi()
    with explained(where, repository, revision):
        commit = str(api.model_info(repository, revision=revision).sha)
        folder = Path(hub.snapshot_download(repository, revision=commit, allow_patterns=patterns))
        wrong = api.verify_repo_checksums(repository, revision=commit, local_dir=folder).mismatches
    if wrong:
        file = (folder / wrong[0]["path"]).resolve()
        raise UserError(f"{where}: {wrong[0]['path']} does not have the hub's checksum; delete {file}, and {AGAIN}")
    return folder, commit


def push(where: str, repository: str, folder: Path) -> str:
    """Upload a folder to a private repository, replace all its files, and compare checksums. Return the address."""
    api = library().HfApi()
    again = f"the folder is complete, so upload only: hf upload {repository} {folder} --private"
    with explained(where, repository, again=again):
        api.create_repo(repository, private=True, exist_ok=True)
        if not api.model_info(repository).private:
            raise UserError(f"{where}: {repository} is public; to publish the folder: hf upload {repository} {folder}")
        # Delete all old files, because files of an earlier push do not belong to this model.
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="difftx convert --push", delete_patterns="*"
        )
        found = api.verify_repo_checksums(repository, revision=commit.oid, local_dir=folder)
    missing = [path for path in found.missing_paths if path != ".gitattributes"]  # The hub creates this file.
    if wrong := [*(each["path"] for each in found.mismatches), *found.extra_paths, *missing]:
        raise RunError(f"{where}: {wrong[0]} is not on the hub as it is in the folder; {again}")
    return f"{api.endpoint}/{repository}/tree/{commit.oid}"


@contextlib.contextmanager
def explained(where: str, repository: str, revision: str | None = None, again: str = AGAIN) -> Iterator[None]:
    """Convert the library's errors to one-line errors. `where` is the flag or file, and `again` says what to do."""
    errors = import_extra("huggingface_hub.errors", "hub")
    import httpx2

    messages = {
        errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE forbids requests to the hub; unset it, or name a local path",
        errors.GatedRepoError: f"access to {repository} is restricted; accept its terms on its page, and {LOGIN}",
        errors.RepositoryNotFoundError: f"the hub shows no {repository} to this account; check the name, or {LOGIN}",
        errors.RevisionNotFoundError: f"{repository} has no revision {revision!r}; name a branch, a tag or a commit",
        errors.EntryNotFoundError: f"{repository} has no such file or folder; check the path",
    }
    try:
        yield
    except UserError:
        raise
    except (httpx2.HTTPError, OSError, ValueError, errors.EntryNotFoundError) as error:
        message = next((text for kind, text in messages.items() if isinstance(error, kind)), None)
        status = getattr(getattr(error, "response", None), "status_code", None)
        if message is None and status in (401, 403):
            message = f"this account may not do that with {repository} (HTTP {status}); {LOGIN}, and check the token"
        if message is not None or isinstance(error, errors.HFValidationError):
            raise UserError(f"{where}: {message or error}") from error
        cause = f"HTTP {status}" if status else next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UnreadableError(f"{where}: the hub cannot be used ({cause}); {again}") from error
