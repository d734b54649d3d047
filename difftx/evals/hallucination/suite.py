"""Suite `hallucination`: faithfulness to a given document (§3.6 of the Differential Transformer paper)."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from difftx.config.eval import KINDS, HallucinationSetConfig
from difftx.data.records import Record, read_records
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.hallucination import overlap
from difftx.evals.hallucination.judges import Case, JudgeModel, OfflineJudge
from difftx.evals.result import Heatmap, LineChart, Number, Result
from difftx.evals.suite import Suite
from difftx.inference.generate import Request
from difftx.inference.sampling import GREEDY
from difftx.json_files import schema_error
from difftx.parallel.multihost import decide_on_primary
from difftx.storage.paths import path_of
from difftx.training.run import Run

type Judge = OfflineJudge | JudgeModel
type Measures = dict[str, float]
type Entry = dict[str, Any]  # An item's answer and verdict, as JSON.


class Form(NamedTuple):
    """The prompts for one kind of set, and LongBench's measure of agreement between answer and reference."""

    before: str  # Prompt up to the document.
    after: str  # Rest of the prompt.
    stop: str  # String that ends an answer.
    agreement: str  # Name of the measure in the numbers.
    label: str  # Name of the measure in tables.
    agreement_of: Callable[[str, str], float]


FORMS = {
    "summarisation": Form(
        "Read the document and summarise it in a few sentences.\n\nDocument:\n",
        "\n\nSummary of the document:",
        "\n\n",
        "rouge_l",
        "ROUGE-L",
        overlap.rouge_l,
    ),
    "question_answering": Form(
        "Read the document and answer the question in a few words, from the document alone.\n\nDocument:\n",
        "\n\nQuestion: {question}\nAnswer:",
        "\n",
        "f1",
        "F1",
        overlap.f1,
    ),
}
MIN_DOCUMENT_TOKENS = 16  # A prompt must have room for this many tokens of the document.


@dataclasses.dataclass(frozen=True, kw_only=True)
class HallucinationItem:
    """A document, its question and reference answers, and the prompt made from them."""

    id: str  # Name of the set, and index of the record.
    name: str  # File and line number, for error messages.
    document: str  # The part of the document in the prompt.
    question: str | None  # None for summarisation.
    references: tuple[str, ...]  # Reference answers.
    tokens: tuple[int, ...] = ()  # Token ids of the prompt.
    cut: bool = False  # Whether the document was shortened.


class HallucinationSet:
    """Samples from a file. The same file, settings and tokenizer always give the same samples."""

    def __init__(self, run: Run, config: HallucinationSetConfig):
        """Read the file. Raise `UserError` if it is invalid, or if a prompt does not fit into the model's context."""
        self.name, self.kind, self.new_tokens = config.name, config.kind, config.new_tokens
        self._config = config
        self._tokenizer = run.tokenizer
        self._window, settings = run.config.data.sequence_length, run.config.eval.hallucination
        field = f"eval.hallucination.sets, {config.name}.path"
        records = read_records(path_of(field, config.path), field=field, what="documents")
        samples = [self._sample(f"{self.name}/{number}", record) for number, record in enumerate(records)]
        chosen = np.random.default_rng(settings.seed).permutation(len(samples))[: settings.samples]
        items = [self._with_prompt(samples[number]) for number in sorted(chosen.tolist())]
        # Batch items of similar length, because a batch takes as long as its longest row.
        self.items = sorted(items, key=lambda item: len(item.tokens))

    def _sample(self, name: str, record: Record) -> HallucinationItem:
        question = None if self._config.question is None else record.text(self._config.question).strip()
        document = _document(record, self._config.document).strip()
        if not document:
            raise UserError(f"{record.name}: {self._config.document} is only white space")
        answers = record.field(self._config.answers)
        references = tuple(answers) if schema_error(answers, [str]) is None else (record.text(self._config.answers),)
        if not references or not all(reference.strip() for reference in references):
            raise UserError(
                f"{record.name}: {self._config.answers}={answers!r} must be a text or a list of texts, and none empty"
            )
        return HallucinationItem(id=name, name=record.name, document=document, question=question, references=references)

    def _with_prompt(self, item: HallucinationItem) -> HallucinationItem:
        form = FORMS[self.kind]
        before = self._tokenizer.encode_prompt(form.before)
        after = self._tokenizer.encode_ordinary(form.after.format(question=item.question), continues=True)
        tokens, document = self._tokenizer.encode_ordinary(item.document, continues=True), item.document
        room = self._window - len(before) - len(after) - self.new_tokens
        if room < MIN_DOCUMENT_TOKENS:
            raise UserError(
                f"{item.name}: question, instruction and new_tokens={self.new_tokens} leave {max(room, 0)} tokens of "
                f"data.sequence_length={self._window} for the document; they must leave {MIN_DOCUMENT_TOKENS}"
            )
        if is_long := len(tokens) > room:
            tokens = tokens[: room - room // 2] + tokens[-(room // 2) :]
            document = self._tokenizer.decode(tokens)
        return dataclasses.replace(item, tokens=(*before, *tokens, *after), document=document, cut=is_long)


def evaluate(evaluation: Evaluation) -> Result:
    """Generate answers greedily. A judge decides whether each is accurate and free of hallucinations.

    `accuracy_when_answered_by_<judge>` only counts answers that are neither empty nor abstentions. `answer_rate`,
    `abstention_rate` and `empty_rate` add up to 1. Numbers named after a kind are means over the sets of that kind.
    """
    sets, judge = sets_and_judge(evaluation.run)
    entries = {data_set.name: _entries(evaluation, judge, data_set) for data_set in sets}
    measures = {
        data_set.name: _mean(
            [_measures(data_set.kind, item, entries[data_set.name][item.id], judge) for item in data_set.items]
        )
        for data_set in sets
    }
    tables: list[LineChart | Heatmap] = []
    for kind in KINDS:
        if names := [data_set.name for data_set in sets if data_set.kind == kind]:
            measures[kind] = _mean([measures[name] for name in names])
            tables.append(_table(kind, names, measures, judge))
    return Result(
        numbers={
            f"{name}_{measure}": _number(measure, value)
            for name, of_set in measures.items()
            for measure, value in of_set.items()
        },
        details={"judge": judge.name, **judge.details(), "sets": entries},
        charts=tables,
    )


def sets_and_judge(run: Run) -> tuple[list[HallucinationSet], Judge]:
    """Return the sets and the judge in the config. Raise `UserError` if there is no set, or one is invalid."""
    settings, judge = run.config.eval.hallucination, run.config.eval.judge
    if not settings.sets:
        raise UserError("suite 'hallucination': eval.hallucination.sets is empty; name files, see docs/config.md")
    sets = [HallucinationSet(run, config) for config in settings.sets]
    if settings.judge_model is None:
        return sets, OfflineJudge(settings)
    replies = run.files / "evals" / "hallucination" / "verdicts.jsonl"
    return sets, JudgeModel(settings, judge, replies)


def _entries(evaluation: Evaluation, judge: Judge, data_set: HallucinationSet) -> dict[str, Entry]:
    """Return the answer and verdict of each item, by id. Empty answers are inaccurate, and not sent to the judge."""

    def request_of(item: HallucinationItem) -> Request:
        return Request(prompt=item.tokens, new_tokens=data_set.new_tokens, seed=0)

    stop, what = (FORMS[data_set.kind].stop,), f"answers to {data_set.name}"
    answers = [
        (item, {"answer": done["text"].strip(), "tokens": done["tokens"], "ended_by": done["ended_by"]})
        for item, done in evaluation.completions(data_set.items, request_of, GREEDY, stop=stop, what=what)
    ]
    cases = [
        Case(data_set.kind, item.document, item.question, item.references, given["answer"])
        for item, given in answers
        if given["answer"]
    ]
    judged = iter(decide_on_primary(lambda: judge.verdicts(cases, data_set.name, evaluation.work)))
    entries = {}
    for item, given in answers:
        accurate, why = next(judged) if given["answer"] else (False, "the answer is empty")
        asked = {"question": item.question, "references": list(item.references), "document_cut": item.cut}
        entries[item.id] = asked | given | {"judge": judge.name, "accurate": accurate, "why": why}
    return entries


def _measures(kind: str, item: HallucinationItem, entry: Entry, judge: Judge) -> Measures:
    answer, form = entry["answer"], FORMS[kind]
    abstains = overlap.is_abstention(answer)
    is_answered = bool(answer) and not abstains
    measures = {f"accuracy_by_{judge.label}": entry["accurate"]}
    if is_answered:
        measures[f"accuracy_when_answered_by_{judge.label}"] = entry["accurate"]
    measures |= {
        "answer_rate": is_answered,
        "abstention_rate": abstains,
        "empty_rate": not answer,
        "answer_tokens": entry["tokens"],
        "answer_words": len(answer.split()),
        "unfinished_rate": entry["ended_by"] == "limit",
        form.agreement: max(form.agreement_of(answer, reference) for reference in item.references),
        "recall": max(overlap.recall(answer, reference) for reference in item.references),
        "documents_cut": item.cut,
    }
    # The paper requires that documents contain the answer. This cannot be checked for "yes" and "no".
    if kind == "question_answering" and not any(map(overlap.is_yes_or_no, item.references)):
        measures["reference_in_document"] = any(overlap.contains(item.document, text) for text in item.references)
    return measures


def _mean(items: Sequence[Measures]) -> Measures:
    names = dict.fromkeys(name for measures in items for name in measures)
    return {name: statistics.fmean(measures[name] for measures in items if name in measures) for name in names}


def _number(measure: str, value: float) -> Number:
    unit = {"answer_tokens": "per answer", "answer_words": "per answer", "recall": ""}.get(measure, "share")
    is_quality = measure.startswith("accuracy_") or measure in [form.agreement for form in FORMS.values()]
    return Number(value, unit, "higher" if is_quality else None)


def _table(kind: str, names: Sequence[str], measures: dict[str, Measures], judge: Judge) -> Heatmap:
    """Return Table 4 of the paper for the sets of one kind, plus answer rates and agreement with references."""
    rows = {
        f"accuracy_by_{judge.label}": "accuracy",
        f"accuracy_when_answered_by_{judge.label}": "accuracy when answered",
        "answer_rate": "answers",
        "abstention_rate": "abstentions",
        "recall": "recall of the reference",
        FORMS[kind].agreement: FORMS[kind].label,
    }
    return Heatmap(
        name=f"hallucination_{kind}",
        title=f"Free of hallucinations, {judge.name}",
        x_label=kind.replace("_", " "),
        y_label="share of samples, or mean over them",
        x=[*names, "mean"],
        y=list(rows.values()),
        values=[[measures[name].get(row) for name in (*names, kind)] for row in rows],
        value_label="share",
        low=0.0,
        high=1.0,
    )


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


SUITE = Suite(
    evaluate=evaluate,
    check=sets_and_judge,
    reads=("judge",),
    title="Hallucinations",
    explanation="Share of summaries and answers that a judge finds accurate, given the document that they are about.",
)
