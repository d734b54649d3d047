"""The suite position: loss by position, against brute force."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.evals_params import one_device, params_of

from difftx.data.store import TokenStore
from difftx.errors import UserError
from difftx.evals import position
from difftx.evals import run as evals
from difftx.training.run import Run
from difftx.training.state import graph


@pytest.mark.long
def test_the_curve_and_its_band_by_brute_force(config, tmp_path):
    """Documents have 8 … 67 bytes, and rows 32 tokens. Only documents of 33 tokens or more count, from their start."""
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text((f"{i * 7919:08} " * 9)[: 8 + i])
    run = Run.open(config(data__path=tmp_path / "*.txt", data__valid_fraction=0.5), tmp_path, one_device())
    params = params_of(run)
    result = evals.evaluate(run, params, 5, ["position"])["position"]
    store = run.data.valid["valid"].store
    nll = []
    with jax.set_mesh(run.mesh):
        model = nnx.merge(graph(run.config), params)
        forward = jax.jit(lambda tokens: model(tokens)[0])
        for start, end in zip(store.offsets[:-1].tolist(), store.offsets[1:].tolist(), strict=True):
            if end - start > 32:
                tokens = store.slice(start, start + 33).astype(np.int32)
                logits = np.asarray(forward(tokens[None, :-1])[0], np.float64)
                nll.append(np.log(np.exp(logits).sum(-1)) - logits[np.arange(32), tokens[1:]])
    assert 5 < len(nll) < 30
    of_set = result.details["sets"]["valid"]
    assert (of_set["documents"], of_set["tokens"]) == (len(nll), 32 * len(nll))
    (curve,) = json.loads((tmp_path / "evals" / "position" / "5.json").read_text())["charts"][0]["series"]
    assert curve["x"] == sorted(set(curve["x"]))
    assert (curve["x"][0], curve["x"][-1]) == (1, 32)
    for x, y, low, high in zip(curve["x"], curve["y"], curve["low"], curve["high"], strict=True):
        averages = [np.mean(values[: int(x)]) for values in nll]
        assert y == pytest.approx(np.mean(averages), rel=1e-6)
        error = np.std(averages, ddof=1) / np.sqrt(len(nll))
        assert (high - y, y - low) == pytest.approx((1.959964 * error, 1.959964 * error), rel=1e-4)
    assert result.numbers == {"loss": pytest.approx(np.mean(nll), rel=1e-6), "documents": len(nll)}


class Known:
    """Replacement for an evaluation, with a model whose negative log-likelihood of a target is the target's id."""

    def __init__(self, run):
        self.run = run

    def scores(self, source, limit_tokens, what):
        return np.stack([source[i]["targets"] for i in range(len(source))]).astype(np.float32), None


def test_single_document_is_the_first_and_has_no_band(config, text_file, tmp_path):
    run = Run.open(config(data__path=text_file, mesh__fsdp=8, eval__position_documents=1), tmp_path)
    result = position.evaluate(Known(run))
    (curve,) = result.charts[0].series
    store = run.data.valid["valid"].store
    assert (curve.low, curve.high, result.numbers["documents"]) == (None, None, 1)
    assert curve.y[-1] == np.mean(store.slice(1, 33), dtype=np.float64)


def test_documents_are_spread_over_the_store():
    lengths = [40, 3, 40, 33, 32, 40, 40, 1]
    ends = np.cumsum([0, *lengths])
    store = TokenStore(np.arange(ends[-1], dtype=np.uint32), ends.astype(np.uint64))
    rows = position.DocumentStarts(store, 32, 3)
    assert (len(rows), rows.longer, rows.longest) == (3, 5, 40)
    for i, document in enumerate([0, 2, 5]):
        assert rows[i]["tokens"].tolist() == list(range(ends[document], ends[document] + 32))
        assert rows[i]["targets"].tolist() == list(range(ends[document] + 1, ends[document] + 33))


def test_short_documents_are_refused(config, tmp_path):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"{i:031}")  # 32 tokens with the end-of-text token.
    run = Run.open(config(data__path=tmp_path / "*.txt", data__valid_fraction=0.5, mesh__fsdp=8), tmp_path)
    with pytest.raises(UserError, match=r"longer than data\.sequence_length=32 tokens, the longest has 32"):
        evals.evaluate(run, None, 0, ["position"])
