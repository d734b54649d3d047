"""Training on prompts and responses. Only the tokens of responses count in the loss."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TINY
from flax import nnx
from helpers.command_server import commands

from difftx.data.loader import ordered_batches
from difftx.data.packing import PackedRows
from difftx.data.store import TokenStore
from difftx.parallel.layout import Layout
from difftx.training.loss import batch_loss
from difftx.training.metrics import read_metrics
from difftx.training.state import graph, init_state

LENGTHS = [(5, 7), (9, 2), (1, 20), (12, 4), (3, 1)]  # Tokens of prompt and response.


@pytest.mark.long
@pytest.mark.parametrize("packing", [pytest.param("concat", marks=pytest.mark.exhaustive), "best_fit"])
def test_gradient_equals_that_of_the_responses_without_packing(config, mesh_of, packing, tmp_path):
    """Compare with optax on whole logits.

    The reference has one part of a document per row, so it uses neither packing nor document masks.
    """
    c, mesh, rng = config("transformer", data__document_mask="true"), mesh_of(), np.random.default_rng(0)
    documents = [rng.integers(1, 257, sum(lengths)).astype(np.uint16) for lengths in LENGTHS]
    prompts = [prompt for prompt, _ in LENGTHS]
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.uint64)
    # If the end of a row splits a document, the second part does not attend to the first.
    pieces = [(d, 0, len(document)) for d, document in enumerate(documents)]
    if packing == "concat":
        pieces = [
            (d, max(0, start - int(offsets[d])), min(start + 32, int(offsets[d + 1])) - int(offsets[d]))
            for start in range(0, int(offsets[-1]), 32)
            for d in range(len(documents))
            if offsets[d] < start + 32 and offsets[d + 1] > start
        ]
    counted = np.stack([offsets[:-1] + np.array(prompts, np.uint64), offsets[1:]], axis=1)
    store = TokenStore(np.concatenate(documents), offsets, counted)
    rows = PackedRows(store, sequence_length=32, packing=packing, document_mask=True)
    sharding = jax.NamedSharding(mesh, Layout().act_BT)
    with jax.set_mesh(mesh):
        params = jax.jit(lambda: init_state(c).params)()
        [batch] = ordered_batches(rows, batch_rows=len(rows), limit_tokens=10_000, sharding=sharding, vocab_size=300)

        def packed(params, batch):
            return batch_loss(nnx.merge(graph(c), params), batch)[0]

        def by_hand(params):
            """Return the summed NLL of the responses, with each part of a document in its own row, from position 0."""
            tokens, targets, counts = (np.zeros((len(pieces), 32), np.int32) for _ in range(3))
            for i, (d, first, last) in enumerate(pieces):
                tokens[i, : last - first] = documents[d][first:last]
                for place in range(max(first, prompts[d] - 1), min(last, len(documents[d]) - 1)):
                    targets[i, place - first], counts[i, place - first] = documents[d][place + 1], 1
            logits = jax.sharding.reshard(nnx.merge(graph(c), params)(jnp.asarray(tokens))[0], jax.P())
            return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, targets) * counts)

        gradient = jax.jit(jax.grad(packed))(params, batch)
        expected = jax.jit(jax.grad(by_hand))(params)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.long
def test_fine_tuning_lowers_the_loss_of_responses(tmp_path):
    """Prepare pairs, pre-train on other text, and then train its weights on the pairs, as users do."""
    pairs = [{"prompt": f"{i:03d} reversed is ", "text": f"{i:03d}"[::-1] + ".\n"} for i in range(1000)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "plain.txt").write_text("\n".join(f"{i} squared is {i * i}." for i in range(8000)))

    def run(*command):
        result = commands().run(command)
        assert result.returncode == 0, result.stderr

    def train(name, *flags):
        shared = [f"--config.{field}={value}" for field, value in (TINY | {"train.steps": "60"}).items()]
        common = ["--config.eval.every_steps=20", "--config.optimizer.learning_rate=1e-2"]
        run("train.py", "--config=configs/quickstart.py", f"--workdir={tmp_path / name}", *shared, *common, *flags)
        return list(read_metrics(tmp_path / name / "metrics.jsonl"))

    store = tmp_path / "store"
    flags = ["--tokenizer=bytes", "--prompt_field=prompt", "--valid_fraction=0.1"]
    run("difftx", "prepare", f"--input={tmp_path / 'pairs.jsonl'}", f"--out={store}", *flags)
    train("base", f"--config.data.path={tmp_path / 'plain.txt'}")
    packing = ["--config.data.packing=best_fit", "--config.data.document_mask=true"]
    weights = f"--config.checkpoint.init_from={tmp_path / 'base'}"
    rows = train("tuned", f"--config.data.path={store}", weights, *packing)
    [before] = [row["loss"] for row in rows if row["split"] == "train" and row["step"] == 1]
    after = [row["loss"] for row in rows if row["split"] == "valid" and row["suite"] == "loss"]
    assert after[-1] < 0.7 * before, (before, after)


@pytest.mark.long
def test_validation_rows_without_a_response_are_refused_before_training(tmp_path):
    """The only validation document has a prompt of many rows, and its response is in the last, incomplete row."""
    pairs = [{"prompt": f"{i:03d} reversed is ", "text": f"{i:03d}"[::-1] + ".\n"} for i in range(100)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "valid.jsonl").write_text(json.dumps({"prompt": "a long prompt " * 20, "text": "yes.\n"}))
    files = [f"--input={tmp_path / 'pairs.jsonl'}", f"--valid_input={tmp_path / 'valid.jsonl'}"]
    flags = ["--tokenizer=bytes", "--prompt_field=prompt", f"--out={tmp_path / 'store'}"]
    assert commands().run(["difftx", "prepare", *files, *flags]).returncode == 0

    def dry_run(**changes):
        fields = TINY | {"data.path": tmp_path / "store"} | {k.replace("__", "."): v for k, v in changes.items()}
        shared = [f"--config.{field}={value}" for field, value in fields.items()]
        return commands().run(["train.py", "--config=configs/quickstart.py", "--dry_run", *shared])

    result = dry_run()
    assert result.returncode == 2, result.stderr
    [line] = [line for line in result.stderr.splitlines() if "error" in line]
    assert "suite 'loss': the first 8 rows of " in line
    assert "have no target that counts in the loss" in line
    assert "use data.packing=best_fit, longer rows (data.sequence_length), a larger eval.loss_tokens or more" in line
    result = dry_run(data__packing="best_fit", data__document_mask="true")
    assert result.returncode == 0, result.stderr
    # The incomplete row counts now, but it is not among the first rows.
    assert dry_run(data__packing="best_fit", data__document_mask="true", eval__loss_tokens=64).returncode == 2
