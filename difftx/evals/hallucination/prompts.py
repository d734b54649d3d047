"""Prompts of suite `hallucination`: a document, then a question or a request for a summary.

The paper does not print its prompts. The prompts here were written for difftx, for models without instruction tuning.
An answer ends at a line break, a summary at an empty line. The document and the text around it are tokenised
separately.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple, TypeGuard

import numpy as np

from difftx.config.eval import HallucinationSetConfig
from difftx.data.records import Record, read_records
from difftx.errors import UserError
from difftx.training.run import Run

BEFORE = {
    "summarisation": "Read the document and summarise it in a few sentences.\n\nDocument:\n",
    "question_answering": "Read the document and answer the question in a few words, from the document alone.\n\n"
    "Document:\n",
}
AFTER = {
    "summarisation": "\n\nSummary of the document:",
    "question_answering": "\n\nQuestion: {question}\nAnswer:",
}
STOP = {"summarisation": ("\n\n",), "question_answering": ("\n",)}
FEWEST_TOKENS = 16  # Smallest number of document tokens that a prompt must have room for.


@dataclasses.dataclass(frozen=True, kw_only=True)
class HallucinationItem:
    """A sample of a set, and its prompt."""

    id: str  # Name in a journal: set and index of the record.
    tokens: tuple[int, ...]  # The prompt.
    document: str  # The part of the document that the prompt contains.
    cut: bool  # Whether the document was shortened.
    question: str | None  # None for summarisation.
    references: tuple[str, ...]  # Reference answers.


class _Sample(NamedTuple):
    name: str  # File and line, for messages.
    document: str
    question: str | None
    references: tuple[str, ...]


class HallucinationSet:
    """The samples of a file; the same file, settings and tokenizer always give the same samples."""

    def __init__(self, run: Run, config: HallucinationSetConfig):
        """Read the file.

        Raises:
            UserError: the file cannot be read or is empty, a line lacks a field or has one of the wrong type, or the
                context does not hold a prompt.
        """
        self.name, self.kind, self.new_tokens = config.name, config.kind, config.new_tokens
        self._config, self._tokenizer = config, run.tokenizer
        self._window, settings = run.config.data.sequence_length, run.config.eval.hallucination
        self._refuse_long = settings.long_documents == "refuse"
        field = f"eval.hallucination.sets, {config.name}.path"
        samples = [self._read(record) for record in read_records(Path(config.path), field=field, what="documents")]
        chosen = np.random.default_rng(settings.seed).permutation(len(samples))[: settings.samples]
        items = [self._item(number, samples[number]) for number in sorted(chosen.tolist())]
        # Items of similar length share a batch, since a batch takes as long as its longest row.
        self.items = sorted(items, key=lambda item: len(item.tokens))

    def _read(self, record: Record) -> _Sample:
        question = None if self._config.question is None else record.text(self._config.question).strip()
        document = _document(record, self._config.document).strip()
        if not document:
            raise UserError(f"{record.name}: {self._config.document} is only white space")
        return _Sample(record.name, document, question, _references(record, self._config.answers))

    def _item(self, number: int, sample: _Sample) -> HallucinationItem:
        before = self._encode(BEFORE[self.kind])
        after = self._encode(AFTER[self.kind].format(question=sample.question))
        tokens, document = self._encode(sample.document), sample.document
        room = self._window - len(before) - len(after) - self.new_tokens
        if room < FEWEST_TOKENS:
            raise UserError(
                f"{sample.name}: question, instruction and new_tokens={self.new_tokens} leave {max(room, 0)} tokens of "
                f"data.sequence_length={self._window} for the document; they must leave {FEWEST_TOKENS}"
            )
        is_long = len(tokens) > room
        if is_long and self._refuse_long:
            raise UserError(
                f"{sample.name}: the document has {len(tokens)} tokens, and data.sequence_length={self._window} leaves "
                f"{room} for it; leave it out, or set eval.hallucination.long_documents=cut_middle"
            )
        if is_long:
            tokens = tokens[: room - room // 2] + tokens[-(room // 2) :]
            document = self._tokenizer.decode(tokens)
        return HallucinationItem(
            id=f"{self.name}/{number}",
            tokens=(*before, *tokens, *after),
            document=document,
            cut=is_long,
            question=sample.question,
            references=sample.references,
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_ordinary(text)


def _document(record: Record, field: str) -> str:
    """Return the document in a field, which holds a text, a list of texts, or HotpotQA's titles and sentences."""
    value = record.field(field)
    if _are_texts(value):
        return "\n\n".join(value)
    if not isinstance(value, dict):
        return record.text(field)
    titles, sentences = value.get("title"), value.get("sentences")
    if not _are_texts(titles) or not isinstance(sentences, list) or not all(map(_are_texts, sentences)):
        raise UserError(f"{record.name}: {field} must be text, a list of texts, or have lists title and sentences")
    if len(titles) != len(sentences):
        raise UserError(f"{record.name}: {field} has {len(titles)} titles and {len(sentences)} lists of sentences")
    return "\n\n".join(f"{title}\n{''.join(text)}" for title, text in zip(titles, sentences, strict=True))


def _references(record: Record, field: str) -> tuple[str, ...]:
    value = record.field(field)
    references = tuple(value) if _are_texts(value) else (record.text(field),)
    if not references or not all(reference.strip() for reference in references):
        raise UserError(f"{record.name}: {field}={value!r} must be a text or a list of texts, and none empty")
    return references


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
