"""Data for lm-eval's tasks from local JSON-lines files. The YAML files in tasks/ load it with the function `splits`.

A row has these fields:

    query, choices, gold                     the prompt, the answers, the index of the right answer
    context_options, continuation, gold      winogrande: the contexts, the continuation, the index of the right context

Questions are read from the file <task>_val for boolq, hellaswag, piqa and winogrande, and from <task>_test for all
other tasks. Few-shot examples are read from <task>_train. A query is the prompt that lm-eval's task of the same name
makes from the Hugging Face data set. In a boolq query, "Passage: " at the start and "Answer:" at the end are optional.
Rows that do not match `FORMS` are refused, because their scores would not be comparable.
"""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

from difftx.data.records import Record, read_records
from difftx.errors import UserError, did_you_mean, import_extra

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz")
FIELD = "eval.harness.data_path"
MARKS = re.compile(r"\[(title|header|step|substeps)\]")


@dataclasses.dataclass(frozen=True)
class Form:
    """Requirements for the rows of a task's data."""

    texts: tuple[int, ...]  # Allowed numbers of choices, or for winogrande of contexts.
    query: str  # Regular expression that matches a whole query.
    shown: str  # Description of the query for error messages.
    choices: tuple[str, ...] | None = None  # Choices that every row must have; None: any.
    has_marks: bool = False  # Whether to refuse marks in brackets, such as "[title]", which lm-eval removes.


_QUESTION = Form((2, 3, 4, 5), r"Question: .*\nAnswer:", "Question: …\nAnswer:")
# The forms follow the task files of the same names in lm-eval 0.4.13.
FORMS = {
    "arc_challenge": _QUESTION,
    "arc_easy": _QUESTION,
    "boolq": Form((2,), r"(Passage: )?.+\nQuestion: .+\?(\nAnswer:)?", "…\nQuestion: …?", choices=("no", "yes")),
    "hellaswag": Form((4,), r".+: .+", "activity: context", has_marks=True),
    "openbookqa": Form((4,), r"(?!Question: ).+(?<!\nAnswer:)", "the question alone"),
    "piqa": dataclasses.replace(_QUESTION, texts=(2,)),
    "winogrande": Form((2,), r"\S(.*\S)?", "the text after the gap, without spaces around it"),
}


def splits(*, task: str, data_path: str, num_fewshot: int, list_field: str, test: str, **_: Any) -> dict[str, Any]:
    """Return a task's data for lm-eval, one `datasets.Dataset` per split. "train" is empty if `num_fewshot` is 0.

    If not, "train" needs more than `num_fewshot` examples, because lm-eval may draw the question itself. `list_field`
    is the field with one text per answer. `test` is the name of the split with the questions.
    """
    text_field = "continuation" if list_field == "context_options" else "query"
    examine = functools.partial(_question, form=FORMS[task], text_field=text_field, list_field=list_field)
    train = _read(Path(data_path), task, "train", examine) if num_fewshot else []
    if num_fewshot and len(train) <= num_fewshot:
        raise UserError(
            f"{FIELD}={data_path}: {task}_train has {len(train)} examples, but num_fewshot={num_fewshot} needs "
            f"{num_fewshot + 1}"
        )
    found = {"train": train, test: _read(Path(data_path), task, test, examine)}
    columns = {
        name: {field: [row[field] for row in rows] for field in (text_field, list_field, "gold")}
        for name, rows in found.items()
    }
    datasets = import_extra("datasets", "eval")
    return {name: datasets.Dataset.from_dict(values) for name, values in columns.items()}


def _read(folder: Path, task: str, split: str, examine: Any) -> list[dict[str, Any]]:
    paths = [folder / f"{task}_{split}{suffix}" for suffix in SUFFIXES]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        near = did_you_mean(paths[0].name, [other.name for other in folder.glob("*.jsonl*")]) if folder.is_dir() else ""
        raise UserError(f"{FIELD}={folder} has no {paths[0].name}, plain or compressed.{near}")
    return [examine(record) for record in read_records(path, field=FIELD, what="questions")]


def _question(record: Record, *, form: Form, text_field: str, list_field: str) -> dict[str, Any]:
    texts, gold, text = record.field(list_field), record.field("gold"), record.text(text_field)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{record.name}: {list_field}={texts!r} must be a list of texts")
    if type(gold) is not int or not 0 <= gold < len(texts):
        raise UserError(f"{record.name}: gold={gold!r} must be an index of {list_field}, 0 … {len(texts) - 1}")
    why = None
    marked = next((part for part in (text, *texts) if MARKS.search(part)), None)
    if len(texts) not in form.texts:
        why = f"{list_field} has {len(texts)} texts, not {' or '.join(map(str, form.texts))}"
    elif form.choices is not None and tuple(texts) != form.choices:
        why = f"{list_field} must be {list(form.choices)}"
    elif not re.fullmatch(form.query, text, re.DOTALL):
        why = f"{text_field}={text!r} does not have the task's form, {form.shown!r}"
    elif form.has_marks and marked is not None:
        why = f"{marked!r} has a mark in brackets, which lm-eval removes"
    if why is not None:
        raise UserError(f"{record.name}: {why}; write the row as lm-eval's task does")
    return {text_field: text, list_field: texts, "gold": gold}
