"""Data for lm-eval's tasks from local JSON-lines files. The YAML files in tasks/ load it with the function `splits`.

A row has these fields:

    query, choices, gold                     the prompt, the answers, the index of the right answer
    context_options, continuation, gold      winogrande: the contexts, the continuation, the index of the right context

Questions are read from the file <task>_val for boolq, hellaswag, piqa and winogrande, and from <task>_test for all
other tasks. Few-shot examples are read from <task>_train. A query is the prompt that lm-eval's task of the same name
makes from the Hugging Face data set, such as "Question: …\\nAnswer:" for arc and piqa, or "activity: context" for
hellaswag. In a boolq query, "Passage: " at the start and "Answer:" at the end are optional.
"""

import functools
from pathlib import Path
from typing import Any

from difftx.data.records import Record, read_records
from difftx.errors import UserError, did_you_mean, import_extra
from difftx.json_files import schema_error

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz")
FIELD = "eval.harness.data_path"


def splits(*, task: str, data_path: str, num_fewshot: int, list_field: str, test: str, **_: Any) -> dict[str, Any]:
    """Return a task's data for lm-eval, one `datasets.Dataset` per split. "train" is empty if `num_fewshot` is 0.

    If not, "train" needs more than `num_fewshot` examples, because lm-eval may draw the question itself. `list_field`
    is the field with one text per answer. `test` is the name of the split with the questions.
    """
    text_field = "continuation" if list_field == "context_options" else "query"
    examine = functools.partial(_question, text_field=text_field, list_field=list_field)
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


def _question(record: Record, *, text_field: str, list_field: str) -> dict[str, Any]:
    texts, gold = record.field(list_field), record.field("gold")
    if schema_error(texts, [str]) is not None or "" in texts:
        raise UserError(f"{record.name}: {list_field}={texts!r} must be a list of texts")
    if type(gold) is not int or not 0 <= gold < len(texts):
        raise UserError(f"{record.name}: gold={gold!r} must be an index of {list_field}, 0 … {len(texts) - 1}")
    return {text_field: record.text(text_field), list_field: texts, "gold": gold}
