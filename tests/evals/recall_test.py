"""The suite recall: hits on repeated bigrams, against brute force."""

import itertools
import json
import math
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.evals_params import one_device, params_of
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.commands.data import main as data_command
from difftx.commands.prepare import main as prepare
from difftx.data.bigrams import BigramCounts, as_bigrams
from difftx.data.loader import ordered_batches
from difftx.data.packing import PackedRows
from difftx.data.store import TokenStore
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.recall import is_hit, training_counts
from difftx.training.run import Run
from difftx.training.state import graph

END = 9


def counts_of(pairs):
    keys = sorted(pairs)
    bigrams = as_bigrams(*np.array(keys, np.uint32).reshape(-1, 2).T)
    return BigramCounts(bigrams, np.array([pairs[key] for key in keys], np.uint64), 1, {})


def hits_by_brute_force(row, train, limit):
    """Return whether each target is a hit, by comparing its bigram with all earlier bigrams that the model sees."""
    documents = row.get("segment_ids", np.ones(len(row["tokens"]), int))
    found = []
    for t, counts in enumerate(row["loss_mask"]):
        earlier = [
            s
            for s in range(t)
            if documents[s] == documents[t]
            and row["loss_mask"][s]
            and (row["tokens"][s], row["targets"][s]) == (row["tokens"][t], row["targets"][t])
        ]
        pair = (int(row["tokens"][t]), int(row["targets"][t]))
        found.append(bool(counts and earlier and pair[0] != END and train.get(pair, 0) <= limit))
    return found


DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=25).map(lambda d: [*d, END]), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, st.sampled_from(["concat", "best_fit"]), st.booleans(), st.integers(0, 6), st.randoms())
def test_hits_are_those_of_brute_force(documents, packing, document_mask, limit, random):
    tokens = np.array(list(itertools.chain(*documents)), np.uint16)
    store = TokenStore(tokens, np.cumsum([0, *map(len, documents)], dtype=np.uint64))
    rows = PackedRows(store, sequence_length=12, packing=packing, document_mask=document_mask)
    train = {(a, b): random.randrange(9) for a in range(4) for b in (*range(4), END) if random.random() < 0.8}
    for i in range(len(rows)):
        expected = hits_by_brute_force(rows[i], train, limit)
        assert is_hit(rows[i], counts_of(train), limit, END).tolist() == expected


@pytest.mark.parametrize(("packing", "document_mask"), [("concat", False), ("best_fit", True)])
def test_both_slices_by_brute_force(config, tmp_path, monkeypatch, packing, document_mask):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"number {i * i} is the number {i}\n" * (1 + i % 3))
    changes = {"data__packing": packing, "data__document_mask": document_mask, "data__cache_path": tmp_path / "cache"}
    data = {"data__path": tmp_path / "*.txt", "data__valid_fraction": 0.3, "eval__recall_max_bigram_count": 60}
    run = Run.open(config(**data, **changes), tmp_path, one_device())
    params = params_of(run)
    passes = []
    monkeypatch.setattr(
        "difftx.evals.evaluation.ordered_batches",
        lambda *args, **kw: passes.append(args) or ordered_batches(*args, **kw),
    )
    results = evals.evaluate(run, params, 3, ["loss", "recall"])
    assert len(passes) == 1  # Both suites score the same rows.
    store = run.data.train["train"].store
    ends = store.offsets.tolist()
    train = Counter(p for a, b in itertools.pairwise(ends) for p in itertools.pairwise(store.slice(a, b).tolist()))
    nats, tokens = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    rows = run.data.valid["valid"]
    with jax.set_mesh(run.mesh):
        model = nnx.merge(graph(run.config), params)
        forward = jax.jit(lambda tokens, kwargs: model(tokens, **kwargs)[0])
        for i in range(len(rows)):
            row = rows[i]
            names = {"positions": "positions_BT", "segment_ids": "segment_ids_BT"}
            kwargs = {names[name]: row[name][None] for name in names if name in row}
            logits = np.asarray(forward(row["tokens"][None], kwargs)[0], np.float64)
            nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), row["targets"]]
            hits = [h and row["tokens"][t] != 256 for t, h in enumerate(hits_by_brute_force(row, train, 60))]
            for hit, counted, value in zip(hits, row["loss_mask"], nll, strict=True):
                if counted:
                    nats[hit] += value
                    tokens[hit] += 1
    numbers = results["recall"].numbers
    assert (numbers["ar_hit_tokens"], numbers["others_tokens"]) == (tokens[True], tokens[False])
    assert min(tokens.values()) > 10
    assert numbers["ar_hit_loss"] == pytest.approx(nats[True] / tokens[True], rel=1e-6)
    assert numbers["others_loss"] == pytest.approx(nats[False] / tokens[False], rel=1e-6)
    assert numbers["ar_hit_perplexity"] == math.exp(numbers["ar_hit_loss"])
    total = sum(numbers[f"{part}_loss"] * numbers[f"{part}_tokens"] for part in ("ar_hit", "others"))
    loss = results["loss"].details["sets"]["valid"]
    assert total == pytest.approx(loss["loss"] * loss["tokens"], rel=1e-12)
    used = json.loads((tmp_path / "evals" / "recall" / "3.json").read_text())["details"]["bigrams"]
    assert used == {
        "max_count": 60,
        "min_count": 1,
        "distinct": len(train),
        "counted": "the training text, in memory",
        "tokens": len(store),
    }


def test_store_requires_bigram_counts_of_its_tokenizer(config, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(900)))
    store, file = tmp_path / "store", tmp_path / "bigrams"
    lines = [json.dumps({"text": text}) for text in (tmp_path / "in.txt").read_text().splitlines()]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    flags = ["--tokenizer=bytes", "--valid_fraction=0.2", "--workers=1"]
    assert prepare([f"--input={tmp_path / 'in.jsonl'}", f"--out={store}", *flags]) == 0

    def run(**changes):
        return Run.open(config(data__path=store, eval__loss_tokens=512, **changes), tmp_path / "run", one_device())

    with pytest.raises(UserError, match=f"difftx data bigrams {store} --out=FILE"):
        evals.evaluate(run(), None, 0, ["recall"])
    assert data_command(["bigrams", str(store), f"--out={file}", "--min_count=21"]) == 0
    counted = run(eval__bigrams_path=file, eval__recall_max_bigram_count=20)
    result = evals.evaluate(counted, params_of(counted), 0, ["recall"])["recall"]
    assert result.numbers["ar_hit_tokens"] + result.numbers["others_tokens"] == 512
    used = result.details["bigrams"]
    assert (used["counted"], used["min_count"], used["max_count"]) == (str(file), 21, 20)
    assert used["stores"][0]["path"] == str(store)
    with pytest.raises(UserError, match=r"recall_max_bigram_count=19: .* at least 21 times; use at least 20"):
        evals.evaluate(run(eval__bigrams_path=file, eval__recall_max_bigram_count=19), None, 0, ["recall"])
    monkeypatch.setitem(vars(counted.tokenizer), "fingerprint", "0" * 64)
    with pytest.raises(UserError, match="counted with tokenizer 'bytes'"):
        evals.evaluate(counted, None, 0, ["recall"])


def test_counts_have_to_include_the_training_data(config, tmp_path):
    """Counts of another store give wrong slices. More stores may be counted, and the store may be resampled."""
    for name in ("own", "other"):
        lines = (json.dumps({"text": f"{name}: {i} squared is {i * i}." * (1 + i % 3)}) for i in range(300))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        flags = [f"--input={tmp_path / name}.jsonl", f"--out={tmp_path / name}", "--tokenizer=bytes", "--workers=1"]
        assert prepare([*flags, "--valid_fraction=0.2"]) == 0
    for name, stores in {"both": ("own", "other"), "wrong": ("other",)}.items():
        assert data_command(["bigrams", *(str(tmp_path / s) for s in stores), f"--out={tmp_path / name}.bigrams"]) == 0
    for changes in ({}, {"data__upsampling__longer_than_tokens": 50, "data__upsampling__share": 0.9}):
        fields = {"data__path": tmp_path / "own", "eval__loss_tokens": 512, **changes}
        both, wrong = (
            Run.open(config(eval__bigrams_path=tmp_path / f"{name}.bigrams", **fields), tmp_path / "run", one_device())
            for name in ("both", "wrong")
        )
        assert training_counts(both).min_count == 1
        with pytest.raises(UserError, match=f"wrong.bigrams' does not count the training data {tmp_path / 'own'}"):
            training_counts(wrong)
