"""Objects in Google Cloud Storage and S3: reads, conditional writes, listings.

TensorStore reads and writes objects, and fsspec lists and describes them. Both retry 429, 5xx, lost connections and
timeouts. Functions return None for an absent object. They raise `UserError` if the credentials or the bucket are wrong,
and `UnreadableError` if all retries fail. A write that raises `UnreadableError` may still have taken place.
"""

import base64
import contextlib
import errno
import functools
import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from difftx.errors import UnreadableError, UserError
from difftx.storage.paths import BucketPath

# TensorStore doubles the delay between retries from 0.2 s to 5 s, with jitter.
RETRIES = {"max_retries": 7, "initial_delay": "200ms", "max_delay": "5s"}
# By default, TensorStore would wait forever for a server that accepts a connection but does not reply.
SILENCE_SECONDS = 15
OPERATION_SECONDS = 180.0  # Timeout of a TensorStore request, including retries.
REREAD_SECONDS = (0.2, 0.8, 2.0)  # Pauses before reading again, if size or checksum do not match.
CONCURRENT = 32  # Largest number of simultaneous requests.
PROBE = ".difftx-probe-"  # Prefix of objects that test the store. A killed process may leave one behind.
# Patterns for parts of TensorStore's error messages. Never show the body, which may contain a session token.
STATUS = re.compile(r"\[http_response_code='(\d+)'\]")
BODY = re.compile(r" ?\[http_response_body='(?:[^'\\]|\\.)*'\]", re.DOTALL)
CODES = re.compile(r"(?:^|: )([A-Za-z_]+)(?=: )")
# S3 error codes for expired credentials (HTTP 400).
EXPIRED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}


class Stored(NamedTuple):
    """The content of an object and its generation in the store."""

    content: bytes
    generation: bytes


class Description(NamedTuple):
    """The properties of an object that a store lists."""

    size: int  # In bytes.
    crc32c: int | None  # None if the store has no CRC32C.
    modified: float  # Time of the last write, in seconds since 1970.
    version: str  # Changes whenever the content changes.


def read(path: BucketPath) -> Stored | None:
    """Return an object. The caller must verify the content, because TensorStore compares only its length."""
    found = _from_tensorstore(path, "read", lambda: _bucket_of(path).read(_key(path)))
    return Stored(found.value, found.stamp.generation) if found.state == "value" else None


def read_ranges(path: BucketPath, ranges: Iterable[tuple[int, int]]) -> Iterator[Stored | None]:
    """Read bytes `start` … `stop - 1` of an object for each range, with several requests at a time.

    Yield the results in order. As for `read`, the caller must verify the content, which may be shorter than its range.
    """
    return read_all((path, {"byte_range": slice(*each)}) for each in ranges)


def read_all(requests: Iterable[tuple[BucketPath, dict[str, Any]]]) -> Iterator[Stored | None]:
    """Send read requests (a path and options of TensorStore's `read`) in groups. Yield the results in order."""
    for group in itertools.batched(requests, CONCURRENT):
        futures = [_bucket_of(path).read(_key(path), **options) for path, options in group]
        for (path, _), future in zip(group, futures, strict=True):
            found = _from_tensorstore(path, "read", lambda future=future: future)
            yield Stored(found.value, found.stamp.generation) if found.state == "value" else None


def read_verified(path: BucketPath, described: Description | None = None) -> Stored | None:
    """Read an object and verify its size and CRC32C. Return None if it is absent.

    `described` is the object's description, if the caller has it. Raise `UserError` if `path` is a folder.
    """
    for pause in (*REREAD_SECONDS, None):
        described = described or describe(path)
        if described is None:
            if list_folder(path):
                raise UserError(f"{path} is a folder, not a file; move it away")
            return None
        found = read(path)
        if found is not None and _matches(found.content, described):
            return found
        described = None
        if pause is not None:  # Another process may have replaced the object between the requests.
            time.sleep(pause)
    raise UnreadableError(f"{path} cannot be read: its content does not have the size and CRC32C that the store lists")


def write(path: BucketPath, content: bytes) -> None:
    """Create or replace an object unconditionally."""
    _from_tensorstore(path, "write", lambda: _bucket_of(path).write(_key(path), content))


def write_if(path: BucketPath, content: bytes, generation: bytes | None) -> bytes | None:
    """Replace an object if it has this generation. If `generation` is None, create the object if it is absent.

    Return the new generation, or None if the condition does not hold. `content` must be unique to this call, for
    example by a random id: if the reply to a successful write is lost, the retry finds the condition violated, and only
    the content shows that this call wrote the object.
    """
    condition = _absent() if generation is None else generation
    stamp = _from_tensorstore(path, "write", lambda: _bucket_of(path).write(_key(path), content, if_equal=condition))
    if stamp.generation:
        return stamp.generation
    found = read(path)
    return found.generation if found is not None and found.content == content else None


def delete(paths: Iterable[BucketPath]) -> None:
    """Delete objects. Ignore absent objects."""
    for group in itertools.batched(paths, CONCURRENT):
        futures = [_bucket_of(path).write(_key(path), None) for path in group]
        for path, future in zip(group, futures, strict=True):
            _from_tensorstore(path, "delete", lambda future=future: future)


def delete_if(path: BucketPath, generation: bytes) -> None:
    """Delete an object if it exists with this generation. On S3, this is not atomic: TensorStore compares first."""
    _from_tensorstore(path, "delete", lambda: _bucket_of(path).write(_key(path), None, if_equal=generation))


def describe_below(folder: BucketPath) -> dict[str, Description]:
    """Return the descriptions of all objects below a folder, by relative name. Send one request per page."""
    # Use fsspec: if the credentials do not permit listing, TensorStore would return an empty list instead of an error.
    prefix = f"{_name(folder)}/"
    entries = _from_fsspec(folder, "list", lambda: _fsspec(folder).find(prefix, detail=True)) or {}
    # Keep only files, because s3fs may list the prefix itself.
    files = {name: entry for name, entry in entries.items() if entry["type"] == "file"}
    return {name.removeprefix(prefix): _description(entry) for name, entry in files.items()}


def list_folder(path: BucketPath) -> dict[str, bool]:
    """Return the names in a folder, each with whether it is a folder. Send one request per page.

    Return {} if the folder is absent. Raise `UserError` if `path` is an object.
    """
    entries = _entries(path)
    own = [entry for entry in entries if entry["name"].rstrip("/") == _name(path)]
    if len(entries) == 1 and own and own[0]["type"] == "file":
        raise UserError(f"{path} is not a folder; move it away")
    names = {entry["name"].rstrip("/").rpartition("/")[2]: entry["type"] == "directory" for entry in entries}
    names.pop("", None)
    return names


def describe_files(folder: BucketPath) -> dict[str, Description]:
    """Return the descriptions of the objects directly in a folder, by name."""
    files = [entry for entry in _entries(folder) if entry["type"] == "file"]
    # Skip the empty name: a store may list an object that stands for the folder itself.
    return {name: _description(entry) for entry in files if (name := entry["name"].removeprefix(f"{_name(folder)}/"))}


def _entries(path: BucketPath) -> list[dict[str, Any]]:
    """List the objects and folders in a folder."""
    return _from_fsspec(path, "list", lambda: _fsspec(path).ls(_name(path), detail=True)) or []


def describe(path: BucketPath) -> Description | None:
    """Return the description of an object, or None if it is absent or a folder."""
    entry = _from_fsspec(path, "read", lambda: _fsspec(path).info(_name(path)))
    return None if entry is None or entry["type"] != "file" else _description(entry)


def _description(entry: dict[str, Any]) -> Description:
    """Convert an entry of a gcsfs or s3fs listing to a `Description`."""
    crc32c, modified = entry.get("crc32c"), entry.get("LastModified") or entry["mtime"]
    version = str(entry.get("generation") or entry["ETag"])
    return Description(
        entry["size"], crc32c and int.from_bytes(base64.b64decode(crc32c)), modified.timestamp(), version
    )


def download(path: BucketPath, target: str) -> None:
    """Download an object to a local file."""
    _from_fsspec(path, "read", lambda: _fsspec(path).get_file(_name(path), target))


def upload(path: BucketPath, source: str) -> None:
    """Upload a local file in parts. The object is created or replaced once all parts have arrived."""
    _from_fsspec(path, "write", lambda: _fsspec(path).put_file(source, _name(path)))


def require_conditions(folder: BucketPath) -> None:
    """Raise `UserError` unless objects can be written to a folder and the store supports conditional writes."""
    probe = folder / f"{PROBE}{secrets.token_hex(8)}"
    # Test with fsspec, because its error shows whether the store itself refused the write.
    conditions = [{"mode": "create"}, {"IfMatch": '"0"'}] if _scheme(probe) == "s3" else [{"mode": "create"}]
    write(probe, b"first")
    try:
        for condition in conditions:  # None of them holds, so the store must refuse each write.
            write_again = functools.partial(_fsspec(probe).pipe_file, _name(probe), b"second", **condition)
            with contextlib.suppress(FileExistsError):
                _from_fsspec(probe, "write", write_again)
                raise UserError(
                    f"{folder}: the store ignores the conditions of writes (If-Match, ifGenerationMatch), so "
                    "nothing would keep two processes from writing the same run; use a store that enforces them"
                )
    finally:
        delete([probe])


def _from_tensorstore(path: BucketPath, verb: str, start: Callable[[], Any]) -> Any:
    """Return the result of a TensorStore request. TensorStore raises all errors as `ValueError` with a status."""
    try:
        return start().result(timeout=OPERATION_SECONDS)
    except (ValueError, TimeoutError) as error:
        raise _explained(path, verb, error) from error


def _from_fsspec(path: BucketPath, verb: str, request: Callable[[], Any]) -> Any:
    """Return the result of an fsspec request, or None if the object is absent.

    Raise `FileExistsError` if the condition of a write does not hold.
    """
    try:
        return request()
    except FileNotFoundError as error:
        if verb == "write":
            raise _explained(path, verb, error) from error
        return None
    except Exception as error:  # fsspec's stores raise errors of several HTTP libraries.
        # gcsfs reports a failed condition only by FileExistsError.
        if verb == "write" and (isinstance(error, FileExistsError) or _reply(error)[0] == 412):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        raise _explained(path, verb, error) from error


def _explained(path: BucketPath, verb: str, error: Exception) -> UserError | UnreadableError:
    """Convert the error of a failed request to a one-line error."""
    scheme, bucket = _scheme(path), _name(path).partition("/")[0]
    status, codes = _reply(error)
    if isinstance(error, PermissionError) or status in (401, 403) or codes & EXPIRED:
        default = {"gs": "gcloud auth application-default login", "s3": "aws configure"}[scheme]
        return UserError(
            f"{path}: the credentials of this process may not {verb} objects of bucket {bucket}; grant them the "
            f"permission, or use other credentials ({default})"
        )
    if isinstance(error, FileNotFoundError) or "NOT_FOUND" in codes:
        return UserError(f"{path}: there is no bucket {bucket}; create it, or use another one")
    done = {"read": "read", "write": "written", "delete": "deleted", "list": "listed"}[verb]
    hint = "; the credentials may have expired" if scheme == "s3" and status == 400 and not codes else ""
    return UnreadableError(
        f"{path} cannot be {done}: {cause_of(error)}{hint} (all retries failed); run the same command again"
    )


def _reply(error: Exception) -> tuple[int | None, set[str]]:
    """Find HTTP status and codes, such as "ExpiredToken" or "NOT_FOUND", in an error of TensorStore, s3fs or gcsfs."""
    response = getattr(error.__cause__, "response", getattr(error, "response", None))
    if isinstance(response, dict):  # botocore. If the reply has no body, its code is the HTTP status.
        code = str(response["Error"].get("Code", ""))
        return response["ResponseMetadata"].get("HTTPStatusCode"), set() if code.isdecimal() else {code}
    if str(getattr(error, "code", None)).isdecimal():  # gcsfs.
        return int(error.code), set()  # pyrefly: ignore[missing-attribute]
    if type(error) is OSError and str(error).startswith("Forbidden: "):  # gcsfs.
        return 403, set()
    text = BODY.sub("", str(error))
    return int(found[1]) if (found := STATUS.search(text)) else None, set(CODES.findall(text))


def cause_of(error: Exception) -> str:
    """Return an error's text for a message, without the body of the reply, which may contain secrets."""
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return (BODY.sub("", str(error)) or type(error).__name__)[:300]


@contextlib.contextmanager
def one_line_errors(path: object, verb: str) -> Iterator[None]:
    """Convert errors of TensorStore requests in the block, for a file or an object, to `UnreadableError`."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TimeoutError) as error:
        raise UnreadableError(f"{path} cannot be {verb}: {cause_of(error)}; run the same command again") from error


def _matches(content: bytes, described: Description) -> bool:
    if len(content) != described.size or described.crc32c is None:
        return len(content) == described.size
    import google_crc32c

    return google_crc32c.value(content) == described.crc32c


def _scheme(path: BucketPath) -> str:
    return str(path).partition("://")[0]


def _name(path: BucketPath) -> str:
    """Return the bucket and key of a path as "bucket/folder/name"."""
    return str(path).partition("://")[2]


def _key(path: BucketPath) -> str:
    return _name(path).partition("/")[2]


def _bucket_of(path: BucketPath) -> Any:
    return _bucket(_scheme(path), _name(path).partition("/")[0])


@functools.cache
def _bucket(scheme: str, bucket: str) -> Any:
    """Return the TensorStore client of a bucket."""
    import tensorstore as ts

    spec, context = _tensorstore_spec(scheme, bucket)
    return ts.KvStore.open(spec, context=ts.Context(context)).result()


def tensorstore_spec(path: BucketPath) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the TensorStore specs of a folder: of its key-value store, and of the context."""
    spec, context = _tensorstore_spec(_scheme(path), _name(path).partition("/")[0])
    return spec | {"path": f"{_key(path)}/"}, context


def _tensorstore_spec(scheme: str, bucket: str) -> tuple[dict[str, Any], dict[str, Any]]:
    for name, value in (("CONNECT_TIMEOUT_SECONDS", 10), ("LOW_SPEED_TIME_SECONDS", SILENCE_SECONDS)):
        os.environ.setdefault(f"TENSORSTORE_CURL_{name}", str(value))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    spec: dict[str, Any] = {"driver": "gcs", "bucket": bucket}
    if scheme == "s3":
        # By default, at endpoints other than Amazon's, TensorStore would compare the ETag itself before it writes.
        spec |= {"driver": "s3", "use_conditional_write": True}
        # s3fs reads these variables by itself (botocore). TensorStore requires the endpoint as an argument.
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        spec |= {"endpoint": endpoint} if endpoint else {}
        if "AWS_ACCESS_KEY_ID" in os.environ:  # Avoids log lines of TensorStore if ~/.aws is missing.
            spec["aws_credentials"] = {"type": "environment"}
    return spec, {f"{spec['driver']}_request_retries": RETRIES}


@functools.cache
def _absent() -> bytes:
    """Return TensorStore's generation for absent objects. TensorStore has no public name for it."""
    import tensorstore as ts

    return ts.KvStore.open({"driver": "memory"}).result().read("absent").result().stamp.generation


def _fsspec(path: BucketPath) -> Any:
    """Return the fsspec client of a path's store, without a cache of listings. fsspec keeps one client per process."""
    import fsspec

    if _scheme(path) == "s3":
        retries = {"max_attempts": 1}  # s3fs itself retries each request five times.
        settings = {"retries": retries, "connect_timeout": 10, "read_timeout": SILENCE_SECONDS}
        return fsspec.filesystem("s3", config_kwargs=settings, use_listings_cache=False)
    import aiohttp

    timeout = aiohttp.ClientTimeout(sock_connect=10, sock_read=SILENCE_SECONDS)
    return fsspec.filesystem("gs", requests_timeout=timeout, consistency="md5", use_listings_cache=False)
