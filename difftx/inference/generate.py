"""Generation of text: completions for a batch of prompts, streamed on request."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np

from difftx.errors import UserError
from difftx.inference import decode
from difftx.inference.decode import LanguageModel, Tokens
from difftx.inference.sampling import Sampling
from difftx.inference.text import TextStream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the settings of its completion."""

    prompt: Sequence[int]  # Token ids, at least one.
    new_tokens: int  # Largest number of new tokens.
    seed: int  # Seed below 2**32. The samples do not depend on other requests of the batch.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The text generated after a prompt."""

    # Generated tokens without the end-of-text token. They may include a stop string and text after it.
    tokens: list[int]
    text: str  # Text before the stop string.
    ended_by: Literal["end of text", "stop string", "limit"]


def generate(
    lm: LanguageModel,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] = lambda index, text: None,
) -> list[Completion]:
    """Complete all requests in one batch.

    A text ends before the first of the strings `stop` that occurs. After each block of tokens, `on_text` is called with
    the index of each request that has new text, and this text.

    Raises:
        UserError: a prompt is empty, or the prompt and its new tokens do not fit the model's context.
    """
    for index, request in enumerate(requests):
        check(lm, request, f"prompt {index}")
    count = decode.rows_for(len(requests), lm.mesh)
    chunk = decode.chunk_for(max(len(request.prompt) for request in requests), count, lm.mesh)
    seed_B, limit_B = np.zeros(count, np.uint32), np.zeros(count, np.int32)
    seed_B[: len(requests)] = [request.seed for request in requests]
    limit_B[: len(requests)] = [request.new_tokens for request in requests]
    prompts = Tokens.of([list(request.prompt) for request in requests], count, chunk)
    texts = [_RowText(lm, request, stop) for request in requests]
    with jax.set_mesh(lm.mesh):
        rows = decode.prefill(lm, prompts, chunk=chunk, seed_B=seed_B, limit_B=limit_B)
        while not all(text.ended_by for text in texts):
            rows = decode.with_room(lm, rows, max(text.room() for text in texts if not text.ended_by))
            rows, token_BN = decode.next_tokens(lm, rows, sampling)
            for index, text in enumerate(texts):
                if not text.ended_by and (new := text.add(token_BN[index].tolist())):
                    on_text(index, new)
            if any(text.ended_by == "stop string" for text in texts):
                # The device detects the end-of-text token and the limit, but not stop strings.
                done_B = np.array([*(bool(text.ended_by) for text in texts), *[True] * (count - len(texts))])
                rows = dataclasses.replace(rows, done_B=decode.put(lm.mesh, done_B))
    return [text.completion() for text in texts]


def check(lm: LanguageModel, request: Request, name: str) -> None:
    """Raise `UserError` if a request cannot be served; `name` identifies the request in the message."""
    prompt, new, window = len(request.prompt), request.new_tokens, lm.window
    if not prompt:
        raise UserError(f"{name} is empty; give it at least one token")
    if prompt >= window:
        raise UserError(
            f"{name} has {prompt} tokens, and the model's context data.sequence_length={window}; shorten it"
        )
    if not 0 < new <= window - prompt:
        raise UserError(
            f"{name} has {prompt} tokens, so that new_tokens={new} does not fit the model's context "
            f"data.sequence_length={window}; use 1 to {window - prompt}"
        )


class _RowText:
    """The new tokens and the text of one request."""

    def __init__(self, lm: LanguageModel, request: Request, stop: Sequence[str]):
        self.ended_by: Literal["", "end of text", "stop string", "limit"] = ""
        self._request, self._end = request, lm.tokenizer.eot_token
        self._tokens: list[int] = []
        self._stream = TextStream(lm.bytes_of, stop)

    def room(self) -> int:
        """Return the number of slots that the row needs for its next block."""
        left = self._request.new_tokens - len(self._tokens)
        return len(self._request.prompt) + len(self._tokens) + min(left, decode.BLOCK_TOKENS)

    def add(self, tokens: Sequence[int]) -> str:
        """Take a block of tokens, and return the text that can be printed now."""
        text = ""
        for token in tokens:
            if token == self._end:
                self.ended_by = "end of text"
                break
            self._tokens.append(token)
            text += self._stream.add(token)
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
