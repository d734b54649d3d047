"""The suite icl: prompts of demonstrations, accuracy by order, and resumption."""

import collections
import itertools
import json
import re
import types

import numpy as np
import pytest
from conftest import suite_config
from helpers.evals_examples import LABELS, examples, task_of, write_lines
from helpers.evals_results import chance_of
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.icl import IclTask, first_stable
from difftx.training.run import Run

DEMONSTRATION = re.compile(r"Question: (.+)\nType: (\S+)\n\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_lines(folder / "train.jsonl.gz", examples(200, 0))
    write_lines(folder / "test.jsonl", examples(60, 1))
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    return folder


def config_of(folder, *tasks, window=1024, **changes):
    changes = {f"eval.icl.{name}": value for name, value in changes.items()}
    return suite_config(folder, window, **{"eval.icl.tasks": json.dumps(tasks or [task_of(folder)])} | changes)


def loaded(config):
    run = types.SimpleNamespace(config=config, tokenizer=load_tokenizer("bytes"))
    return [IclTask(run, task) for task in config.eval.icl.tasks]


def read(prompt):
    """Return the demonstrations and the question of a prompt, and check that it has no other text."""
    text = bytes(prompt.context).decode()
    demonstrations = DEMONSTRATION.findall(text)
    assert "".join(f"Question: {t}\nType: {label}\n\n" for t, label in demonstrations) == text
    return demonstrations, re.fullmatch(r"Question: (.+)\nType:", bytes(prompt.question).decode())[1]


def fine_of(question):
    return next(label for words, label in LABELS.items() if question.startswith(words))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), window=st.integers(200, 3000))
def test_prompts_are_complete_and_have_the_most_demonstrations_that_fit(folder, seed, window):
    config = config_of(folder, window=1024, seed=seed, permutations=2, questions=20)
    object.__setattr__(config.data, "sequence_length", window)
    (task,) = loaded(config)
    known = {(r["text"], r["coarse"]) for r in examples(200, 0)}
    asked = {r["text"] for r in examples(60, 1)}
    by_shots = {}
    for item in task.items:
        prompts = task.prompts(item)
        (demonstrations, *rest), questions = zip(*map(read, prompts), strict=True)
        assert all(other == demonstrations for other in rest)
        assert len(set(questions)) == 20
        assert asked.issuperset(questions)
        assert len(demonstrations) == len(set(demonstrations)) == item.shots
        assert known.issuperset(demonstrations)
        longest = max(len(p.context) + len(p.question) for p in prompts) + max(map(len, task.labels)) - 1
        assert longest <= window
        # All orders have the same demonstrations.
        assert by_shots.setdefault(item.shots, set(demonstrations)) == set(demonstrations)
        if item.shots == task.most_shots < 200:  # The context is full: without one token, a demonstration less fits.
            for tokens, shots in ((longest, item.shots), (longest - 1, item.shots - 1)):
                object.__setattr__(config.data, "sequence_length", tokens)
                assert not shots or loaded(config)[0].most_shots == shots
        if "alternating" in item.orders:
            check_alternation([label for _, label in demonstrations])
    sets = [by_shots[count] for count in sorted(by_shots)]
    # Smaller sets of demonstrations are subsets of larger ones.
    assert all(few < many for few, many in itertools.pairwise(sets))
    assert sorted(by_shots) == sorted({*(2**i for i in range(9) if 2**i <= task.most_shots), task.most_shots})


def check_alternation(labels):
    """Check that labels come in rounds of one order. A label that is used up is missing in all later rounds."""
    left, order, at = collections.Counter(labels), list(dict.fromkeys(labels)), 0
    while at < len(labels):
        turn = [label for label in order if left[label]]
        assert labels[at : at + len(turn)] == turn
        left.subtract(turn)
        at += len(turn)


class Chooser:
    """Replacement for `most_likely` that reads the text of each prompt and chooses a label."""

    def __init__(self, monkeypatch, choose):
        self.choose, self.calls, self.prompts = choose, 0, 0
        monkeypatch.setattr("difftx.evals.icl.most_likely", self)

    def __call__(self, lm, prompts, labels, *, batch_rows):
        names = [bytes(label).decode() for label in labels]
        assert all(re.fullmatch(r" \S+\n", name) for name in names)
        self.calls += 1
        self.prompts += len(prompts)
        chosen = []
        for prompt in prompts:
            assert len(prompt.context) + len(prompt.question) + max(map(len, labels)) - 1 <= lm.context_length
            chosen.append(names.index(f" {self.choose(*read(prompt), [name.strip() for name in names])}\n"))
        return chosen


def evaluated(config, workdir):
    return evals.evaluate(Run.open(config, workdir), None, 3, ["icl"])["icl"]


def test_margins_and_curves_by_brute_force(folder, tmp_path, monkeypatch):
    """The model always repeats the label of the first demonstration, so only the order matters."""
    Chooser(monkeypatch, lambda seen, question, names: seen[0][1])
    config = config_of(folder, permutations=9, questions=50, shots="1,12,5000")
    result = evaluated(config, tmp_path)
    (task,) = loaded(config)
    share = collections.Counter(fine_of(read(p)[1]) for p in task.prompts(task.items[0]))
    expected = collections.defaultdict(list)
    for item in task.items:
        for order in item.orders:
            expected[order, item.shots].append(share[read(task.prompts(item)[0])[0][0][1]] / 50)
    most = task.most_shots
    assert sorted({shots for _, shots in expected}) == [1, 12, most]
    curves, permutations = result.charts
    guesses = [chart.series[-1] for chart in (curves, permutations)]
    assert all(line.is_reference for line in guesses)
    most_frequent = max(share.values()) / 50
    assert {y for line in guesses for y in line.y} == {most_frequent}
    assert chance_of(result) == {
        f"trec_{order}_{measure}": most_frequent
        for order in ("random", "alternating")
        for measure in ("accuracy", "stable_accuracy")
    }
    assert permutations.is_scatter
    assert len(curves.series) == 5
    for order, curve, line in zip(("random", "alternating"), curves.series[:2], permutations.series[:2], strict=True):
        values = [expected[order, shots] for shots in (1, 12, most)]
        assert (curve.name, curve.x) == (order, [1, 12, most])
        assert curve.y == pytest.approx([np.mean(v) for v in values])
        assert (curve.low, curve.high) == ([min(v) for v in values], [max(v) for v in values])
        assert line.y == values[2]
        assert result.numbers[f"trec_{order}_margin"] == max(values[2]) - min(values[2]) > 0
        assert result.numbers[f"trec_{order}_accuracy"] == pytest.approx(np.mean(values[2]))


def test_accuracy_once_stable_is_averaged(folder, tmp_path, monkeypatch):
    """The model answers more questions correctly the more demonstrations it sees, up to eight."""
    right = {1: 0, 2: 20, 4: 40, 8: 42, 12: 41}  # Demonstrations → correct answers, of 50.
    config = config_of(folder, permutations=2, questions=50, shots="1,2,4,8,12")
    (task,) = loaded(config)
    ranks = {read(p)[1]: rank for rank, p in enumerate(task.prompts(task.items[0]))}

    def choose(seen, question, names):
        label = fine_of(question)
        return label if ranks[question] < right[len(seen)] else next(name for name in names if name != label)

    Chooser(monkeypatch, choose)
    result = evaluated(config, tmp_path)
    for order in ("random", "alternating"):
        assert result.numbers[f"trec_{order}_stable_shots"] == 4
        assert result.numbers[f"trec_{order}_stable_accuracy"] == pytest.approx((40 + 42 + 41) / 150)
        [line] = [series for series in result.charts[0].series if series.name == f"{order}, average once stable"]
        assert (line.x, line.y) == ([4, 8, 12], [pytest.approx(0.82)] * 3)


@pytest.mark.parametrize(
    ("means", "start"),
    [
        ([0.3], 0),
        ([0.3, 0.5], 1),
        ([0.5, 0.55], 0),  # The largest allowed difference.
        ([0.5, 0.56], 1),
        ([0.5, 0.54, 0.58], 1),  # Neighbours are close, but the first and the last are not.
        ([0.6, 0.2, 0.6, 0.61], 2),
        ([0.6, 0.6, 0.9], 2),  # Still rising at the end.
    ],
)
def test_accuracy_is_stable_once_it_stays_within_a_twentieth(means, start):
    assert first_stable(means) == start


@pytest.mark.parametrize(
    ("records", "changes", "message"),
    [
        ([{"text": " \n ", "coarse": "NUM"}], {}, "line 1: text is only white space"),
        ([{"text": "a", "coarse": "NUN"}], {}, r"line 1: coarse='NUN' is not a label of .*train.*. Did you mean 'NUM'"),
        ([{"text": "a " * 2000, "coarse": "NUM"}], {}, "'trec': data.sequence_length=1024 does not hold"),
        ([{"text": "a", "coarse": "NUM"}], {"train": "no/such.jsonl"}, "trec.train=no/such.jsonl: cannot be read"),
    ],
)  # fmt: skip
def test_mistakes_name_file_and_line(folder, tmp_path, records, changes, message):
    path = tmp_path / "test.jsonl"
    write_lines(path, records)
    with pytest.raises(UserError, match=message):
        loaded(config_of(folder, task_of(folder, test=str(path), **changes)))
