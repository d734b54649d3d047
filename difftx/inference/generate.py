"""Generate text for prompts. The text can be streamed while it is generated."""

import codecs
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np

from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError
from difftx.inference import decode
from difftx.inference.decode import LanguageModel, Rows
from difftx.inference.sampling import Sampling

# Commands and suites pass this many requests per batch row to `generate`. Rows that end early are refilled with waiting
# requests. More requests per call would lose more work if the process is killed.
REQUESTS_PER_ROW = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and settings for completing it."""

    prompt: Sequence[int]  # Token ids, at least one.
    new_tokens: int  # Largest number of new tokens.
    seed: int  # Seed below 2**32. The samples do not depend on other requests of the batch.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The text generated after a prompt."""

    tokens: list[int]  # New token ids, including those of a stop string but not the end-of-text token.
    text: str  # Text of these tokens, cut off before a stop string.
    ended_by: Literal["end of text", "stop string", "limit"]


def generate(
    lm: LanguageModel,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] = lambda index, text: None,
    batch_rows: int | None = None,
) -> list[Completion]:
    """Complete all requests. A text ends before the first occurrence of a string in `stop` (see `TextStream`).

    After each block of tokens, `on_text(index, text)` is called with the new text of each request. The batch has at
    most `batch_rows` rows (None: one per request). When half of its rows have ended, waiting requests replace them.
    """
    for index, request in enumerate(requests):
        check(lm, request, f"prompt {index}")
    texts = [_RowText(lm, request, stop) for request in requests]
    waiting = collections.deque(range(len(requests)))

    def prefilled(count: int) -> tuple[list[int], Rows]:
        """Prefill up to `count` waiting requests. Return their indices and rows."""
        taken = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        new = [requests[index] for index in taken]
        room = max(len(r.prompt) + min(r.new_tokens, decode.ROOM_TOKENS) for r in new)
        seeds, limits = [r.seed for r in new], [r.new_tokens for r in new]
        return taken, decode.prefill(lm, [r.prompt for r in new], seeds=seeds, limits=limits, room=room)

    with jax.set_mesh(lm.mesh):
        active, rows = prefilled(batch_rows or len(requests))  # `active[b]` is the request of row b.
        while waiting or not all(texts[index].ended_by for index in active):
            ended = [row for row, index in enumerate(active) if texts[index].ended_by]
            if waiting and 2 * len(ended) >= len(active):
                taken, new_rows = prefilled(len(ended))
                request_of_row = dict(zip(ended, taken, strict=False))
                active = [request_of_row.get(row, index) for row, index in enumerate(active)]
                rows = decode.replaced(lm, rows, new_rows, list(request_of_row))
            room = max(texts[index].room() for index in active if not texts[index].ended_by)
            rows, token_BN = decode.next_tokens(lm, rows, sampling, room=room)
            for row, index in enumerate(active):
                if not texts[index].ended_by and (new := texts[index].add(token_BN[row].tolist())):
                    on_text(index, new)
            if any(texts[index].ended_by == "stop string" for index in active):
                # The device detects the end-of-text token and the limit, but not stop strings.
                done_B = np.ones(len(token_BN), bool)
                done_B[: len(active)] = [bool(texts[index].ended_by) for index in active]
                rows = dataclasses.replace(rows, done_B=decode.put(lm.mesh, done_B))
    return [text.completion() for text in texts]


def check(lm: LanguageModel, request: Request, name: str) -> None:
    """Raise `UserError` if a request is empty or too long for the model's context. `name` begins the message."""
    prompt, new, context_length = len(request.prompt), request.new_tokens, lm.context_length
    if not prompt:
        raise UserError(f"{name} is empty; give it at least one token")
    if (token := max(request.prompt)) >= lm.config.model.embeddings:
        raise UserError(f"{name} has token id {token}, but the model has only {lm.config.model.embeddings} embeddings")
    if prompt >= context_length:
        raise UserError(
            f"{name} has {prompt} tokens, and the model's context data.sequence_length={context_length}; shorten it"
        )
    if not 0 < new <= context_length - prompt:
        raise UserError(
            f"{name} has {prompt} tokens, so that new_tokens={new} does not fit the model's context "
            f"data.sequence_length={context_length}; use 1 to {context_length - prompt}"
        )


class TextStream:
    """Converts one row's tokens to text as they arrive. Holds back incomplete characters and possible stop strings.

    The text does not contain special tokens. Stop strings are searched twice, in the text with the names of special
    tokens and in the text without them: lm-eval's Hugging Face models stop at a string in the former, but cut the
    latter.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self.text = ""  # All text that is not held back.
        self.stopped = False  # Whether a stop string has occurred. `text` ends before it.
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # The text that is held back, including the names of special tokens.
        self._shown: list[int] = []  # Indices of the characters in `_held` outside the names of special tokens.

    def add(self, token: int) -> str:
        """Add a token. Return the new text before an incomplete character or a possible start of a stop string."""
        if value := self._tokenizer.token_bytes[token]:
            return self._release(self._decoder.decode(value))
        return self._release(self._tokenizer.decode([token]), is_name=True)

    def finish(self) -> str:
        """Return the text that is still held back after the last token."""
        return self._release(self._decoder.decode(b"", final=True), final=True)

    def _release(self, new: str, *, is_name: bool = False, final: bool = False) -> str:
        if self.stopped:
            return ""
        if not is_name:
            self._shown += range(len(self._held), len(self._held) + len(new))
        held, shown = self._held + new, self._shown
        # The text with and without special tokens (usually equal), each with the indices of its characters in `held`.
        texts = {held: range(len(held)), "".join(held[i] for i in shown): shown}
        searches = [(text, at, stop) for text, at in texts.items() for stop in self._stop]
        # The stop string that is complete first ends the text. If several end at the same character, use the longest.
        found = [(at[i + len(stop) - 1], at[i]) for text, at, stop in searches if (i := text.find(stop)) >= 0]
        end = len(held)
        if found:
            self.stopped, end = True, min(found)[1]
        elif not final:
            end = min((at[-n] for text, at, stop in searches if (n := _overlap(text, stop))), default=end)
        self._held, self._shown = held[end:], [i - end for i in shown if i >= end]
        text = "".join(held[i] for i in shown if i < end)
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


class _RowText:
    """The new tokens and the text of one request during generation."""

    def __init__(self, lm: LanguageModel, request: Request, stop: Sequence[str]):
        self.ended_by: Literal["", "end of text", "stop string", "limit"] = ""
        self._request, self._end = request, lm.tokenizer.eot_token
        self._tokens: list[int] = []
        self._stream = TextStream(lm.tokenizer, stop)

    def room(self) -> int:
        """Return the number of cache slots that the row needs, including its next block."""
        left = self._request.new_tokens - len(self._tokens)
        return len(self._request.prompt) + len(self._tokens) + min(left, decode.BLOCK_TOKENS)

    def add(self, tokens: Sequence[int]) -> str:
        """Add a block of tokens and return the new text that is not held back."""
        text = ""
        for token in tokens:
            text += self._stream.add(token)
            if token == self._end:
                self.ended_by = "end of text"
                break
            self._tokens.append(token)
            if self._stream.stopped:
                self.ended_by = "stop string"
                break
            if len(self._tokens) == self._request.new_tokens:
                self.ended_by = "limit"
                break
        return text + self._stream.finish() if self.ended_by else text

    def completion(self) -> Completion:
        assert self.ended_by
        return Completion(tokens=self._tokens, text=self._stream.text, ended_by=self.ended_by)
