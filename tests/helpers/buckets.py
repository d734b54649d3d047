"""Fixtures for folders on local disk, Google Cloud Storage and S3. Emulators and proxies start once per session."""

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from difftx.storage import objects
from difftx.storage.paths import AnyPath, path_of

MODULES = {"gs": ("gcp_storage_emulator", "gcsfs"), "s3": ("moto", "s3fs")}
# Only `make test-long` and `make chaos` install the emulators.
STORES = [pytest.param(scheme, marks=pytest.mark.long) for scheme in MODULES]


class Bucket:
    """A bucket of an emulator, and the proxy in front of it."""

    def __init__(self, scheme: str, proxy: str, emulator: str):
        self.scheme, self.proxy, self.emulator = scheme, proxy, emulator

    def plan(self, **plan: Any) -> dict[str, dict[str, int]]:
        """Set the faults (`FaultPlan`). Return the requests, bytes and faults since the last call, by kind."""
        request = urllib.request.Request(f"{self.proxy}/-/plan", json.dumps(plan).encode(), method="POST")
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def folder(self) -> AnyPath:
        return path_of("folder", f"{self.scheme}://runs/{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def buckets() -> Iterator[dict[str, Bucket]]:
    """Start the emulators and proxies as processes, and set the environment variables that point to them."""
    with contextlib.ExitStack() as stack:
        found = {scheme: start(scheme, stack) for scheme in MODULES if _why_missing(scheme) is None}
        yield found


def _why_missing(scheme: str) -> str | None:
    missing = [name for name in MODULES[scheme] if importlib.util.find_spec(name) is None]
    return f"{missing[0]} is not installed: make test-long installs it" if missing else None


def start(scheme: str, stack: contextlib.ExitStack) -> Bucket:
    """Start an emulator and its proxy, and set the environment variables that point to the proxy."""
    emulator, proxy = _free_port(), _free_port()
    scripts = Path(sys.executable).parent
    if scheme == "gs":
        command = [scripts / "gcp-storage-emulator", "start", "--host=127.0.0.1", f"--port={emulator}", "--in-memory"]
        _process([*command, "--default-bucket=runs"], emulator, stack)
    else:
        _process([scripts / "moto_server", "-H", "127.0.0.1", "-p", str(emulator)], emulator, stack)
        request = urllib.request.Request(f"http://127.0.0.1:{emulator}/runs", method="PUT")
        urllib.request.urlopen(request).close()
    _process(
        [sys.executable, Path(__file__).with_name("bucket_proxy.py"), str(proxy), str(emulator), scheme], proxy, stack
    )
    bucket = Bucket(scheme, f"http://127.0.0.1:{proxy}", f"http://127.0.0.1:{emulator}")
    os.environ |= environment(scheme, bucket.proxy)
    return bucket


def environment(scheme: str, address: str) -> dict[str, str]:
    """Return the variables that make the clients use a server in place of Google's or Amazon's."""
    if scheme == "gs":
        servers = {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address}
        return servers | {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "x"}
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    return keys | {"AWS_ENDPOINT_URL": address}


def _process(command: list[Any], port: int, stack: contextlib.ExitStack) -> None:
    """Start a server and wait until it accepts connections. End it with the session."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{command[0]} does not accept connections (exit code {process.poll()})")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(params=STORES)
def bucket(request: pytest.FixtureRequest, buckets: dict[str, Bucket]) -> Iterator[Bucket]:
    """Yield a bucket of each store, without faults at the start and at the end."""
    if why := _why_missing(request.param):
        pytest.skip(why)
    found = buckets[request.param]
    found.plan()
    yield found
    found.plan()


def in_ci_with(store: str) -> pytest.MarkDecorator:
    """Return a mark for tests of the fixture `bucket`: long with one store, and exhaustive with the other."""
    marks = {scheme: pytest.mark.long if scheme == store else pytest.mark.exhaustive for scheme in MODULES}
    return pytest.mark.parametrize(
        "bucket", [pytest.param(scheme, marks=mark) for scheme, mark in marks.items()], indirect=True
    )


@pytest.fixture(params=["local", *STORES])
def folder(request: pytest.FixtureRequest, buckets: dict[str, Bucket], tmp_path: Path) -> AnyPath:
    """Return an empty folder on each kind of storage."""
    if request.param == "local":
        return tmp_path
    if why := _why_missing(request.param):
        pytest.skip(why)
    buckets[request.param].plan()
    return buckets[request.param].folder()


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the pauses before retries: TensorStore's to 10 to 50 ms, and gcsfs's, 31 s in all, to a hundredth."""
    if importlib.util.find_spec("gcsfs"):
        quick = {"sleep": lambda seconds: asyncio.sleep(seconds / 100)}
        monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(**vars(asyncio) | quick))
    monkeypatch.setattr(objects, "RETRIES", objects.RETRIES | {"initial_delay": "10ms", "max_delay": "50ms"})
    objects._bucket.cache_clear()
    yield
    objects._bucket.cache_clear()
