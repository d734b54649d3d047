"""Prompts of suite `hallucination`: a document, then a question or a request for a summary."""

import dataclasses

import numpy as np

from difftx.config.eval import HallucinationSetConfig
from difftx.data.records import Record, read_records
from difftx.errors import UserError
from difftx.json_files import schema_error
from difftx.storage.paths import path_of
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
MIN_DOCUMENT_TOKENS = 16  # Minimum number of tokens of the document for which a prompt must have room.


@dataclasses.dataclass(frozen=True, kw_only=True)
class HallucinationItem:
    """A document, its question and reference answers, and the prompt made from them."""

    id: str  # Name of the set and index of the record.
    name: str  # File and line number, for error messages.
    document: str  # The part of the document that the prompt contains.
    question: str | None  # None for summarisation.
    references: tuple[str, ...]  # Reference answers.
    tokens: tuple[int, ...] = ()  # Token ids of the prompt.
    cut: bool = False  # Whether the document was shortened.


class HallucinationSet:
    """Samples of a file. The same file, settings and tokenizer always give the same samples."""

    def __init__(self, run: Run, config: HallucinationSetConfig):
        """Read the file. Raise `UserError` if it is invalid, or if a prompt does not fit the model's context."""
        self.name, self.kind, self.new_tokens = config.name, config.kind, config.new_tokens
        self._config = config
        self._tokenizer = run.tokenizer
        self._window, settings = run.config.data.sequence_length, run.config.eval.hallucination
        self._refuse_long = settings.long_documents == "refuse"
        field = f"eval.hallucination.sets, {config.name}.path"
        records = read_records(path_of(field, config.path), field=field, what="documents")
        samples = [self._sample(f"{self.name}/{number}", record) for number, record in enumerate(records)]
        chosen = np.random.default_rng(settings.seed).permutation(len(samples))[: settings.samples]
        items = [self._with_prompt(samples[number]) for number in sorted(chosen.tolist())]
        # Items of similar length share a batch, since a batch takes as long as its longest row.
        self.items = sorted(items, key=lambda item: len(item.tokens))

    def _sample(self, name: str, record: Record) -> HallucinationItem:
        question = None if self._config.question is None else record.text(self._config.question).strip()
        document = _document(record, self._config.document).strip()
        if not document:
            raise UserError(f"{record.name}: {self._config.document} is only white space")
        references = _references(record, self._config.answers)
        return HallucinationItem(id=name, name=record.name, document=document, question=question, references=references)

    def _with_prompt(self, item: HallucinationItem) -> HallucinationItem:
        before = self._tokenizer.encode_prompt(BEFORE[self.kind])
        after = self._tokenizer.encode_ordinary(AFTER[self.kind].format(question=item.question), continues=True)
        tokens, document = self._tokenizer.encode_ordinary(item.document, continues=True), item.document
        room = self._window - len(before) - len(after) - self.new_tokens
        if room < MIN_DOCUMENT_TOKENS:
            raise UserError(
                f"{item.name}: question, instruction and new_tokens={self.new_tokens} leave {max(room, 0)} tokens of "
                f"data.sequence_length={self._window} for the document; they must leave {MIN_DOCUMENT_TOKENS}"
            )
        is_long = len(tokens) > room
        if is_long and self._refuse_long:
            raise UserError(
                f"{item.name}: the document has {len(tokens)} tokens, and data.sequence_length={self._window} leaves "
                f"{room} for it; leave it out, or set eval.hallucination.long_documents=cut_middle"
            )
        if is_long:
            tokens = tokens[: room - room // 2] + tokens[-(room // 2) :]
            document = self._tokenizer.decode(tokens)
        return dataclasses.replace(item, tokens=(*before, *tokens, *after), document=document, cut=is_long)


def _document(record: Record, field: str) -> str:
    value = record.field(field)
    if schema_error(value, [str]) is None:
        return "\n\n".join(value)
    if not isinstance(value, dict):
        return record.text(field)
    if schema_error(value, {"title": [str], "sentences": [[str]]}) is not None:
        raise UserError(f"{record.name}: {field} must be text, a list of texts, or have lists title and sentences")
    titles, sentences = value["title"], value["sentences"]
    if len(titles) != len(sentences):
        raise UserError(f"{record.name}: {field} has {len(titles)} titles and {len(sentences)} lists of sentences")
    return "\n\n".join(f"{title}\n{''.join(text)}" for title, text in zip(titles, sentences, strict=True))


def _references(record: Record, field: str) -> tuple[str, ...]:
    value = record.field(field)
    references = tuple(value) if schema_error(value, [str]) is None else (record.text(field),)
    if not references or not all(reference.strip() for reference in references):
        raise UserError(f"{record.name}: {field}={value!r} must be a text or a list of texts, and none empty")
    return references
