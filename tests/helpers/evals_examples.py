"""Files of labelled questions for suite `icl`, documents for suite `hallucination`, and JSON lines for any suite."""

import gzip
import json

import numpy as np

# A question's label follows from its first words.
LABELS = {"How far": "NUM", "Who": "HUM", "Where": "LOC", "What is": "ENTY", "Why": "DESC", "What does": "ABBR"}

KINDS = {"qa": "question_answering", "news": "summarisation"}  # Name of a set of `set_of` → its kind.


def examples(count, seed):
    """Return questions with a coarse and a fine label."""
    rng = np.random.default_rng(seed)
    first = rng.choice(list(LABELS), count, p=[0.3, 0.3, 0.2, 0.1, 0.06, 0.04])
    return [
        {"text": f"{words} {' '.join(rng.choice(['a', 'thing', 'of', 'wonder'], rng.integers(1, 7)))} {i} ?",
         "coarse": LABELS[str(words)], "fine": f"{LABELS[str(words)]}:{i % 3}"}
        for i, words in enumerate(first)
    ]  # fmt: skip


def write_lines(path, records):
    """Write records as JSON lines, compressed if the name ends in .gz, and return the path."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def task_of(folder, **changes):
    """Return an entry of `eval.icl.tasks` for files of `examples` in a folder."""
    files = {"train": f"{folder}/train.jsonl.gz", "test": f"{folder}/test.jsonl"}
    words = {"text_word": "Question", "label_word": "Type"}
    return {"name": "trec", **files, "text": "text", "label": "coarse", **words} | changes


def long_bench(count, words=20):
    """Return documents about people and towns, with LongBench's fields."""
    rng = np.random.default_rng(0)
    records = []
    for number in range(count):
        filler = " ".join(rng.choice(["rain", "fell", "on", "stone", "walls"], words + number))
        town = f"Town{number * 7}"
        record = {"input": f"Where does person {number} live?", "answers": [town, f"in {town}"], "length": words}
        records.append(record | {"context": f"Person {number} lives in {town}. {filler}", "all_classes": None})
    return records


def set_of(folder, name="qa", **changes):
    """Return an entry of `eval.hallucination.sets` for files made from `long_bench` in a folder."""
    fields = {
        "qa": {"path": f"{folder}/qa.jsonl.gz", "document": "context", "question": "input", "answers": "answers"},
        "news": {"path": f"{folder}/news.jsonl", "document": "text", "question": None, "answers": "summary"},
    }[name]
    return {"name": name, "kind": KINDS[name], "new_tokens": 16, **fields} | changes
