"""A client for OpenAI's chat completions API, with retries. Its error messages hide the key."""

import asyncio
import itertools
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import httpx2

from difftx.config.eval import JudgeConfig
from difftx.errors import RunError, UserError
from difftx.json_files import schema_error

MAX_RESPONSE_BYTES = 8 * 2**20  # A chat completion takes some KiB.
RETRIED_STATUS = {408, 409, 425, 429}  # HTTP status codes to retry, in addition to all from 500 on.
BACKOFF_SECONDS = 1.0  # Pause after the first failed attempt. It doubles after each further one.
LONGEST_PAUSE_SECONDS = 120.0
MAX_REASON_CHARACTERS = 200  # Maximum length of an endpoint's text in a message.
MAX_EXAMINED_CHARACTERS = 4096  # An endpoint's text is truncated to this length before the key is masked.
KEY_NAME = re.compile("_(KEY|TOKEN)$")  # Only environment variables with such names may be sent to an endpoint.
SHORTEST_PART = 6  # Mask parts of the key from this length on. Shorter ones, such as "sk-", are harmless.
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # Names of this machine.


class AttemptError(Exception):
    """A request failed but may succeed later. The arguments are the reason, and how many seconds to wait."""


class ChatEndpoint:
    """A chat endpoint. Any number of threads may use it. Failed requests are repeated."""

    def __init__(self, config: JudgeConfig):
        """Read the key from the environment. Raise `UserError` if it is invalid or would be sent unencrypted."""
        self._config, self._key = config, _key(config.key_variable)
        self.url = f"{config.base_url.rstrip('/')}/chat/completions"
        parts = urllib.parse.urlsplit(self.url)
        is_local = parts.scheme == "http" and parts.hostname in LOOPBACK
        if self._key is not None and parts.scheme != "https" and not is_local:
            raise UserError(
                f"eval.judge.base_url={config.base_url}: a key is sent over https, or over http within this machine "
                "(localhost); use https, or eval.judge.key_variable=none for an endpoint that needs no key"
            )
        self._is_local = is_local
        self._tls = httpx2.create_ssl_context()  # Do this once, because reading the certificates takes 0.1 s.
        self.stopped = threading.Event()  # If set, a thread that would send another request raises `CancelledError`.

    def ask[T](self, body: dict[str, Any], read: Callable[[str, int, int], T]) -> T:
        """Send a request and return `read(text, tokens_in, tokens_out)`. 0 tokens mean an unknown number.

        If `read` raises an `AttemptError`, repeat the request. If the endpoint refuses the key or the request, raise
        `UserError`, and if all attempts failed, raise `RunError`. Both also stop all other threads.
        """
        reason, pause = "", 0.0
        try:
            for attempt in range(self._config.attempts):
                if self.stopped.wait(pause):
                    raise CancelledError
                try:
                    return read(*self._reply(body))
                except AttemptError as error:
                    reason, wait = error.args
                pause = min(max(wait, BACKOFF_SECONDS * 2**attempt), LONGEST_PAUSE_SECONDS)
            raise RunError(
                f"{self.url}: eval.judge.attempts={self._config.attempts} failed, the last: {reason}; earlier answers "
                "are kept; run the same command again to resume"
            )
        except (UserError, RunError):
            self.stopped.set()
            raise

    def masked(self, text: str) -> str:
        """Mask the key and long parts of it in a text, because a server may repeat the key in its reply."""
        key = self._key or ""
        size = min(SHORTEST_PART, len(key))
        starts = (at for at in range(len(text) - size + 1) if text[at : at + size] in key)
        hidden = {at + i for at in starts for i in range(size)}
        parts = itertools.groupby(enumerate(text), lambda place: place[0] in hidden)
        return "".join("(key)" if is_hidden else "".join(letter for _, letter in part) for is_hidden, part in parts)

    def brief(self, text: str) -> str:
        """Return the start of a text for a message, with the key masked."""
        return " ".join(self.masked(text[:MAX_EXAMINED_CHARACTERS]).split())[:MAX_REASON_CHARACTERS]

    def _reply(self, body: dict[str, Any]) -> tuple[str, int, int]:
        """Send a request once. Raise `AttemptError` if another attempt may succeed, and `UserError` if not."""
        response, content = asyncio.run(self._post(body))
        try:
            reply = json.loads(content)
        except ValueError:
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
            wait = response.headers.get("Retry-After", "")
            raise AttemptError(reason, float(wait) if re.fullmatch(r"\d{1,9}", wait) else 0.0)
        wrong = schema_error(reply, {"choices": [{"message": {"content": str}}]})
        if wrong is not None or not reply["choices"]:  # Some endpoints report errors with status 200.
            raise AttemptError(f"the reply is not a chat completion, {wrong or 'choices: empty'}: {reason}", 0.0)
        usage: Any = reply.get("usage")
        if schema_error(usage, {"prompt_tokens": int, "completion_tokens": int}) is not None:
            usage = {"prompt_tokens": 0, "completion_tokens": 0}
        return reply["choices"][0]["message"]["content"], usage["prompt_tokens"], usage["completion_tokens"]

    async def _post(self, body: dict[str, Any]) -> tuple[httpx2.Response, bytes]:
        """Return the response and its content. Raise `AttemptError` if it is too large or not complete in time."""
        # Refuse compression, because a small compressed response could expand to any size.
        headers = {"Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        # Ignore proxy settings for http on this machine, because a proxy would receive the key unencrypted.
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
