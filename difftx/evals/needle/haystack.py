"""Long texts in which a suite hides sentences: pieces of an exact number of tokens, split at sentence ends."""
#   N = tokens of the text, n = tokens of a piece

import re
from pathlib import Path

import numpy as np

from difftx.data.corpora import open_split, read_texts, text_files
from difftx.data.packing import PackedRows
from difftx.data.store import META, TokenStore
from difftx.data.tokenizer import token_bytes
from difftx.errors import UserError
from difftx.training.run import Run

TEXT_TOKENS = 2**20  # Tokens read from a corpus; four times the length of the longest piece, if that is more.
TOLERANCE = 0.05  # Largest distance from a depth to the sentence end that is used for it, as a share of the piece.
SENTENCE_END = re.compile(rb"[.!?][\"')\]]*$")
LINE_END = re.compile(rb"\n[ \t]*$")


class Haystack:
    """A tokenised text with its sentence boundaries."""

    def __init__(self, tokens_N: np.ndarray, bytes_of: list[bytes | None], *, longest: int):
        """Find the sentence boundaries of a text; a text shorter than the longest piece is repeated.

        Args:
            tokens_N: at least one token id.
            bytes_of: the bytes of each token id, as `token_bytes` returns them.
            longest: number of tokens of the longest piece.
        """
        self.text_tokens = len(tokens_N)
        self._tokens_N = np.resize(tokens_N, max(len(tokens_N), longest)).astype(np.int32)
        before_N, after_N = self._tokens_N[:-1], self._tokens_N[1:]
        values = [value or b"" for value in bytes_of]
        ends_sentence = np.array([bool(SENTENCE_END.search(value)) for value in values])
        ends_line = np.array([bool(LINE_END.search(value)) for value in values])
        begins_apart = np.array([value[:1].isspace() for value in values])
        begins_character = np.array([not 0x80 <= (value[:1] or b"a")[0] < 0xC0 for value in values])
        at_end = (ends_sentence[before_N] & begins_apart[after_N]) | ends_line[before_N]
        # Entry i is the boundary before token i, so there is one entry more than tokens.
        self._is_sentence_end = np.concatenate([[True], at_end, [True]])
        self._is_character_end = np.concatenate([[True], begins_character[after_N], [True]])

    def piece(self, length: int, rng: np.random.Generator) -> "Piece":
        """Draw a piece of `length` tokens that starts and ends at sentence ends.

        If the text has no such piece, the end, and if necessary also the start, may be any boundary between characters.
        If there is no such piece either, return the beginning of the text.
        """
        sentence, character = self._is_sentence_end, self._is_character_end
        for begin, end in ((sentence, sentence), (sentence, character), (character, character)):
            starts = np.flatnonzero(begin[: len(self._tokens_N) - length + 1] & end[length:])
            if len(starts):
                return self._piece(int(rng.choice(starts)), length)
        return self._piece(0, length)

    def _piece(self, start: int, length: int) -> "Piece":
        places = slice(start, start + length + 1)
        return Piece(
            self._tokens_N[start : start + length], self._is_sentence_end[places], self._is_character_end[places]
        )


class Piece:
    """A contiguous part of a text, with its sentence and character boundaries."""

    def __init__(self, tokens_n: np.ndarray, is_sentence_end: np.ndarray, is_character_end: np.ndarray):
        self.tokens_n = tokens_n
        self._sentence_ends, self._character_ends = np.flatnonzero(is_sentence_end), np.flatnonzero(is_character_end)

    def place(self, depth: float) -> int:
        """Return the number of tokens before a depth, given as a share from 0 to 1 of the piece.

        The result is the nearest sentence end within `TOLERANCE`, else the nearest character boundary within
        `TOLERANCE`, else the depth rounded to a token.
        """
        length = len(self.tokens_n)
        wanted = depth * length
        if depth in (0, 1):
            return round(wanted)
        near = [_nearest(ends, wanted) for ends in (self._sentence_ends, self._character_ends) if len(ends)]
        return next((at for at in near if abs(at - wanted) <= TOLERANCE * length), round(wanted))


def load_haystack(run: Run, path: str | None, field: str, *, longest: int) -> Haystack:
    """Read the text of a corpus: the validation split of a store, or text files written as for `data.path`.

    Args:
        run: the run whose tokenizer is used.
        path: path of the corpus; None: the run's first validation set of text.
        field: config field that holds the path, for messages.
        longest: number of tokens of the longest piece.

    Raises:
        UserError: there is no text, or it cannot be read.
    """
    wanted = max(TEXT_TOKENS, 4 * longest)
    if path is None:
        tokens = _tokens_of_store(_validation_text(run, field), wanted)
    elif Path(path).is_dir():
        store = open_split(run.config.data, path, "valid", run.tokenizer, field)
        tokens = _tokens_of_store(store, wanted)
    else:
        tokens = _tokens_of_text(run, path, field, wanted)
    tokens = tokens[tokens != run.tokenizer.eot_token]
    if not len(tokens):
        raise UserError(f"{field}={path!r}: there is no text; give a file that holds some")
    return Haystack(tokens, token_bytes(run.tokenizer), longest=longest)


def haystack_files(path: str | None, field: str) -> list[Path]:
    """Return the files that identify the content of a corpus; for a store, its metadata file, which holds hashes."""
    if path is None:
        return []
    return [Path(path) / META] if Path(path).is_dir() else text_files(path, field)


def _validation_text(run: Run, field: str) -> TokenStore:
    for rows in run.data.valid.values():
        if isinstance(rows, PackedRows):
            return rows.store
    raise UserError(f"{field} is not set, and no validation set is text to hide something in; set it to some text")


def _tokens_of_store(store: TokenStore, wanted: int) -> np.ndarray:
    return store.slice(0, min(len(store), wanted))


def _tokens_of_text(run: Run, path: str, field: str, wanted: int) -> np.ndarray:
    parts, count = [np.empty(0, np.uint32)], 0
    for text in read_texts(path, field):
        parts.append(run.tokenizer.encode_to_numpy(text, disallowed_special=()))
        count += len(parts[-1])
        if count >= wanted:
            break
    return np.concatenate(parts)


def _nearest(places: np.ndarray, wanted: float) -> int:
    return int(places[np.argmin(np.abs(places - wanted))])
