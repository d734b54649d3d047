"""The journal of an evaluation keeps the answer of each finished item."""

import dataclasses

import pytest

from difftx.evals.evaluation import Evaluation, journal_of
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

    journal = path and journal_of(path, settings, weights)
    evaluation = Evaluation(None, None, Work(enabled=False), journal)
    return list(evaluation.answers(items, answer_batch, what="items", batch_items=7))


EXPECTED = [(item, {"of": item.id}) for item in ITEMS]


def test_killed_evaluation_resumes_and_repeats_no_item(tmp_path):
    path, asked = tmp_path / "new" / "5.json", []
    for kill_after in (0, 1, 30, 100):
        before = len(asked)
        with pytest.raises(Killed):
            run(path, asked, kill_after=kill_after)
        assert len(asked) - before in (0, 7, 28, 70)
    assert run(path, asked) == EXPECTED
    assert asked == [item.id for item in ITEMS]  # Each once, in order.
    assert run(path, asked, kill_after=0) == EXPECTED
    assert run(None, []) == EXPECTED


def test_evaluations_with_other_settings_or_weights_run_at_the_same_time(tmp_path):
    """Each is killed after the other has begun, and resumes with its own answers."""
    heads = [{}, {"settings": "t"}, {"weights": "b/5"}, {"weights": None}, {"settings": "sa", "weights": "/5"}]
    for kill_after in (7, 28):
        for number, head in enumerate(heads):
            with pytest.raises(Killed):
                run(tmp_path / "5.json", [], kill_after=kill_after, answer=lambda item, n=number: [n, item.id], **head)
    for number, head in enumerate(heads):
        asked = []
        found = run(tmp_path / "5.json", asked, answer=lambda item, n=number: [n, item.id], **head)
        assert found == [(item, [number, item.id]) for item in ITEMS]
        assert len(asked) == len(ITEMS) - 35
