"""Requests of lm-eval's tasks, which are answered once each, even after a kill. The tests do not need lm-eval."""

import types

import numpy as np
import pytest

from difftx.evals.evaluation import Evaluation, ItemJournal
from difftx.evals.harness import requests
from difftx.evals.harness.requests import GenerationRequest, complete_all, score_all
from difftx.inference.sampling import GREEDY, Sampling
from difftx.inference.score import Score
from difftx.progress import Work

WARM = Sampling(repetition_penalty=None, temperature=0.7, top_k=None, top_p=None)


class Killed(BaseException):
    pass


def evaluation_of(path):
    run = types.SimpleNamespace(microbatch_rows=2)
    evaluation = Evaluation(run, None, Work(enabled=False), ItemJournal(path, "s", None))
    evaluation.lm = None
    return evaluation


def truth(context, continuation):
    return Score(-0.1 * sum(context) - 1 / 3 * sum(continuation), sum(continuation) % 2 == 0)


class Scorer:
    """Replacement for `loglikelihoods` that raises `Killed` before call number `die_at`."""

    def __init__(self, monkeypatch):
        self.asked, self.calls, self.die_at = [], 0, None
        monkeypatch.setattr(requests, "loglikelihoods", self)

    def __call__(self, lm, items, *, batch_rows):
        if self.calls == self.die_at:
            raise Killed
        self.calls += 1
        self.asked += [(item.context, item.continuation) for item in items]
        return [truth(item.context, item.continuation) for item in items]


def some_pairs():
    """Return pairs whose contexts have one, four or hundreds of continuations. Some pairs occur twice."""
    rng = np.random.default_rng(0)

    def draw(n):
        return tuple(rng.integers(0, 256, n).tolist())

    pairs = [(draw(rng.integers(1, 30)), draw(rng.integers(1, 9))) for _ in range(40)]
    for _ in range(20):
        context = draw(rng.integers(1, 30))
        pairs += [(context, draw(rng.integers(1, 9))) for _ in range(4)]
    pairs += [((256,), draw(3)) for _ in range(300)]
    return [*pairs, *pairs[::7]]


def test_each_pair_is_scored_once_despite_kills(tmp_path, monkeypatch):
    pairs, path = some_pairs(), tmp_path / "items.jsonl"
    scorer = Scorer(monkeypatch)
    for scorer.die_at in (1, 2, 4):
        with pytest.raises(Killed):
            score_all(evaluation_of(path), pairs, what="pairs")
    scorer.die_at = None
    assert score_all(evaluation_of(path), pairs, what="pairs") == [truth(*pair) for pair in pairs]
    assert sorted(scorer.asked) == sorted(set(pairs))
    scorer.die_at = scorer.calls
    assert score_all(evaluation_of(path), pairs, what="pairs")[-1] == truth(*pairs[-1])


def test_continuations_of_a_context_are_scored_together(tmp_path, monkeypatch):
    scorer = Scorer(monkeypatch)
    pairs = [((i, 5), (choice,)) for choice in range(4) for i in range(100)]
    score_all(evaluation_of(tmp_path / "items.jsonl"), pairs, what="pairs")
    contexts = [context for context, _ in scorer.asked]
    assert contexts[::4] == contexts[1::4] == contexts[2::4] == contexts[3::4]


def test_texts_are_generated_once_each_with_their_own_options(tmp_path, monkeypatch):
    asked, limit = [], None

    def generate(lm, batch, sampling, *, stop):
        if limit is not None and len(asked) >= limit:
            raise Killed
        asked.extend((request.prompt, request.new_tokens, request.seed, sampling, stop) for request in batch)
        return [types.SimpleNamespace(text=f"{asked[-len(batch) + i]}") for i in range(len(batch))]

    monkeypatch.setattr(requests, "generate", generate)
    wanted = [
        GenerationRequest(prompt=(i,) * (i % 5 + 1), new_tokens=8 + i % 2, stop=stop, sampling=sampling, seed=seed)
        for i in range(9)
        for stop in ((), ("\n",))
        for sampling, seed in ((GREEDY, 0), (WARM, 0), (WARM, 1))
    ]
    wanted = [*wanted, *wanted[:7]]
    path = tmp_path / "items.jsonl"
    for limit in (0, 5, 30):  # noqa: B007  # Read by `generate`.
        with pytest.raises(Killed):
            complete_all(evaluation_of(path), wanted, what="texts")
    limit = None
    texts = complete_all(evaluation_of(path), wanted, what="texts")
    assert texts == [str((w.prompt, w.new_tokens, w.seed, w.sampling, w.stop)) for w in wanted]
    assert len(asked) == len(set(asked)) == 54
