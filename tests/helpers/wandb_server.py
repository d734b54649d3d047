"""A server of Weights & Biases that stores what the real package sends."""

import collections
import gzip
import http.server
import json
import threading

KEY = "k" * 40


class WandbServer:
    """Stores the variables of each run in `runs`, and the rows of its history in `rows`, by the run's id."""

    def __init__(self):
        self.runs, self.rows = {}, collections.defaultdict(list)

    def __enter__(self):
        handler = type("Handler", (Handler,), {"server_of_runs": self})
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def environment(self, home):
        """Return the variables with which the package uses this server, and no files outside of `home`."""
        url = f"http://127.0.0.1:{self.http.server_address[1]}"
        return {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "HOME": str(home), "WANDB_ERROR_REPORTING": "false"}

    def steps(self, run):
        """Return the steps of a run with a training loss."""
        return [row["_step"] for row in self.rows[run] if "train/loss" in row]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of a run. Other requests get an empty object."""

    server_of_runs: WandbServer
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        """Store what the request tells of a run."""
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        request, answer = json.loads(content), {}
        if self.path.endswith("/file_stream"):
            lines = request.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server_of_runs.rows[self.path.split("/")[-2]] += map(json.loads, lines)
        elif self.path == "/graphql":
            answer = {"data": self._data(request["query"], request.get("variables", {}))}
        self._answer(answer)

    def do_PUT(self):
        """Accept a file."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer({})

    def log_message(self, *_):
        """Print nothing."""

    def _data(self, query, variables):
        if "upsertBucket" in query:
            run = variables["name"]
            self.server_of_runs.runs.setdefault(run, {}).update({k: v for k, v in variables.items() if v is not None})
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": run, "displayName": run, "historyLineCount": 0, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "RunResumeStatus" in query:
            name, rows = variables["name"], self.server_of_runs.rows[variables["name"]]
            bucket = {"name": name, "displayName": name, "id": "b", "wandbConfig": '{"t": 1}'}
            bucket |= dict.fromkeys(("summaryMetrics", "config"), "{}") | {"eventsTail": "[]"}
            bucket |= {"logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(rows)}
            bucket["historyTail"] = json.dumps([json.dumps(row) for row in rows[-1:]])
            known = bucket if name in self.server_of_runs.runs else None
            return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}, "bucket": known}}
        if "createRunFiles" in query:
            host = self.headers["Host"]
            files = [{"name": name, "uploadUrl": f"http://{host}/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}

    def _answer(self, answer):
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
