"""Input files of the golden driver. Their content depends on nothing but this file."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TEXT = "stone river falls slowly red because naïve 42 the of winter over cold light and 日本 bridges song"
WORDS = TEXT.split()


def write_all(folder: Path) -> None:
    """Write every file that the driver's commands read."""
    (folder / "text").mkdir()
    for number in range(24):
        # Lengths of 300 to 2,400 bytes: shorter and longer than a row, and enough for validation.
        (folder / "text" / f"{number:02}.txt").write_text(_prose(number, words=50 + 15 * number))
    documents = [{"name": f"doc-{i}", "text": _prose(100 + i, words=4 + 9 * (i % 13))} for i in range(120)]
    _write_lines(folder / "documents.jsonl", documents)
    chats = [{"ask": f"Say {i}.", "text": _prose(300 + i, words=5 + i % 7)} for i in range(80)]
    _write_lines(folder / "chats.jsonl", chats)
    _write_lines(folder / "prompts.jsonl", [{"prompt": "The river"}, {"prompt": "red stone falls", "seed": 5}])
    _write_suite_files(folder)


def _write_suite_files(folder: Path) -> None:
    questions = [
        {"text": f"{('Who', 'Where', 'How far')[i % 3]} {_words(500 + i, 3)} ?", "label": ("HUM", "LOC", "NUM")[i % 3]}
        for i in range(24)
    ]
    _write_lines(folder / "icl_train.jsonl", questions[:18])
    _write_lines(folder / "icl_test.jsonl", questions[18:])
    towns = [
        {"context": f"Person {i} lives in Town{7 * i}. {_words(600 + i, 20)}", "input": f"Where does person {i} live?",
         "answers": [f"Town{7 * i}", f"in Town{7 * i}"], "summary": f"All about Town{7 * i}."}
        for i in range(6)
    ]  # fmt: skip
    _write_lines(folder / "towns.jsonl", towns)
    sums = [
        {"question": f"What is {i} and {3 * i}?", "answer": f"{i} + {3 * i} = {4 * i}\n#### {4 * i}"} for i in range(8)
    ]
    _write_lines(folder / "gsm8k_train.jsonl", sums[:4])
    _write_lines(folder / "gsm8k_test.jsonl", sums[4:])
    for number, (name, choices) in enumerate(
        {"arc_challenge_test": 4, "arc_easy_test": 4, "boolq_val": 2, "hellaswag_val": 4, "openbookqa_test": 4,
         "piqa_val": 2}.items()
    ):  # fmt: skip
        _write_lines(folder / "harness" / f"{name}.jsonl", [_choice(10 * number + i, name, choices) for i in range(3)])
    options = [
        {"context_options": [f"Ann saw {_words(900 + i, 4)} Ann", f"Ann saw {_words(900 + i, 4)} big Bob"],
         "continuation": f"was {_words(950 + i, 3)}.", "gold": i % 2}
        for i in range(3)
    ]  # fmt: skip
    _write_lines(folder / "harness" / "winogrande_val.jsonl", options)


def _choice(seed: int, name: str, choices: int) -> dict[str, Any]:
    text = _words(700 + seed, 6)
    endings = ["no", "yes"] if name == "boolq_val" else [f"{_words(800 + 5 * seed + i, 2)} {i}" for i in range(choices)]
    queries = {  # lm-eval's forms of these tasks. The other tasks share one form.
        "boolq_val": f"Passage: {text}\nQuestion: is it {seed}?",
        "hellaswag_val": f"Topic {seed}: {text}",
        "openbookqa_test": text,
    }
    query = queries.get(name, f"Question: {text}\nAnswer:")
    return {"query": query, "choices": endings, "gold": seed % choices}


def _prose(seed: int, *, words: int) -> str:
    """Return sentences of 7 words."""
    found = _words(seed, words).split()
    return "".join(" ".join(found[i : i + 7]).capitalize() + ".\n" for i in range(0, words, 7))


def _words(seed: int, count: int) -> str:
    draw = random.Random(seed).random  # Python promises that its sequence stays the same.
    return " ".join(WORDS[int(draw() * len(WORDS))] for _ in range(count))


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
