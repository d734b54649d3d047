"""The journal of an evaluation keeps the answer of each finished item."""

import dataclasses
import json

import pytest

from difftx.evals.evaluation import Evaluation, ItemJournal
from difftx.progress import Work


@dataclasses.dataclass(frozen=True)
class Item:
    id: str


class Killed(BaseException):
    pass


ITEMS = [Item(f"item {i}") for i in range(150)]


def run(path, asked, *, settings="s", weights="a/5", items=ITEMS, kill_after=None, answer=lambda item: {"of": item.id}):
    """Evaluate like a suite, and add the ids of the items to `asked`.

    Raise `Killed` before a batch if `asked` has at least `kill_after` ids.
    """

    def answer_batch(batch):
        if kill_after is not None and len(asked) >= kill_after:
            raise Killed
        asked.extend(item.id for item in batch)
        return [answer(item) for item in batch]

    journal = path and ItemJournal(path, settings, weights)
    evaluation = Evaluation(None, None, Work(enabled=False), journal)
    return list(evaluation.answers(items, answer_batch, what="items", batch_items=7))


EXPECTED = [(item, {"of": item.id}) for item in ITEMS]


def test_killed_evaluation_resumes_and_repeats_no_item(tmp_path):
    path, asked = tmp_path / "new" / "5.items.jsonl", []
    for kill_after in (0, 1, 30, 100):
        before = len(asked)
        with pytest.raises(Killed):
            run(path, asked, kill_after=kill_after)
        assert len(asked) - before in (0, 7, 28, 70)
    assert run(path, asked) == EXPECTED
    assert asked == [item.id for item in ITEMS]  # Each once, in order.
    assert run(path, asked, kill_after=0) == EXPECTED
    assert run(None, []) == EXPECTED


def test_invalid_lines_are_removed_and_later_lines_are_separate(tmp_path):
    path, asked = tmp_path / "5.items.jsonl", []
    with pytest.raises(Killed):
        run(path, asked, kill_after=21)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 22
    for broken in (lines[7][:-9], b"\xff\xfe", b"[1]\n", b'{"id": "item 3"}\n', b'{"id": [3], "answer": 4}\n'):
        path.write_bytes(b"".join([*lines[:7], broken]))
        asked = []
        assert run(path, asked) == EXPECTED
        assert asked == [item.id for item in ITEMS[6:]]
        again = path.read_text().splitlines()
        assert [json.loads(line).get("id") for line in again[1:] if "item" in line] == [item.id for item in ITEMS]


def test_other_settings_or_weights_start_over(tmp_path):
    path = tmp_path / "5.items.jsonl"
    run(path, [])
    whole = path.read_bytes()
    for head, content in (
        ({"settings": "t"}, whole),
        ({"weights": "b/5"}, whole),
        ({"weights": None}, whole),
        ({}, b""),
        ({}, b"{}\n"),
        ({}, b"nonsense"),
    ):
        path.write_bytes(content)
        asked = []
        assert run(path, asked, **head, answer=lambda item: 1) == [(item, 1) for item in ITEMS]
        assert len(asked) == len(ITEMS)


def test_two_sets_of_items_share_a_journal(tmp_path):
    """The tasks of suite `icl` share a journal in this way."""
    path = tmp_path / "5.items.jsonl"
    first, second = ITEMS[:10], ITEMS[10:30]
    run(path, [], items=first)
    with pytest.raises(Killed):
        run(path, [], items=second, kill_after=7)
    asked = []
    run(path, asked, items=first)
    run(path, asked, items=second)
    assert asked == [item.id for item in second[7:]]
