"""Haystacks: excerpts of a long text with an exact number of tokens, which begin and end at sentence ends."""
# Axes of arrays: N = tokens of a text

import dataclasses
import re

import numpy as np

from difftx.data.packing import PackedRows
from difftx.data.sources import may_be_store, open_split, read_texts
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError
from difftx.storage.paths import path_of
from difftx.training.run import Run

FIELD = "eval.needle.haystack"
TEXT_TOKENS = 2**20  # Tokens to read from a corpus, or four times the longest excerpt if that is more.
TOLERANCE = 0.05  # Share of the haystack by which a needle may move to reach a sentence or character boundary.
SENTENCE_END = re.compile(rb"[.!?][\"')\]]*$")
LINE_END = re.compile(rb"\n[ \t]*$")


@dataclasses.dataclass(frozen=True)
class Text:
    """A tokenised text and its boundaries."""

    tokens_N: np.ndarray  # Token ids, int32.
    is_sentence_end: np.ndarray  # Entry i: whether a sentence ends before token i, bool `[N + 1]`.
    is_character_end: np.ndarray  # Entry i: whether a character ends before token i, bool `[N + 1]`.

    def excerpt(self, length: int, rng: np.random.Generator) -> "Text":
        """Draw an excerpt of `length` tokens that begins and ends at sentence ends.

        If there is none, the excerpt may end, or else also begin, at any character boundary. If there is still none,
        return the beginning of the text.
        """
        sentence, character = self.is_sentence_end, self.is_character_end
        start = 0
        for begin, end in ((sentence, sentence), (sentence, character), (character, character)):
            starts = np.flatnonzero(begin[: len(self.tokens_N) - length + 1] & end[length:])
            if len(starts):
                start = int(rng.choice(starts))
                break
        boundaries = slice(start, start + length + 1)
        return Text(self.tokens_N[start : start + length], sentence[boundaries], character[boundaries])

    def position_at(self, depth: float) -> int:
        """Return the number of tokens before a depth, for example about half of the tokens for depth 0.5.

        Except for depths 0 and 1, the position moves to the nearest sentence end, or to the nearest character boundary
        if no sentence end is within `TOLERANCE`.
        """
        exact, farthest = depth * len(self.tokens_N), TOLERANCE * len(self.tokens_N)
        if depth not in (0, 1):
            for is_boundary in (self.is_sentence_end, self.is_character_end):
                positions = np.flatnonzero(is_boundary)
                distances = np.abs(positions - exact)
                if len(positions) and np.min(distances) <= farthest:
                    return int(positions[np.argmin(distances)])
        return round(exact)


def find_boundaries(tokens: np.ndarray, tokenizer: Tokenizer, *, longest: int) -> Text:
    """Repeat a text until it has at least `longest` tokens, and find its boundaries."""
    tokens_N = np.resize(tokens, max(len(tokens), longest)).astype(np.int32)
    before_N, after_N = tokens_N[:-1], tokens_N[1:]
    values = [value or b"" for value in tokenizer.token_bytes]
    ends_sentence = np.array([bool(SENTENCE_END.search(value)) for value in values])
    ends_line = np.array([bool(LINE_END.search(value)) for value in values])
    begins_with_space = np.array([value[:1].isspace() for value in values])
    begins_character = np.array([not 0x80 <= (value[:1] or b"a")[0] < 0xC0 for value in values])
    is_sentence_end = (ends_sentence[before_N] & begins_with_space[after_N]) | ends_line[before_N]
    return Text(
        tokens_N,
        np.concatenate([[True], is_sentence_end, [True]]),
        np.concatenate([[True], begins_character[after_N], [True]]),
    )


def read_haystack(run: Run, *, longest: int) -> np.ndarray:
    """Return the token ids of the text at `eval.needle.haystack`, or by default of the first validation set of text."""
    path, limit = run.config.eval.needle.haystack, max(TEXT_TOKENS, 4 * longest)
    if path is not None and not may_be_store(path_of(FIELD, path)):
        parts, count = [np.empty(0, np.uint32)], 0
        for text in read_texts(path, FIELD):
            parts.append(run.tokenizer.encode_to_numpy(text))
            count += len(parts[-1])
            if count >= limit:
                break
        tokens = np.concatenate(parts)
    else:
        stores = [rows.store for rows in run.data.valid.values() if isinstance(rows, PackedRows)]
        if path is not None:
            stores = [open_split(run.config.data, path, "valid", run.tokenizer, FIELD)]
        if not stores:
            raise UserError(f"{FIELD} is not set, and no validation set is text; set it to the path of a text")
        tokens = stores[0].slice(0, min(len(stores[0]), limit))
    tokens = tokens[~np.isin(tokens, [run.tokenizer.eot_token, *run.tokenizer.prefix])]
    if not len(tokens):
        raise UserError(f"{FIELD}={path!r}: there is no text; use a file that contains text")
    return tokens
