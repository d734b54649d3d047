"""HTTP requests to untrusted servers, with limits on time and size, and with protection of the API key."""

import contextlib
import ipaddress
import socket
import threading
import urllib.parse
from typing import Any, NamedTuple

import requests
import urllib3

MAX_RESPONSE_BYTES = 8 * 2**20  # Maximum size of a response. A chat completion takes some KiB.
TIMEOUTS = requests.exceptions.Timeout, urllib3.exceptions.TimeoutError


class Response(NamedTuple):
    """A complete HTTP response."""

    status: int
    headers: requests.structures.CaseInsensitiveDict[str]
    content: bytes


class RequestError(Exception):
    """Raised if there is no complete response within the limits. The message may contain text from the server."""


def may_carry_key(url: str) -> bool:
    """Return whether a request to `url` keeps a key secret in transit: https, or http within this machine."""
    return urllib.parse.urlsplit(url).scheme == "https" or _is_loopback_http(url)


def post_json(url: str, body: Any, *, key: str | None, seconds: float) -> Response:
    """Send `body` as JSON and return the response, or raise `RequestError`. Redirects are not followed.

    The last byte must arrive within `seconds`. If `may_carry_key(url)` is false, `key` must be None.
    """

    def authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
        # A callable sets the header, since an entry of ~/.netrc replaces an Authorization header that `post` receives.
        if key is not None:
            request.headers["Authorization"] = f"Bearer {key}"
        return request

    adapter, too_late = _DeadlineAdapter(seconds), RequestError(f"no complete answer within {seconds:g} s")
    with requests.Session() as session:
        # Ignore proxy settings for http within this machine: a proxy would receive the key unencrypted.
        session.trust_env = not _is_loopback_http(url)
        session.mount("https://", adapter)
        session.mount("http://", adapter)
        # Refuse compression: a small compressed response could expand to any size.
        headers = {"Accept-Encoding": "identity"}
        try:
            with session.post(
                url, json=body, auth=authorize, headers=headers, timeout=seconds, allow_redirects=False, stream=True
            ) as response:
                content = response.raw.read(MAX_RESPONSE_BYTES + 1, decode_content=False)
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            if adapter.expired.is_set() or isinstance(error, TIMEOUTS):
                raise too_late from error
            raise RequestError(f"{type(error).__name__}: {error}") from error
    if adapter.expired.is_set():  # Without a Content-Length, an ended connection looks like a complete response.
        raise too_late
    if len(content) > MAX_RESPONSE_BYTES:
        raise RequestError(f"the response has more than {MAX_RESPONSE_BYTES / 2**20:g} MiB")
    return Response(response.status_code, response.headers, content)


class _DeadlineAdapter(requests.adapters.HTTPAdapter):
    """HTTP adapter that sets `expired` and shuts its connections down after `seconds`.

    A socket's own timeout cannot bound a whole request, since it restarts with every byte that arrives.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.expired = threading.Event()
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        self._timer.cancel()
        super().close()

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        adapter = self

        class Connection(pool.ConnectionCls):
            def connect(self) -> None:
                super().connect()
                adapter._sockets.append(self.sock)
                if adapter.expired.is_set():
                    raise TimeoutError

        pool.ConnectionCls = Connection
        return pool

    def _expire(self) -> None:
        self.expired.set()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                # SSLSocket.shutdown would change the TLS state while another thread reads.
                socket.socket.shutdown(one, socket.SHUT_RDWR)


def _is_loopback_http(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        return False
    try:
        return ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        return parts.hostname == "localhost"
