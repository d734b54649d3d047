"""A client of any endpoint that speaks OpenAI's chat completions: patient, paced, and silent about its key."""

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
from difftx.evals.bounded_http import RequestError, Response, may_carry_key, post_json
from difftx.files import misfit

WORTH_ANOTHER_ATTEMPT = {408, 409, 425, 429}  # HTTP status; and all from 500.
LONGEST_REASON = 200  # Characters of what an endpoint says, in a message.
LONGEST_EXAMINED = 4096  # Characters of what an endpoint says, from which that is taken.
LONGEST_RETRY_SECONDS = 10**9
KEY_NAME = re.compile("_(KEY|TOKEN)$")  # Of an environment variable that may be sent.
SHORTEST_PART = 6  # Characters of a key that are masked in messages; "sk-" and the last four are often shown.


class Reply(NamedTuple):
    """What an endpoint answered, and what it charges for."""

    text: str
    tokens_in: int | None  # None: it does not say.
    tokens_out: int | None


class AttemptError(Exception):
    """An attempt failed in a way that another may not; `wait_seconds`, if the endpoint says how long to wait."""

    def __init__(self, reason: str, wait_seconds: float | None = None):
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class StoppedError(Exception):
    """No more is to be asked."""


class ChatEndpoint:
    """Sends requests, from any number of threads, and sends again what failed."""

    def __init__(self, config: JudgeConfig):
        """Read the key from the environment.

        Raises:
            UserError: the key is not there, cannot be a key, or would be sent unencrypted to another machine.
        """
        self._config, self._key = config, _key(config.key_variable)
        if self._key is not None and not may_carry_key(config.base_url):
            raise UserError(
                f"eval.judge.base_url={config.base_url}: a key is sent over https, or over http within this machine "
                "(localhost); use https, or eval.judge.key_variable=none for an endpoint that needs no key"
            )
        self.url = f"{config.base_url.rstrip('/')}/chat/completions"
        self._pace = _Pace(config.requests_per_minute)

    def ask[T](self, body: dict[str, Any], read: Callable[[Reply], T]) -> T:
        """Return what `read` makes of the reply to a request; where it raises an `AttemptError`, ask again.

        Raises:
            UserError: the endpoint refuses the key, or the request.
            RunError: all attempts failed.
            StoppedError: after one of these in another thread, or after `stop`.
        """
        try:
            return self._ask(body, read)
        except (UserError, RunError):
            self.stop()
            raise

    def stop(self) -> None:
        """Let no thread ask anything any more, nor wait."""
        self._pace.stop()

    def public(self, text: str) -> str:
        """Return a text without the key, whoever wrote it there."""
        return text if self._key is None else text.replace(self._key, "(key)")

    def brief(self, text: str) -> str:
        """Return the beginning of a text for a message, without the key and without parts of it."""
        text = text[:LONGEST_EXAMINED]
        masked = text if self._key is None else _without_parts(text, self._key)
        return " ".join(masked.split())[:LONGEST_REASON]

    def _ask[T](self, body: dict[str, Any], read: Callable[[Reply], T]) -> T:
        longest, reason = self._config.longest_wait_seconds, ""
        for attempt in range(self._config.attempts):
            self._pace.turn()
            try:
                return read(self._post(body))
            except AttemptError as error:
                reason = str(error)
                if error.wait_seconds is not None:
                    self._hold(error.wait_seconds, reason)
                if attempt + 1 < self._config.attempts:
                    self._pace.sleep(min(self._config.backoff_seconds * 2**attempt, longest))
        raise RunError(
            f"{self.url}: eval.judge.attempts={self._config.attempts} failed, the last: {reason}; what it answered "
            "before is kept, and the same command goes on"
        )

    def _hold(self, seconds: float, reason: str) -> None:
        """Let all threads wait: the endpoint said so to one of them."""
        longest = self._config.longest_wait_seconds
        if seconds > longest:
            raise RunError(
                f"{self.url} asks to wait {seconds:.0f} s, longer than eval.judge.longest_wait_seconds={longest:g} "
                f"({reason}); what it answered before is kept, and the same command goes on"
            )
        self._pace.hold(seconds)

    def _post(self, body: dict[str, Any]) -> Reply:
        try:
            response = post_json(self.url, body, key=self._key, seconds=self._config.timeout_seconds)
        except RequestError as error:
            raise AttemptError(self.brief(str(error))) from error
        if response.status == 200:
            return self._reply(response)
        self._refuse(response)
        raise AttemptError(self._reason(response), _retry_after(response.headers.get("Retry-After")))

    def _refuse(self, response: Response) -> None:
        """Raise for an answer that would be the same again."""
        status = response.status
        if status in (401, 403):
            where = f"the key in the environment variable {self._config.key_variable}"
            wanted = "a request without a key; set eval.judge.key_variable" if self._key is None else where
            raise UserError(f"{self.url} refuses {wanted} (HTTP {status})")
        if status < 500 and status not in WORTH_ANOTHER_ATTEMPT:
            raise UserError(
                f"{self.url} refuses the request: {self._reason(response)}; see eval.judge.base_url and "
                "eval.hallucination.judge_model"
            )

    def _reply(self, response: Response) -> Reply:
        try:
            content = json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise AttemptError("the reply is not JSON") from error
        wrong = misfit(content, {"choices": [{"message": {"content": str}}]})
        if wrong is None and not content["choices"]:
            wrong = "choices: empty"
        if wrong is not None:  # Some put their errors here.
            raise AttemptError(f"the reply is no chat completion, {wrong}: {self._reason(response)}")
        usage = content.get("usage")
        if misfit(usage, {"prompt_tokens": int, "completion_tokens": int}) is not None:
            usage = {"prompt_tokens": None, "completion_tokens": None}
        return Reply(content["choices"][0]["message"]["content"], usage["prompt_tokens"], usage["completion_tokens"])

    def _reason(self, response: Response) -> str:
        """Return the status, and what the endpoint says of it."""
        try:
            text = str(json.loads(response.content)["error"]["message"])
        except (ValueError, RecursionError, TypeError, KeyError):
            text = response.content.decode(errors="replace")
        return f"HTTP {response.status}: {self.brief(text) or 'it says no more'}"


class _Pace:
    """Turns of several threads, so far apart as the limit wants."""

    def __init__(self, per_minute: float | None):
        self._gap = 60 / per_minute if per_minute else 0.0
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._free_at = time.monotonic()

    def turn(self) -> None:
        """Wait for a turn and take it."""
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
        """Give no turn for so long."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic() + seconds)

    def sleep(self, seconds: float) -> None:
        """Wait in one thread."""
        if self._stopped.wait(seconds):
            raise StoppedError

    def stop(self) -> None:
        """End all waiting."""
        self._stopped.set()


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
            "eval.judge.base_url, or the field to none for an endpoint that wants no key"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"eval.judge.key_variable={variable!r}: what this environment variable holds is not a key")
    return key


def _without_parts(text: str, key: str) -> str:
    """Return a text in which everything that it has in common with the key, from some characters on, is masked."""
    kept, at = [], 0
    while at < len(text):
        end = at
        while end < len(text) and text[at : end + 1] in key:
            end += 1
        is_part = end - at >= min(SHORTEST_PART, len(key))
        kept.append("(key)" if is_part else text[at])
        at = end if is_part else at + 1
    return "".join(kept)


def _retry_after(value: str | None) -> float | None:
    """Return the seconds that the header Retry-After names, as a number or a date; None if it names none.

    A longer time than `LONGEST_RETRY_SECONDS` counts as that.
    """
    if value is None:
        return None
    try:
        seconds = urllib3.util.Retry().parse_retry_after(value)
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):  # Also a number or a year without end.
        return None
    return float(min(seconds, LONGEST_RETRY_SECONDS))
