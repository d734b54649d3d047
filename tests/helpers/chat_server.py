"""A real HTTP server for chat completions, with faults that a test requests."""

import collections
import contextlib
import http.server
import json
import re
import socket
import struct
import threading
import time

KEY = "sk-test-8f3a91c6e7d2"
ANSWER = re.compile(r"# Reference answers\n(.*?)\n\n# Proposed answer\n(.*?)\n\n", re.DOTALL)
USAGE = {"prompt_tokens": 1000, "completion_tokens": 10}


def completion(content, **changes):
    message = {"role": "assistant", "content": content}
    return {"id": "c", "object": "chat.completion", "choices": [{"message": message}], "usage": USAGE} | changes


class ChatServer:
    """A server whose answers `behave(number, prompt)` selects: None for a correct verdict, or a dict of deviations.

    `charged` counts the complete replies to each prompt.
    """

    def __init__(self, behave=lambda number, prompt: None, key=KEY):
        self.behave, self.key = behave, key
        self.asked, self.charged, self.headers, self.arrived = [], collections.Counter(), [], []
        self.here = self.most = self.dripped = 0
        self.reached, self.release = threading.Event(), threading.Event()
        self.lock = threading.Lock()

    def __enter__(self):
        handler = type("Handler", (Handler,), {"chat": self})
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.release.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http.server_port}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    chat: ChatServer

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat, prompt = self.chat, body["messages"][0]["content"]
        with chat.lock:
            chat.here += 1
            chat.most = max(chat.most, chat.here)
            number = len(chat.asked)
            chat.asked.append(body)
            chat.headers.append(dict(self.headers))
            chat.arrived.append(time.monotonic())
        try:
            with contextlib.suppress(ConnectionError):
                self.answer(prompt, chat.behave(number, prompt) or {})
        finally:
            with chat.lock:
                chat.here -= 1

    def answer(self, prompt, how):
        chat = self.chat
        if self.path != "/v1/chat/completions":
            return self.send(404, {"error": {"message": "no such path"}})
        if how.get("slow"):
            time.sleep(how["slow"])
        if how.get("hang"):
            chat.reached.set()
            chat.release.wait()
        if how.get("drop"):
            # Reset the connection instead of closing it gracefully.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return self.connection.close()
        if chat.key is not None and self.headers.get("Authorization") != f"Bearer {chat.key}":
            return self.send(401, {"error": {"message": f"wrong key: {self.headers.get('Authorization')}"}})
        if how.get("drip"):
            return self.drip(how["drip"])
        if "status" in how:
            return self.send(how["status"], how.get("reply", {"error": {"message": "no"}}), how.get("headers", {}))
        reply = how.get("reply", completion(verdict_on(prompt)))
        with chat.lock:
            chat.charged[prompt] += isinstance(reply, dict) and "choices" in reply and not how.get("half")
        return self.send(200, reply, half=how.get("half", False))

    def send(self, status, reply, headers=(), *, half=False):
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if half else data)
        self.close_connection = True

    def drip(self, part):
        """Send a byte of a header or body every 0.05 s until the client disconnects.

        "flood" sends large parts as fast as possible.
        """
        self.close_connection = True
        start = {
            "header": b"HTTP/1.1 200 OK\r\nX: ",
            "body": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n{",
            "unsized_body": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{",
            "flood": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{",
        }[part]
        self.wfile.write(start)
        try:
            while not self.chat.release.wait(0.0 if part == "flood" else 0.05):
                self.wfile.write(b" " * (2**20 if part == "flood" else 1))
                with self.chat.lock:
                    self.chat.dripped += 2**20 if part == "flood" else 1
        finally:
            self.chat.reached.set()


def verdict_on(prompt):
    """Return a verdict, which is accurate if the answer is one of the references."""
    references, answer = ANSWER.search(prompt).groups()
    accurate = f"- {answer}" in references.splitlines()
    return json.dumps({"why": f"{answer!r} of {references!r}", "accurate": accurate})
