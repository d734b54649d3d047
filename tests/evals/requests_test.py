"""Requests of lm-eval's tasks, which are answered once each. The tests do not need lm-eval."""

import types

import numpy as np
import pytest

from difftx.evals.evaluation import Evaluation, journal_of
from difftx.evals.harness import requests
from difftx.evals.harness.requests import GenerationRequest, complete_all, score_all
from difftx.inference.generate import Completion
from difftx.inference.sampling import GREEDY, Sampling
from difftx.inference.score import Score
from difftx.progress import Work

WARM = Sampling(repetition_penalty=None, temperature=0.7, top_k=None, top_p=None)


@pytest.fixture
def evaluation(tmp_path):
    run = types.SimpleNamespace(microbatch_rows=2)
    evaluation = Evaluation(run, None, Work(enabled=False), journal_of(tmp_path / "items.jsonl", "s", None))
    evaluation.lm = None
    return evaluation


def test_each_pair_is_scored_once_next_to_those_of_its_context(evaluation, monkeypatch):
    """Contexts have one, four or hundreds of continuations. Some pairs occur twice."""
    asked = []

    def truth(context, continuation):
        return Score(-0.1 * sum(context) - 1 / 3 * sum(continuation), sum(continuation) % 2 == 0)

    def loglikelihoods(lm, items, *, batch_rows):
        asked.extend((item.context, item.continuation) for item in items)
        return [truth(item.context, item.continuation) for item in items]

    monkeypatch.setattr(requests, "loglikelihoods", loglikelihoods)
    rng = np.random.default_rng(0)

    def draw(n):
        return tuple(rng.integers(0, 256, n).tolist())

    contexts = [draw(rng.integers(1, 30)) for _ in range(40)] + 4 * [(i, 5) for i in range(20)] + 300 * [(256,)]
    pairs = [(context, draw(rng.integers(1, 9))) for context in contexts]
    pairs += pairs[::7]
    for _ in range(2):  # The second call reads the journal.
        assert score_all(evaluation, pairs, what="pairs") == [truth(*pair) for pair in pairs]
        assert sorted(asked) == sorted(set(pairs))
    runs = [context for i, (context, _) in enumerate(asked) if i == 0 or asked[i - 1][0] != context]
    assert len(runs) == len(set(contexts))
    assert len(asked[0][0]) == max(map(len, contexts))


def test_texts_are_generated_once_each_with_their_own_options(evaluation, monkeypatch):
    asked = []

    def generate(lm, batch, sampling, *, stop, batch_rows):
        found = [str((r.prompt, r.new_tokens, r.seed, sampling, stop)) for r in batch]
        asked.extend(found)
        return [Completion(tokens=[], text=text, ended_by="limit") for text in found]

    monkeypatch.setattr("difftx.evals.evaluation.generate", generate)
    wanted = [
        GenerationRequest(prompt=(i,) * (i % 5 + 1), new_tokens=8 + i % 2, stop=stop, sampling=sampling, seed=seed)
        for i in range(9)
        for stop in ((), ("\n",))
        for sampling, seed in ((GREEDY, 0), (WARM, 0), (WARM, 1))
    ]
    wanted += wanted[:7]
    texts = complete_all(evaluation, wanted, what="texts")
    assert texts == [str((w.prompt, w.new_tokens, w.seed, w.sampling, w.stop)) for w in wanted]
    assert len(asked) == len(set(asked)) == 54
