import hashlib
import itertools
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.evals_params import one_device, params_of

from difftx import evals
from difftx.config.suites import SUITES
from difftx.errors import UserError
from difftx.evals import loss
from difftx.training.run import Run
from difftx.training.state import graph


def run_of(config, text_file, tmp_path, **changes):
    return Run.open(config(data__path=text_file, **changes), tmp_path, one_device())


def test_loss_and_bits_per_byte_by_brute_force(config, tmp_path, monkeypatch):
    for i in range(40):  # Short documents. Their end-of-text tokens have no bytes.
        (tmp_path / f"{i}.txt").write_text(f"document {i} is about the number {i * i}\n")
    run = run_of(config, tmp_path / "*.txt", tmp_path, eval__loss_tokens=9 * 32, data__valid_fraction=0.5)
    params = params_of(run)
    result = evals.evaluate(run, params, 7, ["loss"])["loss"]
    tokens = run.data.valid["valid"].store.slice(0, 9 * 32 + 1).astype(np.int32)
    nats, text_bytes, of_rows = 0.0, 0, []
    with jax.set_mesh(run.mesh):
        model = nnx.merge(graph(run.config), params)
        forward = jax.jit(lambda tokens: model(tokens)[0])
        for row in range(9):
            piece = tokens[row * 32 : row * 32 + 33]
            logits = np.asarray(forward(piece[None, :-1])[0], np.float64)
            for t, target in enumerate(piece[1:]):
                nats += np.log(np.exp(logits[t]).sum()) - logits[t, target]
                text_bytes += target != run.tokenizer.eot_token
            of_rows.append(nats - sum(of_rows))
    assert result.details["sets"]["valid"]["tokens"] == 9 * 32
    assert result.details["sets"]["valid"]["bytes"] == text_bytes < 9 * 32
    blocks = result.details["sets"]["valid"]["blocks"]
    assert blocks["nats"] == pytest.approx(of_rows, rel=1e-5)
    assert blocks["tokens"] == [32] * 9
    assert blocks["targets_sha256"] == hashlib.sha256(tokens[1:].tobytes()).hexdigest()
    monkeypatch.setattr(loss, "MOST_BLOCKS", 4)
    few = evals.evaluate(run, params, 7, ["loss"])["loss"].details["sets"]["valid"]["blocks"]
    assert few["tokens"] == [96, 64, 64, 64]
    sums = [sum(of_rows[start:stop]) for start, stop in itertools.pairwise((0, 3, 5, 7, 9))]
    assert few["nats"] == pytest.approx(sums, rel=1e-5)
    assert few["targets_sha256"] == blocks["targets_sha256"]
    assert result.chance == {"loss": math.log(run.config.model.embeddings), "perplexity": run.config.model.embeddings}
    assert result.numbers["loss"] == pytest.approx(nats / (9 * 32), rel=1e-6)
    assert result.numbers["perplexity"] == math.exp(result.numbers["loss"])
    assert result.numbers["bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-6)
    written = json.loads((tmp_path / "evals" / "loss" / "7.json").read_text())
    assert written["step"] == 7
    assert written["numbers"] == result.numbers


def test_an_unknown_suite_suggests_one():
    with pytest.raises(UserError, match=r"'los': no such suite\. Did you mean 'loss'"):
        SUITES.check(["loss", "los"])


def test_samples_are_written(config, text_file, tmp_path):
    run = run_of(config, text_file, tmp_path, eval__sample_tokens=5)
    result = evals.evaluate(run, params_of(run), 3, ["sample"])["sample"]
    samples = json.loads((tmp_path / "evals" / "sample" / "3.json").read_text())["details"]["samples"]
    assert samples == result.details["samples"]
    assert all(sample["prompt"] in text_file.read_text() for sample in samples)
