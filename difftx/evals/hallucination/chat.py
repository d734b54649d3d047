"""A client of OpenAI's chat completions API, with retries, a rate limit, and error messages that hide the key."""

import json
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import urllib3

from difftx.config.eval import JudgeConfig
from difftx.errors import RunError, UserError
from difftx.evals.hallucination.bounded_http import RequestError, Response, may_carry_key, post_json
from difftx.json_files import schema_error

RETRIED_STATUS = {408, 409, 425, 429}  # HTTP status codes that are retried. All codes from 500 on are retried too.
MAX_REASON_CHARACTERS = 200  # Maximum number of characters of an endpoint's text that a message quotes.
MAX_EXAMINED_CHARACTERS = 4096  # An endpoint's text is truncated to this length before the key is masked.
MAX_RETRY_SECONDS = 10**9
KEY_NAME = re.compile("_(KEY|TOKEN)$")  # Only environment variables with such names may be sent to an endpoint.
SHORTEST_PART = 6  # Messages mask parts of the key of at least this length. Shorter ones, such as "sk-", are harmless.
RESUMES = "earlier answers are kept; run the same command again to resume"


class Reply(NamedTuple):
    """An endpoint's answer, and the numbers of billed tokens, or None if the endpoint does not report them."""

    text: str
    tokens_in: int | None
    tokens_out: int | None


class AttemptError(Exception):
    """Raised if a request fails but may succeed later. `wait_seconds` is the wait that the endpoint asks for."""

    def __init__(self, reason: str, wait_seconds: float = 0.0):
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class StoppedError(Exception):
    """Raised after `ChatEndpoint.stop` in threads that wait or would send a request."""


class ChatEndpoint:
    """A chat endpoint that any number of threads may use. Failed requests are repeated."""

    def __init__(self, config: JudgeConfig):
        """Read the key from the environment. Raise `UserError` if it is invalid or would be sent unencrypted."""
        self._config, self._key = config, _key(config.key_variable)
        if self._key is not None and not may_carry_key(config.base_url):
            raise UserError(
                f"eval.judge.base_url={config.base_url}: a key is sent over https, or over http within this machine "
                "(localhost); use https, or eval.judge.key_variable=none for an endpoint that needs no key"
            )
        self.url = f"{config.base_url.rstrip('/')}/chat/completions"
        self._pace = _Pace(config.requests_per_minute)

    def ask[T](self, body: dict[str, Any], read: Callable[[Reply], T]) -> T:
        """Send a request and return `read(reply)`. If `read` raises an `AttemptError`, repeat the request.

        `UserError` (the endpoint refuses the key or the request) and `RunError` (all attempts failed, or the endpoint
        asks for too long a wait) also stop all other threads, which raise `StoppedError`.
        """
        try:
            return self._ask(body, read)
        except (UserError, RunError):
            self.stop()
            raise

    def stop(self) -> None:
        """Make every thread that waits, or would send another request, raise `StoppedError`."""
        self._pace.stopped.set()

    def public(self, text: str) -> str:
        """Return a text with the key masked, since a server may repeat the key in its answer."""
        return text if self._key is None else text.replace(self._key, "(key)")

    def brief(self, text: str) -> str:
        """Return the beginning of a text for a message, with the key and long parts of the key masked."""
        text = text[:MAX_EXAMINED_CHARACTERS]
        masked = text if self._key is None else _without_parts(text, self._key)
        return " ".join(masked.split())[:MAX_REASON_CHARACTERS]

    def _ask[T](self, body: dict[str, Any], read: Callable[[Reply], T]) -> T:
        attempts, longest = self._config.attempts, self._config.longest_wait_seconds
        reason = ""
        for attempt in range(attempts):
            self._pace.turn()
            try:
                return read(self._post(body))
            except AttemptError as error:
                reason, wait = str(error), error.wait_seconds
            if wait > longest:
                raise RunError(
                    f"{self.url} asks to wait {wait:.0f} s, longer than eval.judge.longest_wait_seconds={longest:g} "
                    f"({reason}); {RESUMES}"
                )
            self._pace.hold(wait)
            if attempt + 1 < attempts:
                self._pace.sleep(min(self._config.backoff_seconds * 2**attempt, longest))
        raise RunError(f"{self.url}: eval.judge.attempts={attempts} failed, the last: {reason}; {RESUMES}")

    def _post(self, body: dict[str, Any]) -> Reply:
        """Send a request once. Raise `AttemptError` if another attempt may succeed, else `UserError`."""
        try:
            response = post_json(self.url, body, key=self._key, seconds=self._config.timeout_seconds)
        except RequestError as error:
            raise AttemptError(self.brief(str(error))) from error
        status = response.status
        if status == 200:
            return self._reply(response)
        if status in (401, 403):
            key = f"the key in the environment variable {self._config.key_variable}"
            refused = "a request without a key; set eval.judge.key_variable" if self._key is None else key
            raise UserError(f"{self.url} refuses {refused} (HTTP {status})")
        if status < 500 and status not in RETRIED_STATUS:
            raise UserError(
                f"{self.url} refuses the request: {self._reason(response)}; see eval.judge.base_url and "
                "eval.hallucination.judge_model"
            )
        raise AttemptError(self._reason(response), _retry_after(response.headers.get("Retry-After", "")))

    def _reply(self, response: Response) -> Reply:
        try:
            content = json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise AttemptError("the reply is not JSON") from error
        wrong = schema_error(content, {"choices": [{"message": {"content": str}}]})
        if wrong is None and not content["choices"]:
            wrong = "choices: empty"
        if wrong is not None:  # Some endpoints report errors with status 200.
            raise AttemptError(f"the reply is not a chat completion, {wrong}: {self._reason(response)}")
        text, usage = content["choices"][0]["message"]["content"], content.get("usage")
        if schema_error(usage, {"prompt_tokens": int, "completion_tokens": int}) is not None:
            return Reply(text, None, None)
        return Reply(text, usage["prompt_tokens"], usage["completion_tokens"])

    def _reason(self, response: Response) -> str:
        try:
            text = str(json.loads(response.content)["error"]["message"])
        except (ValueError, RecursionError, TypeError, KeyError):
            text = response.content.decode(errors="replace")
        return f"HTTP {response.status}: {self.brief(text) or 'no message'}"


class _Pace:
    """A rate limit that several threads share."""

    def __init__(self, per_minute: float | None):
        self._gap = 60 / per_minute if per_minute else 0.0
        self._lock, self.stopped = threading.Lock(), threading.Event()
        self._free_at = time.monotonic()

    def turn(self) -> None:
        """Wait until the rate limit allows a request, and count the request."""
        while True:
            with self._lock:
                now = time.monotonic()
                wait = self._free_at - now
                if wait <= 0:
                    self._free_at = now + self._gap
            self.sleep(max(wait, 0))
            if wait <= 0:
                return

    def hold(self, seconds: float) -> None:
        """Delay all requests by at least `seconds` from now."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic() + seconds)

    def sleep(self, seconds: float) -> None:
        """Block the calling thread, but raise `StoppedError` as soon as `stopped` is set."""
        if self.stopped.wait(seconds):
            raise StoppedError


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not KEY_NAME.search(variable):
        raise UserError(
            f"eval.judge.key_variable={variable!r}: only a variable whose name ends in _KEY or _TOKEN is sent to an "
            "endpoint; copy the key to such a variable, for example JUDGE_API_KEY"
        )
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"eval.judge.key_variable={variable!r}: this environment variable is not set; set it to the key of "
            "eval.judge.base_url, or set the field to none for an endpoint that needs no key"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"eval.judge.key_variable={variable!r}: the value of this environment variable is not a key")
    return key


def _without_parts(text: str, key: str) -> str:
    """Return a text in which every part of the key with at least `SHORTEST_PART` characters is masked."""
    kept, at = [], 0
    while at < len(text):
        end = at
        while end < len(text) and text[at : end + 1] in key:
            end += 1
        is_part = end - at >= min(SHORTEST_PART, len(key))
        kept.append("(key)" if is_part else text[at])
        at = end if is_part else at + 1
    return "".join(kept)


def _retry_after(value: str) -> float:
    """Return the seconds to wait for a Retry-After header, or 0 if it is neither a number nor a date."""
    try:
        seconds = urllib3.util.Retry().parse_retry_after(value)
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):  # The last two mean huge numbers.
        return 0.0
    return float(min(seconds, MAX_RETRY_SECONDS))
