"""The suites loss and sample, and how suites are selected."""

import dataclasses
import hashlib
import itertools
import json
import math
import re

import jax
import numpy as np
import pytest
import rich
from flax import nnx
from helpers.evals_params import one_device, params_of
from helpers.evals_results import chance_of

from difftx.commands.evaluate import format_numbers
from difftx.data.sources import pack
from difftx.data.store import TokenStore
from difftx.evals import loss
from difftx.evals import run as evals
from difftx.json_files import read_json
from difftx.training.checkpoint.retention import number_of
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
    monkeypatch.setattr(loss, "MAX_BLOCKS", 4)
    few = evals.evaluate(run, params, 7, ["loss"])["loss"].details["sets"]["valid"]["blocks"]
    assert few["tokens"] == [96, 64, 64, 64]
    sums = [sum(of_rows[start:stop]) for start, stop in itertools.pairwise((0, 3, 5, 7, 9))]
    assert few["nats"] == pytest.approx(sums, rel=1e-5)
    assert few["targets_sha256"] == blocks["targets_sha256"]
    assert chance_of(result) == {
        "loss": math.log(run.config.model.embeddings),
        "perplexity": run.config.model.embeddings,
    }
    assert result.numbers["loss"] == pytest.approx(nats / (9 * 32), rel=1e-6)
    assert result.numbers["perplexity"] == math.exp(result.numbers["loss"])
    assert result.numbers["bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-6)
    written = json.loads((tmp_path / "evals" / "loss" / "7.json").read_text())
    assert written["step"] == 7
    assert written["numbers"] == result.numbers


def test_text_without_bytes_that_count_has_no_bits_per_byte(config, text_file, tmp_path):
    """Only the end-of-text token of each document counts, as in responses without text."""
    run = run_of(config, text_file, tmp_path, data__packing="best_fit", data__document_mask="true")
    store = run.data.valid["valid"].store
    ends = store.offsets[1:]
    only_end = TokenStore(store.slice(0, len(store)), store.offsets, np.stack([ends - np.uint64(1), ends], axis=1))
    data = dataclasses.replace(run.data, valid={"valid": pack(only_end, run.config.data)})
    run = dataclasses.replace(run, data=data)
    evals.check_run(run, ["loss"])
    result = evals.evaluate(run, params_of(run), 7, ["loss"])["loss"]
    assert result.numbers.keys() == {"loss", "perplexity"}
    assert result.details["sets"]["valid"]["tokens"] == len(store.offsets) - 1


def test_the_perplexity_of_a_diverged_model_is_infinite(config, text_file, tmp_path, capsys):
    """A float64 cannot hold the exponential of a loss above 709.78 nats."""
    run = run_of(config, text_file, tmp_path, eval__loss_tokens=64)

    def scaled(path, weight):
        return 1e5 * weight if "embedding_VD" in jax.tree_util.keystr(path) else weight

    params = jax.tree.map_with_path(scaled, params_of(run))
    result = evals.evaluate(run, params, 7, ["loss"])["loss"]
    assert math.log(np.finfo(np.float64).max) < result.numbers["loss"] < math.inf
    assert result.numbers["perplexity"] == math.inf
    # The result is read like one with a loss that is not a number.
    stored = read_json(tmp_path / "evals" / "loss" / "7.json")
    assert stored["numbers"] == result.numbers
    assert number_of(tmp_path, 7, "loss/perplexity") is None
    rich.print(format_numbers(stored))
    assert re.search("perplexity +inf", capsys.readouterr().out)


def test_samples_are_written(config, text_file, tmp_path):
    run = run_of(config, text_file, tmp_path, eval__sample_tokens=5)
    result = evals.evaluate(run, params_of(run), 3, ["sample"])["sample"]
    samples = json.loads((tmp_path / "evals" / "sample" / "3.json").read_text())["details"]["samples"]
    assert samples == result.details["samples"]
    assert all(sample["prompt"] in text_file.read_text() for sample in samples)
