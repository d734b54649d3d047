"""A proxy in front of a storage emulator, with conditions, pages and faults that the emulators lack.

    python bucket_proxy.py PORT UPSTREAM_PORT gs|s3

It enforces generation preconditions for Google Cloud Storage, one write at a time for both stores, and small pages of
listings. `POST /-/plan` sets the faults (`FaultPlan`) and returns the requests, the bytes of their bodies and of their
replies, and the faults since the last call, by kind.
"""

import contextlib
import dataclasses
import http.client
import json
import random
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = 3  # Entries per page of a listing.
NOT_FORWARDED = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")
CONDITIONS = ("if-match", "if-none-match")


@dataclasses.dataclass
class FaultPlan:
    """Faults for the requests whose "METHOD path" matches a pattern. A fault that changes nothing does not count.

    kinds: "400" (the credentials have expired), "401", "403", "429", "500", "503" (replies), "reset" (before the
    request takes place), "lost" (a reset after it took place), "slow", "silent" (no reply for a minute), "cut" (the
    connection ends within the body), "short" (half of the body, and its length), "stale" (the listing before this
    one), "unconditional" (conditions are dropped).
    `rate` is the probability of a fault, `limit` the maximal number of faults, and `in_a_row` the maximal number of
    faults in a row for requests with the same line.
    """

    kinds: list[str] = dataclasses.field(default_factory=list)
    rate: float = 1.0
    seed: int = 0
    limit: int = 10**9
    in_a_row: int = 10**9
    pattern: str = "."


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, upstream: int, store: str):
        super().__init__(("127.0.0.1", port), Handler)
        self.upstream, self.store = upstream, store
        # Serializes writes with the checks of their conditions, and reads of Google Cloud Storage.
        self.writes = threading.Lock()
        self.state = threading.Lock()
        self.generations: dict[str, str] = {}  # Object of Google Cloud Storage → its generation.
        self.listings: dict[str, tuple[int, list, bytes]] = {}
        self.start_plan(FaultPlan())

    def start_plan(self, plan: FaultPlan) -> None:
        self.plan, self.random = plan, random.Random(plan.seed)
        self.faults: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.row: dict[str, int] = {}

    def fault(self, line: str, what: str) -> str:
        """Count a request and return the fault that it meets, or ""."""
        with self.state:
            self.kinds[what] = self.kinds.get(what, 0) + 1
            possible = [kind for kind in self.plan.kinds if _applies(kind, what)]
            met = possible and re.search(self.plan.pattern, line) and self.random.random() < self.plan.rate
            if not met or self.row.get(line, 0) >= self.plan.in_a_row or sum(self.faults.values()) >= self.plan.limit:
                self.row[line] = 0
                return ""
            kind = self.random.choice(possible)
            self.row[line] = self.row.get(line, 0) + 1
            self.faults[kind] = self.faults.get(kind, 0) + 1
            return kind

    def take_back(self, line: str, kind: str) -> None:
        """Uncount a fault that would not change the reply to this request."""
        with self.state:
            self.row[line] = 0
            self.faults[kind] = max(0, self.faults.get(kind, 0) - 1)  # A new plan may have begun.


def _applies(kind: str, what: str) -> bool:
    if kind in ("cut", "short"):
        return what == "read"
    if kind == "unconditional":
        return what in ("write", "delete")
    return what == "list" if kind == "stale" else True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def serve(self) -> None:
        body = self._body()
        if self.path.startswith("/-/"):
            return self._control(body)
        split = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(split.query, keep_blank_values=True))
        what = self._kind(split.path, query)
        query.pop("tensorstore", None)  # A number that makes every URL of TensorStore different.
        line = f"{self.command} {urllib.parse.unquote(split.path)}?{urllib.parse.urlencode(query)}"
        fault = self.server.fault(line, what)
        if fault.isdecimal():
            return self._reply(int(fault), [("Content-Type", "application/json")], self._error(int(fault)))
        if fault == "reset":
            return self._reset()
        if fault in ("slow", "silent"):
            time.sleep(60 if fault == "silent" else 0.3)
        if what in ("write", "delete"):
            with self.server.writes:
                reply = self._conditional(split, query, body, enforced=fault != "unconditional")
        else:
            reply = self._read(split, query, what)
        with self.server.state:
            self.server.bytes[what] = self.server.bytes.get(what, 0) + len(body) + len(reply[2])
        if what == "list":
            before, self.server.listings[line] = self.server.listings.get(line, reply), reply
            if fault == "stale":
                is_other = before[2] != reply[2]
                reply, fault = (before if is_other else reply), self._fault_if(is_other, line, fault)
        if fault in ("cut", "short"):
            fault = self._fault_if(reply[0] in (200, 206) and len(reply[2]) > 1, line, fault)
        if fault == "lost":
            return self._reset()
        if fault in ("cut", "short"):
            half = reply[2][: len(reply[2]) // 2]
            self._reply(*reply[:2], half, length=len(half if fault == "short" else reply[2]))
            self.close_connection = True
            return None
        return self._reply(*reply)

    def _fault_if(self, changes_reply: bool, line: str, fault: str) -> str:
        """Return the fault. If it does not change the reply, uncount it and return ""."""
        if not changes_reply:
            self.server.take_back(line, fault)
        return fault if changes_reply else ""

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = serve

    def _kind(self, path: str, query: dict[str, str]) -> str:
        if self.command == "DELETE":
            return "delete"
        if self.command in ("PUT", "POST", "PATCH"):
            return "write"
        if self.server.store == "gs":
            if "alt" in query or path.startswith("/download"):
                return "read"
            return "list" if path.endswith("/o") else "describe"
        if "list-type" in query:
            return "list"
        return "read" if self.command == "GET" else "describe"

    def _conditional(self, split, query, body, *, enforced):
        """Forward a write, or return 412 if its condition does not hold. Only one thread at a time may call this."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.server.store == "s3":
            if not enforced:
                headers = {name: value for name, value in headers.items() if name not in CONDITIONS}
            return self._forward(self.path, body, headers)
        name = self._object(split.path, query, body)
        expected = query.get("ifGenerationMatch")
        if enforced and expected is not None and expected != self._generation(name):
            return 412, [("Content-Type", "application/json")], self._error(412)
        path = self.path
        if query.get("uploadType") == "media" and not body:  # The emulator fails on an empty upload of this type.
            path = path.replace("uploadType=media", "uploadType=multipart")
            headers["content-type"] = "multipart/related; boundary=b"
            metadata = json.dumps({"name": query["name"]})
            body = f"--b\r\nContent-Type: application/json\r\n\r\n{metadata}\r\n--b\r\n\r\n\r\n--b--\r\n".encode()
        reply = self._forward(path, body, headers)
        if self.command == "DELETE":
            self.server.generations.pop(name, None)
        else:
            found = json.loads(reply[2]) if reply[2].startswith(b"{") else {}
            if "generation" in found:
                self.server.generations[f"{found['bucket']}/{found['name']}"] = str(found["generation"])
        return reply

    def _read(self, split, query, what):
        if what == "list":
            return self._page(split, query)
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.server.store == "s3" or what != "read":
            return self._forward(self.path, b"", headers)
        with self.server.writes:  # Otherwise a write could take place between the content and its generation.
            reply = self._forward(self.path, b"", headers)
            generation = self._generation(self._object(split.path, query, b""))
        if reply[0] not in (200, 206):
            return reply
        if query.get("ifGenerationNotMatch") == generation:
            return 304, [], b""
        return reply[0], [*reply[1], ("x-goog-generation", generation)], reply[2]

    def _object(self, path: str, query: dict[str, str], body: bytes) -> str:
        bucket, _, name = re.sub(r"^(/download|/upload)?/storage/v1/b/|^/upload/resumable/", "", path).partition("/o")
        if not name.strip("/"):
            found = re.search(rb'"name": ?("(?:[^"\\]|\\.)*")', body)
            name = query.get("name") or (json.loads(found[1]) if found else "")
        return f"{bucket}/{urllib.parse.unquote(name.lstrip('/'))}"

    def _generation(self, name: str) -> str:
        return self.server.generations.get(name, "0")

    def _page(self, split, query):
        """Return a page of a listing. The emulator of Google Cloud Storage itself returns all entries."""
        if self.server.store == "s3":
            query["max-keys"] = str(min(PAGE, int(query.get("max-keys", PAGE))))
            return self._forward(f"{split.path}?{urllib.parse.urlencode(query)}", b"", dict(self.headers.items()))
        size, token = min(PAGE, int(query.pop("maxResults", PAGE))), query.pop("pageToken", "")
        start, end = query.pop("startOffset", ""), query.pop("endOffset", "\U0010ffff")
        status, headers, body = self._forward(f"{split.path}?{urllib.parse.urlencode(query)}", b"", {})
        if status != 200:
            return status, headers, body
        found = json.loads(body)
        entries = [(item["name"], item) for item in found.get("items", [])]
        entries += [(name, None) for name in found.get("prefixes", [])]
        entries = sorted(entry for entry in entries if entry[0] > token and start <= entry[0] < end)
        page = entries[:size]
        content = {"kind": "storage#objects", "items": [item for _, item in page if item]}
        content["prefixes"] = [name for name, item in page if item is None]
        if len(entries) > size:
            content["nextPageToken"] = page[-1][0]
        return status, [("Content-Type", "application/json")], json.dumps(content).encode()

    def _forward(self, path, body, headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        kept = {name: value for name, value in headers.items() if name.lower() not in NOT_FORWARDED}
        try:
            kept["Host"] = self.headers["Host"]
            connection.request(self.command, path, body, {**kept, "Content-Length": str(len(body))})
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        except (OSError, http.client.HTTPException):
            # The emulator of Google Cloud Storage fails on a write to an absent bucket.
            status = 404 if self.server.store == "gs" and "/b/runs/" not in path else 503
            return status, [], self._error(status)
        finally:
            connection.close()

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _reply(self, status, headers, body, *, length=None) -> None:
        self.send_response_only(status)
        dropped = ("connection", "transfer-encoding", "content-encoding") + ("content-length",) * (
            self.command != "HEAD"
        )
        for name, value in headers:
            if name.lower() not in dropped:
                self.send_header(name, value)
        if self.command != "HEAD" and status != 304:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        """Close the connection with a TCP reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _error(self, status: int) -> bytes:
        if self.server.store == "gs":
            return json.dumps({"error": {"code": status, "message": f"fault {status}"}}).encode()
        codes = {400: "InvalidToken", 401: "InvalidAccessKeyId", 403: "AccessDenied", 500: "InternalError"}
        content = f"<Code>{codes.get(status, 'SlowDown')}</Code><Message>fault {status}</Message>"
        return f"<Error>{content}<Token-0>it's-a-session-token</Token-0></Error>".encode()  # As in Amazon's errors.

    def _control(self, body: bytes) -> None:
        server = self.server
        with server.state:
            found = {"requests": server.kinds, "bytes": server.bytes, "faults": server.faults}
            server.start_plan(FaultPlan(**json.loads(body)))
        self._reply(200, [], json.dumps(found).encode())

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, ValueError, OSError):  # The client disconnected, or `_reset` closed the socket.
            self.close_connection = True

    def finish(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    Proxy(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]).serve_forever()
