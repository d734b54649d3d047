"""Whether answers are accurate and free of hallucinations: what a judge is, and one that needs no network."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from difftx.config.eval import HallucinationConfig
from difftx.data.progress import Work
from difftx.evals import overlap


class Case(NamedTuple):
    """An answer to judge."""

    kind: str  # Of `difftx.config.eval.KINDS`.
    document: str  # As the model was given it.
    question: str | None
    references: tuple[str, ...]
    answer: str


class Verdict(NamedTuple):
    """What a judge says, as JSON a list."""

    accurate: bool
    why: str


class Judge(Protocol):
    """What gives verdicts."""

    @property
    def label(self) -> str:
        """Who it is, at the end of the name of every number that it decides: "offline_judge"."""
        ...

    @property
    def name(self) -> str:
        """Who it is, for tables and charts."""
        ...

    def verdicts(self, cases: Sequence[Case], what: str, work: Work) -> list[Verdict]:
        """Judge some cases; `what` they are, for the display."""
        ...

    def details(self) -> dict[str, Any]:
        """Return what is worth keeping beside the verdicts."""
        ...


class OfflineJudge:
    """Compares words; it knows neither paraphrases nor contradictions, and its numbers are no judge model's.

    An answer to a question is right if it has the words of a reference in a row. A summary is right if at least
    `eval.hallucination.support_threshold` of its runs of `support_words` words are in the document or a reference.
    """

    label, name = "offline_judge", "offline judge: words in common"

    def __init__(self, settings: HallucinationConfig):
        self._words, self._threshold = settings.support_words, settings.support_threshold

    def verdicts(self, cases: Sequence[Case], what: str, work: Work) -> list[Verdict]:
        """Judge each case by its kind."""
        return [self._verdict(case) for case in work.track(cases, f"{what}, {self.label}", len(cases))]

    def details(self) -> dict[str, Any]:
        """Return its settings."""
        return {"support_words": self._words, "support_threshold": self._threshold}

    def _verdict(self, case: Case) -> Verdict:
        if case.kind == "summarisation":
            share = overlap.support(case.answer, (case.document, *case.references), self._words)
            return Verdict(share >= self._threshold, f"offline judge: {share:.3f} supported")
        found = [reference for reference in case.references if overlap.contains(case.answer, reference)]
        return Verdict(bool(found), f"offline judge: has {found[0]!r}" if found else "offline judge: has no reference")
