"""The input and output of judges, which decide whether answers are accurate, and a judge that needs no network."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from difftx.config.eval import HallucinationConfig
from difftx.evals.hallucination import overlap
from difftx.progress import Work


class Case(NamedTuple):
    """An answer to judge."""

    kind: str  # An entry of `difftx.config.eval.KINDS`.
    document: str  # The part of the document that the prompt contained.
    question: str | None  # None for summarisation.
    references: tuple[str, ...]  # Reference answers.
    answer: str


class Verdict(NamedTuple):
    """A judge's decision."""

    accurate: bool
    why: str


class OfflineJudge:
    """A judge that compares words, and recognises neither paraphrases nor contradictions.

    An answer to a question is right if it contains the words of a reference, in order and without gaps. A summary is
    right if at least a share `eval.hallucination.support_threshold` of its runs of `support_words` consecutive words
    occur in the document or in a reference. The numbers are not comparable with those of a judge model.
    """

    label, name = "offline_judge", "offline judge: words in common"  # As those of `JudgeModel`.

    def __init__(self, settings: HallucinationConfig):
        self._words, self._threshold = settings.support_words, settings.support_threshold

    def verdicts(self, cases: Sequence[Case], what: str, work: Work) -> list[Verdict]:
        return [self._verdict(case) for case in work.track(cases, f"{what}, {self.label}", len(cases))]

    def details(self) -> dict[str, Any]:
        return {"support_words": self._words, "support_threshold": self._threshold}

    def _verdict(self, case: Case) -> Verdict:
        if case.kind == "summarisation":
            share = overlap.support(case.answer, (case.document, *case.references), self._words)
            return Verdict(share >= self._threshold, f"offline judge: {share:.3f} supported")
        found = [reference for reference in case.references if overlap.contains(case.answer, reference)]
        return Verdict(bool(found), f"offline judge: has {found[0]!r}" if found else "offline judge: has no reference")
