"""Measures that compare the words of an answer with those of a reference or document."""

import collections
import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence

ARTICLES = {"a", "an", "the"}
MAX_ABSTENTION_WORDS = 20  # Longer answers are not abstentions.
ABSTAINING = re.compile(  # Matches the output of `words`, which has no articles, and "don t" for "don't".
    r"\b(unanswerable|no (answer|information)|(insufficient|not enough) information|"
    r"not (mentioned|stated|given|specified|provided|known|sure|clear|answerable|in document)|"
    r"(do not|don t|does not|doesn t|did not|didn t|could not|couldn t|can not|cannot|can t) "
    r"(know|say|answer|tell|determine|find|be (known|answered|determined|inferred|found)))\b"
)
# Abstentions that must be the whole answer. `words` reduces "N/A" to "n".
ABSTENTIONS = {"unknown", "unclear", "none", "n", "not applicable"}


def words(text: str) -> list[str]:
    """Return a text's words as SQuAD compares them: in lower case, without punctuation and articles.

    A text with only articles keeps them. Commas inside numbers are removed: 1,200 becomes 1200.
    """
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", unicodedata.normalize("NFKC", text).casefold())
    found = re.findall(r"\w+", plain)
    return [word for word in found if word not in ARTICLES] or found


def is_abstention(answer: str) -> bool:
    """Return whether a text declines to answer. An empty answer is not an abstention."""
    found = words(answer)
    plain = " ".join(found)
    return len(found) <= MAX_ABSTENTION_WORDS and (plain in ABSTENTIONS or bool(ABSTAINING.search(plain)))


def contains(answer: str, reference: str) -> bool:
    """Return whether an answer contains a reference's words consecutively. "yes" or "no" must be its first word."""
    has, wanted = words(answer), words(reference)
    if is_yes_or_no(reference):
        return has[:1] == wanted
    return bool(wanted) and tuple(wanted) in set(_runs(has, len(wanted)))


def is_yes_or_no(reference: str) -> bool:
    """Return whether a reference is "yes" or "no"."""
    return words(reference) in (["yes"], ["no"])


def support(answer: str, sources: Sequence[str], length: int) -> float:
    """Return the share of an answer's runs of `length` consecutive words that occur in a source."""
    has = words(answer)
    length = min(length, len(has))
    if not length:
        return 0.0
    there = {run for source in sources for run in _runs(words(source), length)}
    runs = list(_runs(has, length))
    return sum(run in there for run in runs) / len(runs)


def recall(answer: str, reference: str) -> float:
    """Return the share of a reference's words that the answer contains. Repeated words count as often as they occur."""
    return _common(words(answer), words(reference)) / max(len(words(reference)), 1)


def f1(answer: str, reference: str) -> float:
    """Return SQuAD's F1 score, which ignores the order of words."""
    return _f1(_common(words(answer), words(reference)), answer, reference)


def rouge_l(answer: str, reference: str) -> float:
    """Return the F1 score of ROUGE-L, which counts the longest common subsequence of words."""
    return _f1(_longest_common_subsequence(words(answer), words(reference)), answer, reference)


def _f1(common: int, answer: str, reference: str) -> float:
    return 2 * common / max(len(words(answer)) + len(words(reference)), 1)


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    return (collections.Counter(first) & collections.Counter(second)).total()


def _longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    row = [0] * (len(second) + 1)  # row[i] is the length for the words so far and `second[:i]`.
    for word in first:
        diagonal = 0
        for i, other in enumerate(second, start=1):
            diagonal, row[i] = row[i], diagonal + 1 if word == other else max(row[i], row[i - 1])
    return row[-1]


def _runs(sequence: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(itertools.islice(sequence, i, None) for i in range(length)), strict=False)
