"""Data of lm-eval's tasks from local JSON lines: `custom_dataset` of the files in harness_tasks/.

    query, choices, gold                     the task's prompt, its answers, the number of the right one
    context_options, continuation, gold      winogrande: what may stand before the continuation

Files are named <task>_test or, of boolq, hellaswag, piqa and winogrande, <task>_val, as their splits are, and
<task>_train. A query is the prompt as the task of that name has it. Of boolq "Passage: " in front and "Answer:" at the
end may be there or not.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from difftx.data.readers import import_extra
from difftx.data.records import Record, read_records
from difftx.errors import UserError, did_you_mean

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz")
FIELD = "eval.harness.data_path"


def splits(*, task: str, data_path: str, num_fewshot: int, list_field: str, test: str, **_: Any) -> dict[str, Any]:
    """Return a task's data as lm-eval takes it: `datasets.Dataset`s, "train" empty if no examples are wanted.

    Args:
        task: its name.
        data_path: the folder.
        num_fewshot: examples in a prompt; one more is needed, as the question itself may be drawn.
        list_field: that holds one text for each answer.
        test: the split of the questions, which the file's name has too.

    Raises:
        UserError: a file is not there, or a line is wrong.
    """
    text_field = "continuation" if list_field == "context_options" else "query"
    examine = functools.partial(_question, text_field=text_field, list_field=list_field)
    train = _read(Path(data_path), task, "train", examine) if num_fewshot else []
    if num_fewshot and len(train) <= num_fewshot:
        raise UserError(
            f"{FIELD}={data_path}: {task}_train has {len(train)} examples, num_fewshot={num_fewshot} too few"
        )
    found = {"train": train, test: _read(Path(data_path), task, test, examine)}
    columns = {
        name: {field: [row[field] for row in rows] for field in (text_field, list_field, "gold")}
        for name, rows in found.items()
    }
    datasets = import_extra("datasets", "eval")
    return {name: datasets.Dataset.from_dict(values) for name, values in columns.items()}


def data_files(data_path: str, tasks: Sequence[str]) -> list[Path]:
    """Return the files of a folder that are of some tasks."""
    there = Path(data_path).glob("*.jsonl*")
    return sorted(path for path in there if path.name.split(".")[0].rpartition("_")[0] in tasks)


def _read(folder: Path, task: str, split: str, examine: Any) -> list[dict[str, Any]]:
    paths = [folder / f"{task}_{split}{suffix}" for suffix in SUFFIXES]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        near = did_you_mean(paths[0].name, [other.name for other in folder.glob("*.jsonl*")]) if folder.is_dir() else ""
        raise UserError(f"{FIELD}={folder}: no {paths[0].name} there, plain or compressed.{near}")
    return [examine(record) for record in read_records(path, field=FIELD, what="questions")]


def _question(record: Record, *, text_field: str, list_field: str) -> dict[str, Any]:
    texts, gold = record.field(list_field), record.field("gold")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{record.name}: {list_field}={texts!r} must be a list of texts")
    if type(gold) is not int or not 0 <= gold < len(texts):
        raise UserError(f"{record.name}: gold={gold!r} must be a number of {list_field}, 0 … {len(texts) - 1}")
    return {text_field: record.text(text_field), list_field: texts, "gold": gold}
