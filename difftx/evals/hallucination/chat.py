"""A client of OpenAI's chat completions API, with retries, a rate limit, and error messages that hide the key."""

import asyncio
import itertools
import json
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import CancelledError
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from difftx.config.eval import JudgeConfig
from difftx.errors import RunError, UserError
from difftx.json_files import schema_error

MAX_RESPONSE_BYTES = 8 * 2**20  # Maximum size of a response. A chat completion takes some KiB.
RETRIED_STATUS = {408, 409, 425, 429}  # HTTP status codes that are retried. All codes from 500 on are retried too.
MAX_REASON_CHARACTERS = 200  # Maximum number of characters of an endpoint's text that a message quotes.
MAX_EXAMINED_CHARACTERS = 4096  # An endpoint's text is truncated to this length before the key is masked.
KEY_NAME = re.compile("_(KEY|TOKEN)$")  # Only environment variables with such names may be sent to an endpoint.
LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")  # Hosts within this machine.
SHORTEST_PART = 6  # Parts of the key of at least this length are masked. Shorter ones, such as "sk-", are harmless.
RESUMES = "earlier answers are kept; run the same command again to resume"


class AttemptError(Exception):
    """Raised with a reason, and the seconds that the endpoint asks to wait, if a request may succeed later."""


class ChatEndpoint:
    """A chat endpoint that any number of threads may use. Failed requests are repeated."""

    def __init__(self, config: JudgeConfig):
        """Read the key from the environment. Raise `UserError` if it is invalid or would be sent unencrypted."""
        self._config, self._key = config, _key(config.key_variable)
        self.url = f"{config.base_url.rstrip('/')}/chat/completions"
        parts = urllib.parse.urlsplit(self.url)
        self._is_local = parts.scheme == "http" and bool(LOOPBACK.fullmatch(parts.hostname or ""))
        if self._key is not None and parts.scheme != "https" and not self._is_local:
            raise UserError(
                f"eval.judge.base_url={config.base_url}: a key is sent over https, or over http within this machine "
                "(localhost); use https, or eval.judge.key_variable=none for an endpoint that needs no key"
            )
        self._tls = httpx2.create_ssl_context()  # Reads the certificates, which takes 0.1 s.
        self._gap = 60 / config.requests_per_minute if config.requests_per_minute else 0.0
        self._free_at = time.monotonic()  # Time of the next request.
        # While `stopped` is set, every thread that waits, or would send another request, raises `CancelledError`.
        self._lock, self.stopped = threading.Lock(), threading.Event()

    def ask[T](self, body: dict[str, Any], read: Callable[[str, int | None, int | None], T]) -> T:
        """Send a request and return `read(text, tokens_in, tokens_out)`, where None means unknown numbers of tokens.

        If `read` raises an `AttemptError`, repeat the request. `UserError` (the endpoint refuses the key or the
        request) and `RunError` (all attempts failed, or too long a wait is asked for) also stop all other threads.
        """
        attempts, longest, reason = self._config.attempts, self._config.longest_wait_seconds, ""
        try:
            for attempt in range(attempts):
                if attempt:
                    self._sleep(min(self._config.backoff_seconds * 2 ** (attempt - 1), longest))
                self._await_turn()
                try:
                    return read(*self._reply(body))
                except AttemptError as error:
                    reason, wait = error.args
                if wait > longest:
                    raise RunError(
                        f"{self.url} asks to wait {wait:.0f} s, longer than "
                        f"eval.judge.longest_wait_seconds={longest:g} ({reason}); {RESUMES}"
                    )
                with self._lock:
                    self._free_at = max(self._free_at, time.monotonic() + wait)
            raise RunError(f"{self.url}: eval.judge.attempts={attempts} failed, the last: {reason}; {RESUMES}")
        except (UserError, RunError):
            self.stopped.set()
            raise

    def masked(self, text: str) -> str:
        """Return a text with the key and long parts of it masked, since a server may repeat the key in its answer."""
        key = self._key or ""
        size = min(SHORTEST_PART, len(key))
        starts = (at for at in range(len(text) - size + 1) if text[at : at + size] in key)
        hidden = {at + i for at in starts for i in range(size)}
        parts = itertools.groupby(enumerate(text), lambda place: place[0] in hidden)
        return "".join("(key)" if is_hidden else "".join(letter for _, letter in part) for is_hidden, part in parts)

    def brief(self, text: str) -> str:
        """Return the beginning of a text for a message, with the key masked."""
        return " ".join(self.masked(text[:MAX_EXAMINED_CHARACTERS]).split())[:MAX_REASON_CHARACTERS]

    def _reply(self, body: dict[str, Any]) -> tuple[str, int | None, int | None]:
        """Send a request once. Raise `AttemptError` if another attempt may succeed, else `UserError`."""
        response, content = asyncio.run(self._post(body))
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            reply = {}
        has_message = schema_error(reply, {"error": {"message": str}}) is None
        text = reply["error"]["message"] if has_message else content.decode(errors="replace")
        status, reason = response.status_code, f"HTTP {response.status_code}: {self.brief(text) or 'no message'}"
        if status in (401, 403):
            key = f"the key in the environment variable {self._config.key_variable}"
            refused = "a request without a key; set eval.judge.key_variable" if self._key is None else key
            raise UserError(f"{self.url} refuses {refused} (HTTP {status})")
        if status != 200 and status < 500 and status not in RETRIED_STATUS:
            where = "eval.judge.base_url and eval.hallucination.judge_model"
            raise UserError(f"{self.url} refuses the request: {reason}; see {where}")
        if status != 200:
            raise AttemptError(reason, _retry_after(response.headers.get("Retry-After", "")))
        wrong = schema_error(reply, {"choices": [{"message": {"content": str}}]})
        if wrong is not None or not reply["choices"]:  # Some endpoints report errors with status 200.
            raise AttemptError(f"the reply is not a chat completion, {wrong or 'choices: empty'}: {reason}", 0.0)
        text, usage = reply["choices"][0]["message"]["content"], reply.get("usage") or {}
        if schema_error(usage, {"prompt_tokens": int, "completion_tokens": int}) is not None:
            return text, None, None
        return text, usage["prompt_tokens"], usage["completion_tokens"]

    async def _post(self, body: dict[str, Any]) -> tuple[httpx2.Response, bytes]:
        """Return the response and its content, or raise `AttemptError` if it is incomplete in time or too large."""
        # Refuse compression: a small compressed response could expand to any size.
        headers = {"Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        # Ignore proxy settings for http within this machine: a proxy would receive the key unencrypted.
        options = {"trust_env": not self._is_local, "verify": self._tls, "timeout": None}
        client = httpx2.AsyncClient(headers=headers, **options)
        content, seconds = b"", self._config.timeout_seconds
        try:
            async with asyncio.timeout(seconds), client, client.stream("POST", self.url, json=body) as response:
                async for part in response.aiter_raw():
                    content += part
                    if len(content) > MAX_RESPONSE_BYTES:
                        raise AttemptError(f"the response has more than {MAX_RESPONSE_BYTES / 2**20:g} MiB", 0.0)
        except TimeoutError as error:
            raise AttemptError(f"no complete answer within {seconds:g} s", 0.0) from error
        except (OSError, httpx2.HTTPError) as error:
            raise AttemptError(self.brief(f"{type(error).__name__}: {error}"), 0.0) from error
        return response, content

    def _await_turn(self) -> None:
        """Wait until the rate limit and the endpoint's Retry-After allow a request, and count the request."""
        wait = 1.0
        while wait > 0:
            with self._lock:
                now = time.monotonic()
                wait = self._free_at - now
                if wait <= 0:
                    self._free_at = now + self._gap
            self._sleep(max(wait, 0))

    def _sleep(self, seconds: float) -> None:
        if self.stopped.wait(seconds):
            raise CancelledError


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not KEY_NAME.search(variable):
        raise UserError(
            f"eval.judge.key_variable={variable!r}: only a variable whose name ends in _KEY or _TOKEN is sent to an "
            "endpoint; copy the key to such a variable, for example JUDGE_API_KEY"
        )
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch("[!-~]+", key):
        raise UserError(
            f"eval.judge.key_variable={variable!r}: this environment variable is not set to a key without spaces; set "
            "it to the key of eval.judge.base_url, or set the field to none for an endpoint that needs no key"
        )
    return key


def _retry_after(value: str) -> float:
    """Return the seconds to wait for a Retry-After header, or 0 if it is neither a number nor a date."""
    try:
        wait = int(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):  # Also for huge numbers.
        return 0.0
    return float(min(max(wait, 0), 10**9))
