"""A Hugging Face Hub of this machine: the requests of `huggingface_hub` that difftx causes, counted.

Only https://huggingface.co can tell whether its replies have this form, which is that of huggingface_hub 2.4.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import child_environment

from helpers.command_server import commands

LARGE = (".parquet", ".safetensors", ".bin", ".jsonl")  # Endings of files with a SHA-256, as in Git LFS.


class HubServer(ThreadingHTTPServer):
    """Repositories by type and name, such as ("datasets", "org/name"). Each has branches, and files by commit."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = {}
        self.reset()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    def reset(self):
        """Forget the requests and the faults."""
        self.requests: list[str] = []  # "METHOD path".
        self.ranges: list[tuple[str, int, int]] = []  # File, first byte and end of each range that was sent.
        self.faults: dict[str, object] = {}  # Pattern of a path → status, statuses, code, or function of content.
        self.pause_after: int | None = None  # Number of ranges after which requests wait until `reset`.
        self.paused = threading.Event()
        self.resumed = threading.Event()
        self.uploads: dict[str, bytes] = {}
        self.on_commit = lambda files: files  # What a commit makes of its files.

    def add(self, kind, name, files, *, private=False, branch="main"):
        """Add a commit with files, and return its hash. The branch then names it."""
        repository = self.repositories.setdefault((kind, name), {"private": private, "branches": {}, "commits": {}})
        content = json.dumps({path: hashlib.sha256(data).hexdigest() for path, data in files.items()})
        commit = hashlib.sha1(f"{len(repository['commits'])}{content}".encode()).hexdigest()
        repository["commits"][commit] = dict(files)
        repository["branches"][branch] = commit
        return commit

    @property
    def fetched(self):
        """Number of bytes of files that were sent."""
        return sum(end - start for _, start, end in self.ranges)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, _ = self.path.partition("?")
        self.change = bytes  # Of the content of a reply.
        self.server.requests.append(f"{self.command} {path}")
        fault = next((each for pattern, each in self.server.faults.items() if re.search(pattern, path)), None)
        if isinstance(fault, list):  # One status per request.
            fault = fault.pop(0) if fault else None
        if isinstance(fault, (int, str)):  # A status, or the code of an error.
            code = {"X-Error-Code": fault} if isinstance(fault, str) else {}
            return self.reply(403 if code else fault, {"error": "planted"}, code)
        self.change = fault or (lambda data: data)
        if found := re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            return self.info(*found.groups())
        if found := re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", path):
            return self.tree(*found.groups())
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.file("datasets" if found[1] else "models", *found.groups()[1:])
        return self.write(path, body)

    do_HEAD = do_POST = do_PUT = do_GET

    def repository(self, kind, name):
        if (found := self.server.repositories.get((kind, name))) is None:
            self.reply(404, {}, {"X-Error-Code": "RepoNotFound"})
        return found

    def commit(self, repository, revision):
        revision = urllib.parse.unquote(revision or "main")
        commit = repository["branches"].get(revision, revision)
        if commit not in repository["commits"]:
            self.reply(404, {}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit

    def info(self, kind, name, revision):
        if (repository := self.repository(kind, name)) and (commit := self.commit(repository, revision)):
            siblings = [{"rfilename": path} for path in repository["commits"][commit]]
            self.reply(200, {"id": name, "sha": commit, "private": repository["private"], "siblings": siblings})

    def tree(self, kind, name, revision, folder):
        if not ((repository := self.repository(kind, name)) and (commit := self.commit(repository, revision))):
            return
        prefix = f"{urllib.parse.unquote(folder)}/" if folder else ""
        files = {path: data for path, data in repository["commits"][commit].items() if path.startswith(prefix)}
        if not files and folder:
            self.reply(404, {}, {"X-Error-Code": "EntryNotFound"})
            return
        folders = {path.rpartition("/")[0] for path in files if "/" in path.removeprefix(prefix)}
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(folders)]
        for path, data in files.items():
            entry = {"type": "file", "path": path, "size": len(data), "oid": git_id(data)}
            if path.endswith(LARGE):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        start = int(urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query).get("cursor", ["0"])[0])
        page, headers = entries[start : start + 3], {}
        if len(entries) > start + 3:
            query = f"recursive=true&cursor={start + 3}"
            address = f"{self.server.endpoint}{self.path.partition('?')[0]}?{query}"
            headers = {"Link": f'<{address}>; rel="next"'}
        self.reply(200, page, headers)

    def file(self, kind, name, revision, path):
        if not ((repository := self.repository(kind, name)) and (commit := self.commit(repository, revision))):
            return
        path = urllib.parse.unquote(path)
        if (data := repository["commits"][commit].get(path)) is None:
            self.reply(404, {}, {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(data).hexdigest() if path.endswith(LARGE) else git_id(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start, end, status = 0, len(data), 200
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end, status = int(found[1]), min(int(found[2] or len(data)) + bool(found[2]), len(data)), 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        if self.command == "GET":
            if self.server.pause_after is not None and len(self.server.ranges) >= self.server.pause_after:
                self.server.paused.set()
                self.server.resumed.wait(60)
                return
            self.server.ranges.append((path, start, end))
        self.reply(status, data[start:end], headers)

    def write(self, path, body):
        """Create a repository, or add files to it, as `HfApi.upload_folder` does without Xet."""
        server = self.server
        if path == "/api/repos/create":
            request = json.loads(body)
            name = "/".join(filter(None, (request.get("organization"), request["name"])))
            exists = ("models", name) in server.repositories
            if not exists:
                private = request.get("private") or request.get("visibility") == "private"
                server.add("models", name, {".gitattributes": b"*"}, private=bool(private))
            return self.reply(409 if exists else 200, {"url": f"{server.endpoint}/{name}"})
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = [
                {"path": n, "uploadMode": "lfs" if n.endswith(LARGE) else "regular", "shouldIgnore": False}
                for n in names
            ]
            return self.reply(200, {"files": modes})
        if path.endswith("/info/lfs/objects/batch"):
            found = [
                each | {"actions": {"upload": {"href": f"{server.endpoint}/upload/{each['oid']}", "header": {}}}}
                for each in json.loads(body)["objects"]
            ]
            return self.reply(200, {"transfer": "basic", "objects": found})
        if found := re.fullmatch(r"/upload/(\w+)", path):
            server.uploads[found[1]] = body
            return self.reply(200, {})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            repository = server.repositories["models", found[1]]
            files = dict(repository["commits"][repository["branches"]["main"]])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = server.uploads[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            commit = server.add("models", found[1], server.on_commit(files))
            return self.reply(
                200,
                {"success": True, "commitOid": commit, "commitUrl": f"{server.endpoint}/{found[1]}/commit/{commit}"},
            )
        return self.reply(404, {"error": f"no such endpoint: {path}"})

    def reply(self, status, content, headers=None):
        data = self.change(content if isinstance(content, bytes) else json.dumps(content).encode())
        with contextlib.suppress(ConnectionError):  # A killed client has closed the connection.
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)


def git_id(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def hub_environment(server, home, **changes):
    """Return the environment of a command that uses a hub, with the folder `home` for its cache and account."""
    own = {"HF_ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_TOKEN": "hf_test"}
    return child_environment(1) | own | {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"} | changes


@pytest.fixture(scope="module")
def hub_server():
    with HubServer() as started:
        yield started
        started.shutdown()


@pytest.fixture
def run_with_hub(hub_server, tmp_path):
    """Return a function that runs a command with the hub, whose counters start at 0."""
    hub_server.reset()

    def run(*words, **changes):
        environment = hub_environment(hub_server, tmp_path / "home", **changes)
        return commands().run(list(map(str, words)), environment=environment)

    return run
