"""Prompts for the suite `needle`, as in LWM (arXiv 2402.08268): a question about numbers hidden in a long text."""
# Axes of arrays: N = tokens of a text

import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

from difftx.config.eval import NeedleCaseConfig, NeedleConfig
from difftx.data.packing import PackedRows
from difftx.data.sources import may_be_store, open_split, read_texts
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError
from difftx.storage.paths import path_of
from difftx.training.run import Run

HAYSTACK = "eval.needle.haystack"  # Field with the path of the long text.
TEXT_TOKENS = 2**20  # Tokens to read from a corpus, or four times the longest excerpt if that is more.
TOLERANCE = 0.05  # To reach a sentence or character boundary, a needle may move by this share of the haystack.
SENTENCE_END = re.compile(rb"[.!?][\"')\]]*$")
LINE_END = re.compile(rb"\n[ \t]*$")
# Names of cities. None contains another.
NAMES = """
Accra Algiers Amsterdam Ankara Athens Auckland Baghdad Bangkok Barcelona Beijing Belgrade Berlin Bogota Boston
Brussels Budapest Cairo Canberra Caracas Chicago Copenhagen Dakar Damascus Delhi Denver Dublin Edinburgh
Geneva Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kabul Kampala Kiev Lagos Lima Lisbon London
Madrid Manila Melbourne Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka Oslo Ottawa Paris Prague
Rabat Riga Rome Santiago Seattle Seoul Shanghai Sofia Stockholm Sydney Tehran Tokyo Toronto Tunis Vancouver
Venice Vienna Warsaw Zurich
"""
CITIES = tuple(NAMES.split())
NEEDLE = "\nThe magic number for {city} is {number}.\n"
ONE_QUESTION = "\n\nQuestion: What is the magic number for {cities}?\nAnswer: The magic number for {cities} is"
SEVERAL_QUESTIONS = "\n\nQuestion: What are the magic numbers for {cities}?\nAnswer: The magic numbers for {cities} are"
DIGITS = 7
MIN_HAYSTACK_TOKENS = 16  # Depths have no meaning in a shorter haystack.


@dataclasses.dataclass(frozen=True)
class Text:
    """A tokenised text and its boundaries."""

    tokens_N: np.ndarray  # Token ids, int32.
    is_sentence_end: np.ndarray  # Entry i: whether a sentence ends before token i, bool `[N + 1]`.
    is_character_end: np.ndarray  # Entry i: whether a character ends before token i, bool `[N + 1]`.

    def excerpt(self, length: int, rng: np.random.Generator) -> "Text":
        """Draw an excerpt of `length` tokens that begins and ends at sentence ends.

        If there is none, let it end at any character boundary, then also begin at any. If there is still none, return
        the beginning of the text.
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

        Except for depths 0 and 1, move to the nearest sentence end. If none is within `TOLERANCE`, move to the nearest
        character boundary.
        """
        exact, farthest = depth * len(self.tokens_N), TOLERANCE * len(self.tokens_N)
        if depth not in (0, 1):
            for is_boundary in (self.is_sentence_end, self.is_character_end):
                positions = np.flatnonzero(is_boundary)
                distances = np.abs(positions - exact)
                if len(positions) and np.min(distances) <= farthest:
                    return int(positions[np.argmin(distances)])
        return round(exact)


@dataclasses.dataclass(frozen=True)
class NeedleItem:
    """The parameters of a prompt. Prompts that only differ in `sample` form a cell."""

    length: int  # Number of tokens in prompt and answer together.
    case: NeedleCaseConfig
    depth: float  # Relative position of the queried needles in the haystack, 0 to 1.
    sample: int

    @property
    def id(self) -> str:
        return f"{self.cell}/{self.sample}"

    @property
    def cell(self) -> str:
        return f"{self.length}/{self.case.needles}-{self.case.queries}/{self.depth:g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedlePrompt:
    """A prompt, with the token span (start, stop) of each part. The span of a needle includes its line breaks."""

    item: NeedleItem
    tokens: list[int]  # `item.length - eval.needle.new_tokens` token ids.
    asked: tuple[tuple[int, int], ...]  # Spans of the queried needles, in the order of the question.
    others: tuple[tuple[int, int], ...]  # Spans of the needles that are not queried.
    question: tuple[int, int]  # Span of the question and the beginning of the answer.
    numbers: tuple[str, ...]  # The expected numbers, in the order of `asked`.


class NeedlePrompts:
    """The prompts of the suite `needle`. The same settings, haystack and tokenizer always give the same prompts.

    Prompts that only differ in depth have the same haystack, cities, numbers and unqueried needles.
    """

    def __init__(
        self,
        run: Run,
        settings: NeedleConfig | None = None,
        *,
        length_field: str = "eval.needle.lengths",
        case_field: str = "eval.needle.cases",
    ):
        """Read the haystack. `settings` replaces `eval.needle`. Errors mention `length_field` and `case_field`."""
        self._settings = settings = settings or run.config.eval.needle
        self._tokenizer = run.tokenizer
        self.text_of = run.tokenizer.decode  # The suite `attention` decodes prompt tokens for its charts.
        context_length = run.config.data.sequence_length
        self.cases, self.depths = settings.cases, settings.depths
        self.lengths = sorted(settings.lengths) or [context_length]
        if self.lengths[-1] > context_length:
            raise UserError(
                f"{length_field}: {self.lengths[-1]} tokens are more than the model's context "
                f"data.sequence_length={context_length}; use at most that"
            )
        needles = max(case.needles for case in self.cases)
        if needles > len(CITIES):
            raise UserError(f"{case_field}: needles={needles}, and there are {len(CITIES)} cities; use fewer")
        # The message only needs a fix for the longest prompts, because it also fixes shorter ones.
        longest = max(self.cases, key=self._minimum_prompt_tokens)
        prompt_tokens, new_tokens = self._minimum_prompt_tokens(longest), settings.new_tokens
        if self.lengths[0] < prompt_tokens + new_tokens:
            raise UserError(
                f"{length_field}: {self.lengths[0]} tokens do not hold {longest.needles} needles, a short text and a "
                f"question, which take {prompt_tokens}, and eval.needle.new_tokens={new_tokens}; use at least "
                f"{prompt_tokens + new_tokens} (the model's context is data.sequence_length={context_length}), fewer "
                f"needles ({case_field}) or fewer new tokens, or leave out the suite"
            )
        tokens = read_haystack(run, longest=self.lengths[-1])
        self.haystack_tokens = len(tokens)
        self._text = find_boundaries(tokens, run.tokenizer, longest=self.lengths[-1])
        parameters = itertools.product(self.lengths, self.cases, self.depths, range(settings.samples))
        self.items = list(itertools.starmap(NeedleItem, parameters))

    def prompt(self, item: NeedleItem) -> NeedlePrompt:
        """Return the prompt of an item. Random choices depend on the settings and on all item fields except `depth`."""
        needles, queries = item.case.needles, item.case.queries
        rng = np.random.default_rng([self._settings.seed, item.length, needles, queries, item.sample])
        cities = [CITIES[i] for i in rng.choice(len(CITIES), needles, replace=False)]
        distinct: dict[str, None] = {}
        while len(distinct) < needles:
            distinct[str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS))] = None
        numbers = list(distinct)
        sentences = [self._needle(city, number) for city, number in zip(cities, numbers, strict=True)]
        question = self._question(cities[:queries])
        tokens = list(self._tokenizer.prefix)
        length = item.length - self._settings.new_tokens - len(tokens) - sum(map(len, sentences)) - len(question)
        haystack = self._text.excerpt(length, rng)
        # The first `queries` needles are queried, and placed at the item's depth in random order. `side` keeps them
        # adjacent if another needle gets the same position: they come before it in the first half of the haystack, and
        # after it in the second half.
        position, side = haystack.position_at(item.depth), 1 if item.depth > 0.5 else -1
        placed = [(position, side, needle) for needle in rng.permutation(queries).tolist()]
        placed += [(haystack.position_at(rng.random()), 0, needle) for needle in range(queries, needles)]
        spans, done = {}, 0
        for position, _, needle in sorted(placed, key=lambda entry: entry[:2]):
            tokens += haystack.tokens_N[done:position].tolist()
            spans[needle] = len(tokens), len(tokens) + len(sentences[needle])
            tokens += sentences[needle]
            done = position
        tokens += haystack.tokens_N[done:].tolist()
        return NeedlePrompt(
            item=item,
            tokens=tokens + question,
            asked=tuple(spans[needle] for needle in range(queries)),
            others=tuple(spans[needle] for needle in range(queries, needles)),
            question=(len(tokens), len(tokens) + len(question)),
            numbers=tuple(numbers[:queries]),
        )

    def _needle(self, city: str, number: str) -> list[int]:
        return self._tokenizer.encode_ordinary(NEEDLE.format(city=city, number=number), continues=True)

    def _question(self, cities: Sequence[str]) -> list[int]:
        if len(cities) == 1:
            return self._tokenizer.encode_ordinary(ONE_QUESTION.format(cities=cities[0]), continues=True)
        listed = f"{', '.join(cities[:-1])} and {cities[-1]}"
        return self._tokenizer.encode_ordinary(SEVERAL_QUESTIONS.format(cities=listed), continues=True)

    def _minimum_prompt_tokens(self, case: NeedleCaseConfig) -> int:
        """Return a sufficient number of tokens for a prompt with the shortest haystack, without its answer.

        Count one token per digit, the maximum for a number.
        """
        longest = sorted(CITIES, key=lambda city: len(self._needle(city, "")), reverse=True)[: case.needles]
        needle_parts = [self._needle(city, "") for city in longest]
        parts = [self._tokenizer.prefix, *needle_parts, self._question(longest[: case.queries])]
        return sum(map(len, parts)) + case.needles * DIGITS + MIN_HAYSTACK_TOKENS


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
    """Return the token ids of the text at `eval.needle.haystack`. The default is the first validation set with text."""
    path, limit = run.config.eval.needle.haystack, max(TEXT_TOKENS, 4 * longest)
    if path is not None and not may_be_store(path_of(HAYSTACK, path)):
        parts, count = [np.empty(0, np.uint32)], 0
        for text in read_texts(path, HAYSTACK):
            parts.append(run.tokenizer.encode_to_numpy(text))
            count += len(parts[-1])
            if count >= limit:
                break
        tokens = np.concatenate(parts)
    else:
        stores = [rows.store for rows in run.data.valid.values() if isinstance(rows, PackedRows)]
        if path is not None:
            stores = [open_split(run.config.data, path, "valid", run.tokenizer, HAYSTACK)]
        if not stores:
            raise UserError(f"{HAYSTACK} is not set, and no validation set is text; set it to the path of a text")
        tokens = stores[0].slice(0, min(len(stores[0]), limit))
    tokens = tokens[~np.isin(tokens, [run.tokenizer.eot_token, *run.tokenizer.prefix])]
    if not len(tokens):
        raise UserError(f"{HAYSTACK}={path!r}: there is no text; use a file that contains text")
    return tokens
