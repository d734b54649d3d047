"""Rows of the synthetic tasks, by the definition of each task."""

import collections
import dataclasses

import numpy as np
import pytest

from difftx.data.synthetic import SyntheticRows
from difftx.errors import UserError


@pytest.fixture
def rows_of(config):
    def make(task, split="train", **changes):
        options = {"path": f"synthetic:{task}", "sequence_length": 40} | changes
        synthetic = {"vocab_size": 50, "pairs": 6, "distractors": 9, "train_examples": 30, "valid_examples": 20}
        synthetic |= {name: options.pop(name) for name in list(options) if name in synthetic or name in NUMBERS}
        data = config().data
        data = dataclasses.replace(data, **options, synthetic=dataclasses.replace(data.synthetic, **synthetic))
        return SyntheticRows(data.path, data, split)

    return make


NUMBERS = {"seed", "query_power"}
TASKS = ["mqar", "retrieval", "copy"]


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_functions_of_seed_split_and_number(rows_of, task):
    rows, again = rows_of(task), rows_of(task)
    assert len(rows) == 30
    backwards = [again[i] for i in reversed(range(30))][::-1]
    for i in range(30):
        for name, array in rows[i].items():
            np.testing.assert_array_equal(array, backwards[i][name])
    others = [rows_of(task, seed=1), rows_of(task, "valid")]
    assert len(others[1]) == 20
    texts = [{rows_[i]["tokens"].tobytes() for i in range(20)} for rows_ in (rows, *others)]
    assert len(set.union(*texts)) == 60
    assert len({r.fingerprint for r in (rows, *others)}) == 3
    with pytest.raises(IndexError):
        rows[30]


@pytest.mark.parametrize("length", [24, 41])
def test_mqar_by_its_definition(rows_of, length):
    """Each answer is the value after the query's only earlier occurrence as a key. Each pair is queried once."""
    for example in range(30):
        row = rows_of("mqar", sequence_length=length)[example]
        tokens, targets, counted = row["tokens"].tolist(), row["targets"].tolist(), row["loss_mask"]
        pairs = dict(zip(tokens[0:12:2], tokens[1:12:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == 6
        assert all(1 <= key < 25 <= value < 50 for key, value in pairs.items())
        asked = [t for t in range(length) if counted[t]]
        assert all(t >= 12 and t % 2 == 0 for t in asked)
        assert sorted(tokens[t] for t in asked) == sorted(pairs)
        assert all(targets[t] == pairs[tokens[t]] for t in asked)
        assert all(targets[t] == tokens[t + 1] for t in range(length - 1) if not counted[t])


def test_mqar_gaps_follow_the_power_law(rows_of):
    gaps = collections.Counter()
    rows = rows_of("mqar", pairs=1, train_examples=4000, query_power=0.5)
    for example in range(4000):
        gaps[(int(np.flatnonzero(rows[example]["loss_mask"])[0]) - 2) // 2 + 1] += 1
    law = np.arange(1, 20) ** -0.5
    expected = 4000 * law / law.sum()
    observed = np.array([gaps[g] for g in range(1, 20)])
    assert ((observed - expected) ** 2 / expected).sum() < 42  # χ² with 18 degrees of freedom, p = 0.001.


def test_retrieval_hides_pairs_among_distractors(rows_of):
    places = set()
    for example in range(30):
        row = rows_of("retrieval")[example]
        tokens = row["tokens"][:22].tolist()  # 2 × 6 + 9 + 1
        assert not row["tokens"][22:].any()
        assert np.flatnonzero(row["loss_mask"]).tolist() == [21]
        query, answer = tokens[-1], int(row["targets"][21])
        (place,) = [t for t in range(21) if tokens[t] == query]  # The query occurs once in pairs and distractors.
        assert tokens[place + 1] == answer
        assert 1 <= query < 25 <= answer < 50
        places.add(place)
    assert len(places) > 10


@pytest.mark.parametrize("length", [40, 41])
def test_copy_repeats_its_prefix(rows_of, length):
    row = rows_of("copy", sequence_length=length)[3]
    prefix = row["tokens"][:20]
    assert row["tokens"][20] == 0
    np.testing.assert_array_equal(row["tokens"][21:40], prefix[:-1])
    np.testing.assert_array_equal(row["targets"][20:40], prefix)
    np.testing.assert_array_equal(np.flatnonzero(row["loss_mask"]), np.arange(20, 40))
    assert rows_of("copy", sequence_length=length).row_tokens(3) == 40


def test_padding_is_a_segment_of_its_own(rows_of):
    row = rows_of("retrieval", document_mask=True)[0]
    np.testing.assert_array_equal(row["segment_ids"], [1] * 22 + [0] * 18)
    np.testing.assert_array_equal(row["positions"], [*range(22)] + [0] * 18)


def test_impossible_tasks_are_rejected_with_the_reason(rows_of, config):
    cases = [
        (lambda: rows_of("mqr"), "'mqr': no such synthetic task. Did you mean 'mqar'"),
        (lambda: rows_of("mqar", sequence_length=23), r"data.sequence_length=23 .* 24 tokens"),
        (lambda: rows_of("retrieval", sequence_length=21), r"data.sequence_length=21 .* 22 tokens"),
        (lambda: rows_of("mqar", pairs=25), "data.synthetic.vocab_size=50 has no 25 .* at least 52"),
        (lambda: config(data__path="synthetic:copy"), "data.synthetic.vocab_size=8192 exceeds model.vocab_size"),
    ]
    for make, message in cases:
        with pytest.raises(UserError, match=message):
            make()
